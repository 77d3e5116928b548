"""Advises Linux to use huge pages for large buffers that data is copied through.

With small pages, every 4 KiB of a copy need another address lookup, on a virtual machine through two tables, and every
first touch is a page fault. If the system does not take the advice, nothing changes.
"""

from __future__ import annotations

import mmap

import numpy as np

from hsx_dist.memory import madvise

#: Bytes of a huge page on x86-64, and on arm64 with pages of 4 KiB.
_HUGE = 2 << 20


def advise(address: int, nbytes: int) -> bool:
    """Advise huge pages for ``nbytes`` at ``address``. Returns whether the system accepts the advice. Memory that was
    touched before keeps its small pages."""
    return madvise.advise(address, nbytes, "MADV_HUGEPAGE", grain=_HUGE)


def zeroed(nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Zeroed memory, uint8 ``[nbytes]``. All pages are touched."""
    # Private: the setting for huge pages of shared memory is separate, and off by default.
    mapped = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(mapped, np.uint8)[:nbytes]
    advise(memory.ctypes.data, nbytes)
    memory.fill(0)
    return memory
