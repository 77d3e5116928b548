"""Advice to the system about memory of this process. If the system does not take it, nothing changes."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import lru_cache

#: Linux's numbers (``madvise(2)``) of advice that Python's mmap does not name.
_LINUX = {"MADV_POPULATE_READ": 22}


def advise(address: int, nbytes: int, advice: str, *, grain: int = mmap.PAGESIZE) -> bool:
    """Advise on the ``grain``-sized pages that are completely within ``nbytes`` at ``address``. Returns whether the
    system accepted it.

    ``advice``: a name as in ``madvise(2)``, such as ``MADV_HUGEPAGE``; a system may lack it.
    """
    value = getattr(mmap, advice, _LINUX.get(advice) if sys.platform == "linux" else None)
    start = -(-address // grain) * grain
    length = (address + nbytes - start) // grain * grain
    if value is None or length <= 0:
        return False
    return _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(value)) == 0


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
