"""A byte ring over reused host memory. It bounds the bytes between the KV cache and the writers."""

from __future__ import annotations

import sys
import threading
from collections import deque

#: Offsets are multiples of this: a page's rows start on a cache line, and a wide dtype is aligned.
ALIGN = 64


class Ring:
    """Allocates byte ranges of ``capacity`` bytes in order, wrapping; reclaims them in the order of allocation.

    Thread-safe. Only offsets are handed out: the memory itself may be shared with another process, and the process
    that copies into it holds the ``Ring``.
    """

    def __init__(self, capacity: int, most_claimed: int = sys.maxsize):
        """``most_claimed``: limit in bytes of ``claim``."""
        self.capacity = capacity - capacity % ALIGN
        self._most_claimed = most_claimed
        self._claimed = 0
        self._lock = threading.Condition()
        self._head = 0  # start of the next allocation
        self._live: deque[list[int]] = deque()  # [offset, end, freed], oldest first
        self._by_offset: dict[int, list[int]] = {}
        self._used = 0

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of ``nbytes`` contiguous bytes, or None if the ring is too full now.

        Raises:
            ValueError: ``nbytes`` exceed the capacity.
        """
        size = -(-nbytes // ALIGN) * ALIGN
        if size > self.capacity:
            raise ValueError(f"expected at most {self.capacity} bytes, the ring's capacity, got {nbytes}")
        with self._lock:
            offset = self._place(size)
            if offset is None:
                return None
            entry = [offset, offset + size, 0]
            self._live.append(entry)
            self._by_offset[offset] = entry
            self._head = offset + size
            self._used += size
            return offset

    def _place(self, size: int) -> int | None:
        if not self._live:
            return 0
        tail = self._live[0][0]
        if self._head > tail:  # the free space is after the head and, wrapped, before the tail
            if self._head + size <= self.capacity:
                return self._head
            return 0 if size <= tail else None
        return self._head if self._head + size <= tail else None

    def free(self, offset: int) -> None:
        """Free the allocation at an offset that ``allocate`` returned."""
        with self._lock:
            entry = self._by_offset.pop(offset)
            entry[2] = 1
            self._used -= entry[1] - entry[0]
            while self._live and self._live[0][2]:
                self._live.popleft()
            self._lock.notify_all()

    def claim(self, nbytes: int) -> bool:
        """Count ``nbytes`` that a sample occupies outside the ring. Returns False if they exceed the limit now.

        A sample larger than the limit is accepted if no other is counted.
        """
        with self._lock:
            if self._claimed and self._claimed + nbytes > self._most_claimed:
                return False
            self._claimed += nbytes
            return True

    def unclaim(self, nbytes: int) -> None:
        """Subtract bytes that ``claim`` counted."""
        with self._lock:
            self._claimed -= nbytes
            self._lock.notify_all()

    @property
    def claimed_bytes(self) -> int:
        return self._claimed

    def wait(self, timeout: float) -> None:
        """Wait until bytes are freed, at most ``timeout`` seconds."""
        with self._lock:
            if self._live or self._claimed:
                self._lock.wait(timeout)

    @property
    def used_bytes(self) -> int:
        return self._used
