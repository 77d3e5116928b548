"""The number of a mount. Linux gives it to no other mount until the machine restarts.

Device numbers of file systems without a block device (NFS, CIFS, tmpfs, FUSE) and the mount ids of ``/proc`` are used
again for the next mount.
"""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from typing import Any

_AT_EMPTY_PATH = 0x1000
_AT_STATX_DONT_SYNC = 0x4000  # no request to a file server
_STATX_MNT_ID_UNIQUE = 0x4000


class _Statx(ctypes.Structure):
    """``struct statx`` (``statx(2)``), with the members before and behind the mount id as gaps."""

    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("before", ctypes.c_uint32 * 35),
        ("mount", ctypes.c_uint64),
        ("behind", ctypes.c_uint64 * 13),
    )


def mount_id(fd: int) -> int | None:
    """Return the number of the mount of an open file or folder. None before Linux 6.8, and on other systems."""
    statx = _statx()
    if statx is None:
        return None
    found = _Statx()
    failed = statx(fd, b"", _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC, _STATX_MNT_ID_UNIQUE, ctypes.byref(found))
    return None if failed or not found.mask & _STATX_MNT_ID_UNIQUE else int(found.mount)


@lru_cache(maxsize=1)
def _statx() -> Any:
    """Return the C library's function, or None. Python has ``os.statx`` since 3.15 only."""
    statx = getattr(ctypes.CDLL(None), "statx", None) if sys.platform == "linux" else None
    if statx is not None:
        statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(_Statx))
        statx.restype = ctypes.c_int
    return statx
