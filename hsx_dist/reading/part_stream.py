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
        self._at = 0  # offset of ``_block`` in the object
        self._block = memoryview(b"")
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
        while self._end < start:
            self._read()
        if stop <= self._end:
            return self._block[start - self._at : stop - self._at]
        found, at = bytearray(stop - start), start  # once, also for a range of gigabytes
        while True:
            piece = self._block[at - self._at : stop - self._at]
            found[at - start : at - start + len(piece)] = piece
            at += len(piece)
            if at == stop:
                return memoryview(found)
            self._read()

    def finish(self) -> str:
        """Read the rest of the object. Return the checksum of all its bytes, as in receipts."""
        while self._end < self.size:
            self._read()
        return crc32c_hex(self._crc)

    @property
    def _end(self) -> int:
        return self._at + len(self._block)

    def _read(self) -> None:
        """Replace the block by the next one."""
        end, self._block = self._end, memoryview(b"")
        self._at = end
        [self._block] = self._store.get_ranges(self.name, [(end, min(end + BLOCK, self.size))])
        self._crc = crc32c(self._block, self._crc)
