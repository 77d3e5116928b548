"""Memory that encoded parts leave behind is used again, instead of being given back and faulted in anew."""

from __future__ import annotations

import ctypes

# glibc's <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc's own limit on 64-bit machines


def keep_freed_memory(nbytes: int) -> bool:
    """Let this process keep up to ``nbytes`` of freed memory; for a process that does nothing but write parts.

    Buffers of a MiB are otherwise mapped and unmapped one by one, and page faults take a fifth of a writer's time
    (benchmarks/NOTES.md). Call it before threads are started. ``False`` where the C library has no such setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = {
        _M_MMAP_THRESHOLD: _LARGEST_MMAP_THRESHOLD,
        _M_TRIM_THRESHOLD: min(nbytes, 2**31 - 1),
        _M_ARENA_MAX: 1,  # other arenas unmap what is freed whatever the threshold
    }
    return all(mallopt(name, value) == 1 for name, value in settings.items())
