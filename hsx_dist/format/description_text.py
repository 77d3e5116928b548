"""Parsing a description's text, one segment at a time: decoded metadata takes up to 44 times the memory of its text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from hsx_dist.errors import FormatError
from hsx_dist.format.json_objects import check_containers, check_depth, json_decoder, json_errors, parse_json

#: The most lists and objects in one member, or in one segment. 64 KiB of metadata have at most 32,768.
MOST_CONTAINERS = 100_000
#: The most members of a description. Readers know six, and ignore others.
MOST_MEMBERS = 1_000
#: Characters that cannot hold as many.
_UNCHECKED = 1 << 16
#: Characters that are decoded first. Most segments are shorter, and a longer copy for each of them would take seconds.
_WINDOW = 1 << 10
_SPACE = re.compile(r"[ \t\n\r]*")

_Decode = Callable[..., tuple[Any, int]]


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
    """The JSON object in ``text``. In each of its ``segments``, ``meta`` is a ``StoredMeta``.

    ``num_tensors``: tensors in the header's table. Each segment has at least one.

    Raises:
        FormatError: it is not an object as ``parse_json`` accepts, or has too many members or segments, or too many or
            too deep lists and objects.
    """
    with json_errors():
        decode: _Decode = json_decoder(floats=True).raw_decode
        if text.count("[") + text.count("{") > MOST_CONTAINERS:
            decode = partial(_decode_checked, decode)
        body: dict[str, Any] = {}
        at = _after(text, 0, "{")
        more = text[at : at + 1] != "}"
        while more:
            name, at = decode(text, at) if text[at : at + 1] == '"' else (None, at)
            if name is None or name in body:
                raise FormatError(f"expected JSON with each name once, got {str(name)[:40]!a} at character {at}")
            if len(body) == MOST_MEMBERS:
                raise FormatError(f"expected at most {MOST_MEMBERS} members, got more")
            at = _after(text, at, ":")
            if name == "segments" and text[at : at + 1] == "[":
                body[name], at = _segments(text, at, decode, num_tensors)
            else:
                body[name], at = decode(text, at)
            at, more = _next(text, at, "}")
        if _after(text, at, "}") != len(text):
            raise FormatError(f"expected one JSON object, got more after {at} characters")
    return body


def _segments(text: str, at: int, decode: _Decode, num_tensors: int | None) -> tuple[list[Any], int]:
    """The segments in the list at ``at``, and the place after the list."""
    found: list[Any] = []
    at = _after(text, at, "[")
    more = text[at : at + 1] != "]"
    while more:
        if len(found) == num_tensors:  # before the others are parsed: millions take seconds
            raise FormatError(f"segments: expected {num_tensors} tensors, as in the header, got more segments")
        item, at = decode(text, at)
        if isinstance(item, dict) and isinstance(item.get("meta"), dict):
            check_depth(item["meta"], "the description: meta")
            item["meta"] = StoredMeta(item["meta"])
        found.append(item)
        at, more = _next(text, at, "]")
    return found, at + 1


def _decode_checked(decode: _Decode, text: str, at: int) -> tuple[Any, int]:
    """The value at ``at``, and the place after the value. Counts its lists and objects before they are allocated."""
    if text[at : at + 1] not in ("[", "{"):
        return decode(text, at)
    window = _WINDOW
    while window < len(text) - at:
        begin = text[at : at + window]
        if window > _UNCHECKED:
            check_containers(begin.encode("utf-8", "surrogatepass"), MOST_CONTAINERS, "the description")
        try:
            value, size = decode(begin)
        except ValueError:  # longer, or no JSON
            window *= 4
        else:
            return value, at + size
    if window > _UNCHECKED:
        check_containers(text[at:].encode("utf-8", "surrogatepass"), MOST_CONTAINERS, "the description")
    return decode(text, at)


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
