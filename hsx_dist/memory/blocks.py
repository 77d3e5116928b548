"""Reused blocks of memory for encoded bytes. Returning them to the system would cost new page faults."""

from __future__ import annotations

import bisect
import mmap
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np

#: Smaller blocks come from the allocator, which keeps them anyway. Each block is a mapping, and Linux allows 65,530
#: mappings.
_SMALL = 64 << 10
#: Sizes are rounded up to multiples of this size, so that a block can be reused for almost the same size.
_GRAIN = 16 << 10


class BlockPool:
    """Returns arrays, and reuses their memory when nothing refers to them any more. Thread-safe.

    A part's buffers have some hundred KiB each, live for seconds, and are freed together. The C library maps and unmaps
    each of them, and page faults take a fifth of a writer's time. If it keeps freed memory (``mallopt``), fragmentation
    adds half as much again (benchmarks/NOTES.md). This pool is bounded: used and free blocks together stay within
    ``limit`` bytes, unless the used blocks alone exceed it.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._lock = threading.Lock()
        self._free: list[tuple[int, int, mmap.mmap]] = []  # sorted by size; the second number makes entries unique
        self._total = 0  # of blocks in use and free ones
        self._serial = 0
        # A finalizer runs where the last reference is dropped, which may be a call of this class that holds the lock.
        self._returned: deque[mmap.mmap] = deque()

    def take(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Return uint8 ``[nbytes]`` with arbitrary content. Its memory is not reused while anything refers to it."""
        if nbytes < _SMALL:
            return np.empty(nbytes, np.uint8)
        with self._lock:
            block = self._fitting(nbytes)
        whole = np.frombuffer(block, np.uint8)
        weakref.finalize(whole, self._returned.append, block).atexit = False
        return whole[:nbytes]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, in use or free."""
        self.trim()
        return self._total

    def trim(self) -> None:
        """Unmap free blocks beyond the limit."""
        with self._lock:
            self._collect()
            self._trim(0)

    def _fitting(self, nbytes: int) -> mmap.mmap:
        """The smallest free block that is large enough and not wasteful, or a new one."""
        self._collect()
        at = bisect.bisect_left(self._free, (nbytes,))
        if at < len(self._free) and self._free[at][0] <= nbytes + nbytes // 4:
            # The block is taken before free blocks are unmapped. Used blocks may exceed the limit for a moment, and a
            # block that was just returned would otherwise be unmapped and mapped again each time.
            block = self._free.pop(at)[2]
            self._trim(0)
            return block
        size = -(-nbytes // _GRAIN) * _GRAIN
        self._trim(size)
        self._total += size
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._serial += 1
            bisect.insort(self._free, (len(block), self._serial, block))

    def _trim(self, more: int) -> None:
        """Unmap free blocks until there is room for ``more`` bytes within the limit."""
        while self._free and self._total + more > self._limit:
            self._total -= self._free.pop()[0]  # unmapped with its last reference
