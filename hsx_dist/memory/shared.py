"""Host memory that two processes map, for a ring that one process fills and the other empties."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np


def reserve(nbytes: int) -> int:
    """Return a file descriptor of ``nbytes`` of zeroed memory.

    Raises:
        OSError: there is not enough memory. Without the reservation, the engine would get a SIGBUS later.
    """
    fd = os.memfd_create("hsx-ring")
    try:
        os.ftruncate(fd, nbytes)
        os.posix_fallocate(fd, 0, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_memory(fd: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Map the memory behind ``fd``: uint8 ``[nbytes]``. The caller may close the descriptor."""
    # All pages at once: a page fault costs three times the copy of the page.
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return np.frombuffer(mmap.mmap(fd, nbytes, flags), dtype=np.uint8)
