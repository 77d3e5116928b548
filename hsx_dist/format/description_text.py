"""Parsing a description's text, one segment at a time: decoded metadata takes up to 44 times the memory of its text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from hsx_dist.errors import FormatError
from hsx_dist.format.json_objects import check_depth, count_members, json_decoder, json_errors, parse_json, too_many
from hsx_dist.format.segment_info import SEGMENT_MEMBERS, check_nesting

#: The most lists and objects, and the most members of objects, in one member, or in one segment. 64 KiB of metadata
#: have at most 32,768.
MOST_CONTAINERS = 100_000
#: The most members of a description. Readers know five, and skip others.
MOST_MEMBERS = 1_000
#: Characters that are decoded at once. Most segments are shorter, and a longer copy for each of them takes seconds.
_WINDOW = 1 << 11
_SPACE = re.compile(r"[ \t\n\r]*")
#: Repetitions are possessive (``*+``): for others ``re`` keeps 110 bytes each.
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_TO_BRACKET = re.compile(rf'[^"\[\]{{}}]*+(?:{_STRING.pattern}[^"\[\]{{}}]*+)*+([\[\]{{}}])', re.DOTALL)
_DECODE = json_decoder(floats=True).raw_decode

#: Reads the value at a place. Returns the value and the place after it.
_Read = Callable[[str, int], tuple[Any, int]]
#: The whole segment is checked before its members are decoded.
_OF_SEGMENT: Mapping[str, _Read] = dict.fromkeys(SEGMENT_MEMBERS, _DECODE)


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
    known: dict[str, _Read] = dict.fromkeys(("codec", "about", "schema"), _checked)
    known |= {"common": _common, "segments": partial(_segments, num_tensors=num_tensors)}
    with json_errors():
        body, at = _object(text, 0, known)
        if _skip(text, at) != len(text):
            raise FormatError(f"expected one JSON object, got more after {at} characters")
    return body


def _object(text: str, at: int, known: Mapping[str, _Read]) -> tuple[dict[str, Any], int]:
    """The members of the object at ``at`` that are in ``known``, and the place after the object."""
    body: dict[str, Any] = {}
    count = 0
    at = _after(text, at, "{")
    more = text[at : at + 1] != "}"
    while more:
        name, at = _DECODE(text, at) if text[at : at + 1] == '"' else (None, at)
        if name is None or name in body:
            raise FormatError(f"expected JSON with each name once, got {str(name)[:40]!a} at character {at}")
        count += 1
        if count > MOST_MEMBERS:
            raise FormatError(f"expected at most {MOST_MEMBERS} members, got more")
        at = _after(text, at, ":")
        if name in known:
            body[name], at = known[name](text, at)
        else:
            at = _end(text, at)
        at, more = _next(text, at, "}")
    return body, at + 1


def _checked(text: str, at: int) -> tuple[Any, int]:
    """The value at ``at``, and the place after it. Counts its lists, objects and members before they are allocated."""
    if text[at : at + 1] in ("[", "{"):
        _end(text, at)
    return _DECODE(text, at)


def _common(text: str, at: int) -> tuple[dict[str, Any], int]:
    _end(text, at)
    return _object(text, at, _OF_SEGMENT)


def _segments(text: str, at: int, num_tensors: int | None) -> tuple[list[Any], int]:
    """The segments in the list at ``at``, and the place after the list."""
    found: list[Any] = []
    at = _after(text, at, "[")
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
        at, more = _next(text, at, "]")
    return found, at + 1


def _segment(text: str, at: int) -> tuple[dict[str, Any], int]:
    """The members of the segment at ``at`` that readers know, and the place after the segment."""
    try:
        item, size = _DECODE(text[at : at + _WINDOW])
    except ValueError:  # longer, or no JSON
        _end(text, at)
        return _object(text, at, _OF_SEGMENT)
    if not isinstance(item, dict):
        raise FormatError(f"segments: expected JSON objects, got {text[at : at + 40]!a} at character {at}")
    if not item.keys() <= SEGMENT_MEMBERS:
        item = {name: value for name, value in item.items() if name in SEGMENT_MEMBERS}
    return item, at + size


def _end(text: str, at: int) -> int:
    """The place after the value at ``at``, which is not decoded. Counts its lists, objects and members."""
    if text[at : at + 1] not in ("[", "{"):
        string = _STRING.match(text, at)
        return string.end() if string else _DECODE(text, at)[1]
    begin, found, depth = at, 0, 0
    while (token := _TO_BRACKET.match(text, at)) is not None:
        at = token.end()
        if token[1] in "[{":
            found, depth = found + 1, depth + 1
            if found > MOST_CONTAINERS:
                raise too_many("the description", MOST_CONTAINERS, "lists and objects")
        else:
            depth -= 1
            if not depth:
                break
    else:
        raise FormatError(f"expected JSON, got a list or an object without end before character {len(text)}")
    # Most texts have few colons, also with those in strings. Counting these takes no time.
    most = MOST_CONTAINERS
    if text.count(":", begin, at) > most and count_members(text, most + 1, begin, at) > most:
        raise too_many("the description", most, "members of objects")
    return at


def _after(text: str, at: int, mark: str) -> int:
    """The place of the next value or mark after ``mark``, which is at ``at`` or behind whitespace."""
    at = _skip(text, at)
    if text[at : at + 1] != mark:
        raise FormatError(f"expected JSON with {mark!r} at character {at}, got {text[at : at + 40]!a}")
    return _skip(text, at + 1)


def _next(text: str, at: int, end: str) -> tuple[int, bool]:
    """The place of the next member or of ``end``, and whether there is another member."""
    at = _skip(text, at)
    return (at, False) if text[at : at + 1] == end else (_after(text, at, ","), True)


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None, "the pattern matches an empty string"
    return found.end()
