"""The members of a JSON object that a reader knows. Others are skipped and not decoded."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from hsx_dist.errors import FormatError
from hsx_dist.format.json_objects import count_members, json_decoder, json_errors, too_many
from hsx_dist.text import head

#: The most members of an object. Readers know few, and skip others.
MOST_MEMBERS = 1_000
_SPACE = re.compile(r"[ \t\n\r]*")
#: Repetitions are possessive (``*+``): for others ``re`` keeps 110 bytes each.
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_TO_BRACKET = re.compile(rf'[^"\[\]{{}}]*+(?:{_STRING.pattern}[^"\[\]{{}}]*+)*+([\[\]{{}}])', re.DOTALL)
_DECODE = json_decoder(floats=True).raw_decode

#: Reads the value at a place. Returns the value and the place after it.
ReadValue = Callable[[str, int], tuple[Any, int]]
#: Finds the place after the value at a place.
FindEnd = Callable[[str, int], int]


def parse_members(text: str, known: Mapping[str, ReadValue], skip: FindEnd) -> dict[str, Any]:
    """The members of the JSON object in ``text`` that are in ``known``. ``skip`` passes over others.

    Raises:
        FormatError: it is not a JSON object, or has more than ``MOST_MEMBERS`` members. Lists and objects that are
            skipped may have other errors.
    """
    with json_errors():
        body, at = members_at(text, 0, known, skip)
        if _skip(text, at) != len(text):
            raise FormatError(f"expected one JSON object, got more after {at} characters")
    return body


def members_at(text: str, at: int, known: Mapping[str, ReadValue], skip: FindEnd) -> tuple[dict[str, Any], int]:
    """The members of the object at ``at`` that are in ``known``, and the place after the object."""
    body: dict[str, Any] = {}
    count = 0
    at = after_mark(text, at, "{")
    more = text[at : at + 1] != "}"
    while more:
        name, at = _DECODE(text, at) if text[at : at + 1] == '"' else (None, at)
        if name is None or name in body:
            raise FormatError(f"expected JSON with each name once, got {head(str(name), 40)!a} at character {at}")
        count += 1
        if count > MOST_MEMBERS:
            raise FormatError(f"expected at most {MOST_MEMBERS} members, got more")
        at = after_mark(text, at, ":")
        if name in known:
            body[name], at = known[name](text, at)
        else:
            at = skip(text, at)
        at, more = next_item(text, at, "}")
    return body, at + 1


def end_of(text: str, at: int, most: int, what: str) -> int:
    """The place after the value at ``at``, which is not decoded.

    ``FormatError`` if it has more than ``most`` lists and objects, or members. ``what``: its name in the error.
    """
    if text[at : at + 1] not in ("[", "{"):
        string = _STRING.match(text, at)
        return string.end() if string else _DECODE(text, at)[1]
    begin, found, depth = at, 0, 0
    while (token := _TO_BRACKET.match(text, at)) is not None:
        at = token.end()
        if token[1] in "[{":
            found, depth = found + 1, depth + 1
            if found > most:
                raise too_many(what, most, "lists and objects")
        else:
            depth -= 1
            if not depth:
                break
    else:
        raise FormatError(f"expected JSON, got a list or an object without end before character {len(text)}")
    # Most texts have few colons, also with those in strings. Counting these takes no time.
    if text.count(":", begin, at) > most and count_members(text, most + 1, begin, at) > most:
        raise too_many(what, most, "members of objects")
    return at


def after_mark(text: str, at: int, mark: str) -> int:
    """The place of the next value or mark after ``mark``, which is at ``at`` or behind whitespace."""
    at = _skip(text, at)
    if text[at : at + 1] != mark:
        raise FormatError(f"expected JSON with {mark!r} at character {at}, got {text[at : at + 40]!a}")
    return _skip(text, at + 1)


def next_item(text: str, at: int, end: str) -> tuple[int, bool]:
    """The place of the next member or of ``end``, and whether there is another member."""
    at = _skip(text, at)
    return (at, False) if text[at : at + 1] == end else (after_mark(text, at, ","), True)


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None, "the pattern matches an empty string"
    return found.end()
