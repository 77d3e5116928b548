"""Reading one object once, from start to end, with its checksum."""

from __future__ import annotations

from collections.abc import Sequence

from hsx_dist.format.checksum import crc32c, crc32c_hex
from hsx_dist.store import ObjectInfo, Store

#: Bytes that one request fetches.
BLOCK = 8 << 20


class PartStream:
    """A source that reads one object once from start to end, in blocks, and computes its checksum.

    Ranges in the current block or after it are served from the stream. Earlier ranges are fetched again.
    """

    def __init__(self, store: Store, name: str, size: int):
        self.url, self.name, self.size = store.url, name, size
        self._store = store
        self._at = 0  # offset of ``_held`` in the object
        self._held = bytearray()
        self._crc = 0

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        return [self._range(name, a, b) for a, b in ranges]

    def head(self, name: str) -> ObjectInfo:
        return ObjectInfo(name, self.size)

    def _range(self, name: str, start: int, stop: int) -> memoryview:
        if start < self._at:
            return self._store.get_ranges(name, [(start, stop)])[0]
        if stop > self.size:
            raise ValueError(f"{name}: expected at least {stop} bytes, got {self.size}")
        while self._end < stop:
            if self._end < start:
                self._drop(self._end)
            self._read()
        self._drop(start)
        return memoryview(bytes(self._held[: stop - start]))

    def finish(self) -> str:
        """Read the rest of the object. Return the checksum of all its bytes, as in receipts."""
        while self._end < self.size:
            self._drop(self._end)
            self._read()
        return crc32c_hex(self._crc)

    @property
    def _end(self) -> int:
        return self._at + len(self._held)

    def _read(self) -> None:
        [block] = self._store.get_ranges(self.name, [(self._end, min(self._end + BLOCK, self.size))])
        self._crc = crc32c(block, self._crc)
        self._held += block

    def _drop(self, start: int) -> None:
        del self._held[: start - self._at]
        self._at = start
