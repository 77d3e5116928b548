"""Checks of a listing's pages: a store must say how each page continues, and its listing must end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hsx_dist.errors import StoreError


class Advance:
    """Notices a listing that repeats itself, for example because the store ignores the continuation token.

    Keeps one name only: the first, then the second, the fourth, the eighth and so on. In a listing that repeats itself
    for ever, the kept name comes again (Brent's algorithm).
    """

    def __init__(self, where: str):
        """``where``: begins the error's message."""
        self._where = where
        self._kept: str | None = None
        self._count = 0

    def see(self, name: str) -> None:
        """Take the listing's next name. Raises StoreError if it is the kept one."""
        if name == self._kept:
            raise StoreError(
                f"{self._where}: expected each name once, got {name} again: the store repeats a page, and the listing "
                "would not end. Use another store"
            )
        self._count += 1
        if self._count.bit_count() == 1:  # a power of two
            self._kept = name


def next_page(answer: Mapping[str, Any], token: str | None, where: str) -> str | None:
    """Return the continuation token of the next page of S3's ``list_objects_v2``, or None after the last page.

    ``token``: the token of this page. A store that knows only version 1 of the call gives none.

    Raises:
        StoreError: the page is not the last one, and has no new token. The names after it would be missing.
    """
    if not answer.get("IsTruncated"):
        return None
    following = answer.get("NextContinuationToken")
    if not following or following == token:
        raise StoreError(
            f"{where}: expected a page that is not the last one to have a new NextContinuationToken (ListObjectsV2), "
            f"got {'the token of this page' if following else 'none'}: objects would be missing. Use another store"
        )
    return str(following)
