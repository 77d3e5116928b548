"""Proof that the answer to a request for a range has the asked bytes. Another answer may be the page of a gateway."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hsx_dist.errors import Unavailable

_CONTENT_RANGE = re.compile(r"bytes ([0-9]+)-([0-9]+)/([0-9]+|\*)", re.IGNORECASE)
#: Types of pages and of lists of files. Web servers and object stores send them for a folder.
PAGES = ("text/html", "application/xhtml+xml", "text/xml", "application/xml")


@dataclass(frozen=True, slots=True)
class AnsweredPart:
    """The number of bytes that an answer names from the first asked one, and the object's size if it names that."""

    nbytes: int
    size: int | None


def part_of(status: int | None, content_range: str | None, start: int, stop: int) -> AnsweredPart | None:
    """Return the part of ``[start, stop)`` that the answer to a request for this range names, or None."""
    named = _CONTENT_RANGE.fullmatch(content_range or "")
    if status != 206 or named is None:
        return None
    first, last = int(named[1]), int(named[2])
    if not (first == start and first <= last < stop):
        return None
    return AnsweredPart(last - first + 1, None if named[3] == "*" else int(named[3]))


def names_all(content_range: str, nbytes: int | None) -> bool:
    """Whether a ``Content-Range`` names all bytes of an object. Some servers send it with the whole object.

    ``nbytes``: the answer's length, if it is stated.
    """
    named = _CONTENT_RANGE.fullmatch(content_range)
    if named is None or int(named[1]) != 0 or named[3] != str(int(named[2]) + 1):
        return False
    return nbytes in (None, int(named[3]))


def require_part(where: str, part: AnsweredPart | None, start: int, stop: int, got: int) -> None:
    """Check the ``got`` bytes of an answer that names ``part``.

    Raises:
        Unavailable: the answer names other bytes or none, or has not all bytes of the range that the object has.
    """
    if part is not None and got == part.nbytes:
        size = start + got if part.size is None else part.size
        if start + got == min(stop, size):
            return
    raise Unavailable(
        f"get {where}: expected the bytes [{start}, {stop}) as a part (status 206, Content-Range), got another answer. "
        "Check that the endpoint is the store, and no proxy"
    )
