"""Parsing a description's text, one segment at a time: decoded metadata takes up to 44 times the memory of its text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from hsx_dist.errors import FormatError
from hsx_dist.format.json_objects import check_depth, json_decoder, parse_json
from hsx_dist.format.known_members import ReadValue, after_mark, end_of, members_at, next_item, parse_members
from hsx_dist.format.segment_info import SEGMENT_MEMBERS, check_nesting

#: The most lists and objects, and the most members of objects, in one member, or in one segment. 64 KiB of metadata
#: have at most 32,768.
MOST_CONTAINERS = 100_000
#: Characters that are decoded at once. Most segments are shorter, and a longer copy for each of them takes seconds.
_WINDOW = 1 << 11
_DECODE = json_decoder(floats=True).raw_decode

#: The whole segment is checked before its members are decoded.
_OF_SEGMENT: Mapping[str, ReadValue] = dict.fromkeys(SEGMENT_MEMBERS, _DECODE)


class StoredMeta(Mapping[str, Any]):
    """A segment's ``meta``. Its lists and objects are kept as JSON text, and decoded at each access."""

    __slots__ = ("_encoded", "_members")

    def __init__(self, meta: Mapping[str, Any]):
        self._encoded = frozenset(name for name, value in meta.items() if isinstance(value, list | dict))
        self._members = {k: _compact(v) if k in self._encoded else v for k, v in meta.items()}

    def __getitem__(self, name: str) -> Any:
        value = self._members[name]
        return parse_json(value, floats=True) if name in self._encoded else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __repr__(self) -> str:
        return repr(dict(self))


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def parse_description(text: str, num_tensors: int | None = None) -> dict[str, Any]:
    """The members of the JSON object in ``text`` that readers know. In each of its ``segments``, ``meta`` is a
    ``StoredMeta``. Other members are skipped and not decoded.

    ``num_tensors``: tensors in the header's table. Each segment has at least one.

    Raises:
        FormatError: it is not an object as ``parse_json`` accepts, or has too many members or segments, or too many or
            too deep lists and objects. Lists and objects that are skipped may have other errors.
    """
    known: dict[str, ReadValue] = dict.fromkeys(("codec", "about", "schema"), _checked)
    known |= {"common": _common, "segments": partial(_segments, num_tensors=num_tensors)}
    return parse_members(text, known, _end)


def _checked(text: str, at: int) -> tuple[Any, int]:
    """The value at ``at``, and the place after it. Counts its lists, objects and members before they are allocated."""
    if text[at : at + 1] in ("[", "{"):
        _end(text, at)
    return _DECODE(text, at)


def _common(text: str, at: int) -> tuple[dict[str, Any], int]:
    _end(text, at)
    return members_at(text, at, _OF_SEGMENT, _end)


def _segments(text: str, at: int, num_tensors: int | None) -> tuple[list[Any], int]:
    """The segments in the list at ``at``, and the place after the list."""
    found: list[Any] = []
    at = after_mark(text, at, "[")
    more = text[at : at + 1] != "]"
    while more:
        if len(found) == num_tensors:  # before the others are parsed: millions take seconds
            raise FormatError(f"segments: expected {num_tensors} tensors, as in the header, got more segments")
        item, at = _segment(text, at)
        try:  # before the others are decoded
            check_nesting(item)
        except FormatError as e:
            raise FormatError(f"segment {len(found)}: {e}") from e
        if isinstance(item.get("meta"), dict):
            check_depth(item["meta"], "the description: meta")
            item["meta"] = StoredMeta(item["meta"])
        found.append(item)
        at, more = next_item(text, at, "]")
    return found, at + 1


def _segment(text: str, at: int) -> tuple[dict[str, Any], int]:
    """The members of the segment at ``at`` that readers know, and the place after the segment."""
    try:
        item, size = _DECODE(text[at : at + _WINDOW])
    except ValueError:  # longer, or no JSON
        _end(text, at)
        return members_at(text, at, _OF_SEGMENT, _end)
    if not isinstance(item, dict):
        raise FormatError(f"segments: expected JSON objects, got {text[at : at + 40]!a} at character {at}")
    if not item.keys() <= SEGMENT_MEMBERS:
        item = {name: value for name, value in item.items() if name in SEGMENT_MEMBERS}
    return item, at + size


def _end(text: str, at: int) -> int:
    """The place after the value at ``at``, which is not decoded. Counts its lists, objects and members."""
    return end_of(text, at, MOST_CONTAINERS, "the description")
