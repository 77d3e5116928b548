"""Limits what a jump fetches in tables and zip files of a web server or an object store.

fsspec reads 5 to 50 MiB ahead after each jump. A footer, or the directory of a zip file, may name parts in an order
that makes each read a jump.
"""

from __future__ import annotations

from typing import Any

from fsspec.caching import ReadAheadCache

#: Bytes that are read ahead after a jump, and at most. A jump skips more than ``_LEAST`` bytes, or goes back.
_LEAST, _MOST = 1 << 16, 5 << 20
#: A file of at most so many bytes is fetched whole. Servers without ranges, such as Python's, give only whole files.
_WHOLE = _MOST
#: Default caches of fsspec's file systems. Others are in a chosen URL (``blockcache::``) or option.
_DEFAULTS = ("adaptive", "bytes", "readahead")


class GrowingReadAhead(ReadAheadCache):  # type: ignore[misc]
    """Reads ahead as many bytes as were read since the last jump, so parts in order need few requests."""

    name = "growing"

    def __init__(self, fetcher: Any, size: int) -> None:
        super().__init__(_LEAST, fetcher, size)
        self._began = self._ended = 0

    def _fetch(self, start: int | None, end: int | None) -> bytes:
        start, end = start or 0, self.size if end is None else end
        if self.size <= _WHOLE and not self.cache:
            self.blocksize = 0
            super()._fetch(0, self.size)
        if not 0 <= start - self._ended <= _LEAST:
            self._began = start
        self._ended = end
        self.blocksize = min(max(_LEAST, start - self._began), _MOST)
        return super()._fetch(start, end)  # type: ignore[no-any-return]


def limit_read_ahead(file: Any) -> None:
    """Replace the cache of fsspec's ``file`` by ``GrowingReadAhead``, if it has a default one."""
    cache = getattr(file, "cache", None)
    if getattr(cache, "name", None) in _DEFAULTS:
        file.cache = GrowingReadAhead(file._fetch_range, file.size)
        # Ends the tasks of an adaptive cache. Not by the instance's close, which gcsfs replaces.
        getattr(type(cache), "close", lambda _: None)(cache)


def fetched_bytes(file: Any) -> int:
    """Return the bytes that a file with ``GrowingReadAhead`` fetched so far. Other files do not count them: 0."""
    cache = getattr(file, "cache", None)
    return int(cache.total_requested_bytes) if isinstance(cache, GrowingReadAhead) else 0
