"""Limits what a jump fetches in tables and zip files of a web server or an object store.

fsspec reads 5 to 50 MiB ahead after each jump. A footer, or the directory of a zip file, may name parts in an order
that makes each read a jump.
"""

from __future__ import annotations

from typing import Any

from fsspec.caching import ReadAheadCache

from hsx_dist.inputs.whole_file import not_whole, whole_ranges

#: Bytes that are read ahead after a jump, and at most. A jump skips more than ``_LEAST`` bytes, or goes back.
_LEAST, _MOST = 1 << 16, 5 << 20
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
        if not 0 <= start - self._ended <= _LEAST:
            self._began = start
        self._ended = end
        self.blocksize = min(max(_LEAST, start - self._began), _MOST)
        return super()._fetch(start, end)  # type: ignore[no-any-return]


def check_fetched(file: Any, shown: str, *, in_order: bool) -> None:
    """Make fsspec's ``file`` raise ``Unavailable`` for an answer that has not exactly the bytes that were asked for.

    Replaces a default cache. A file that is read ``in_order`` keeps its size of a block, others get
    ``GrowingReadAhead``.
    """
    cache = getattr(file, "cache", None)
    if cache is None or file.size is None:
        return
    fetch = whole_ranges(file, shown)
    if cache.name in _DEFAULTS:
        file.cache = (
            ReadAheadCache(file.blocksize, fetch, file.size) if in_order else GrowingReadAhead(fetch, file.size)
        )
        # Ends the tasks of an adaptive cache. Not by the instance's close, which gcsfs replaces.
        getattr(type(cache), "close", lambda _: None)(cache)
        return

    def fetched(start: int, end: int) -> bytes:
        try:
            return fetch(start, end)
        except BaseException:
            if hasattr(cache, "blocks"):
                cache.blocks.clear()  # fsspec marks a block of blockcache:: as stored before it fetches it
            raise

    data = getattr(cache, "data", None)
    if isinstance(data, bytes) and len(data) != file.size:  # fetched when it was opened; the cache "parts" has a dict
        raise not_whole(shown, file.size, str(len(data)))
    cache.fetcher, cache.multi_fetcher = fetched, None


def fetched_bytes(file: Any) -> int:
    """Return the bytes that a file with ``GrowingReadAhead`` fetched so far. Other files do not count them: 0."""
    cache = getattr(file, "cache", None)
    return int(cache.total_requested_bytes) if isinstance(cache, GrowingReadAhead) else 0
