"""Writing a file past the kernel's page cache (``O_DIRECT``).

What is stored here is synced before it counts, and not read again soon. Through the page cache every byte first takes a
fresh page, on virtual machines one that the host has to find as well: up to 7 CPU seconds a GB were measured there,
where this takes 0.07 (``benchmarks/NOTES.md``). What lies in memory as a disk wants it goes out from there, the rest
through a buffer. File systems that cannot do it are written to as usual.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

#: Less is written as usual: a small file is written in one go, and may well be read soon.
LEAST_BYTES = 1 << 20
#: What a thread that writes holds: memory, lengths and offsets must be multiples of a device's block, at most 4 KiB.
_BUFFER_BYTES = 4 << 20
_ALIGN = 4096
#: Copying less than this costs less than a write of its own.
_WORTH_WRITING = 256 << 10
#: What file systems say that do not know it; Linux has the flag, and macOS has not.
_UNKNOWN = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
_FLAG = getattr(os, "O_DIRECT", 0)

_own = threading.local()


def write_direct(fd: int, views: Sequence[memoryview]) -> bool:
    """Write ``views`` (bytes) one after another to the empty file ``fd``; whether it could be done. If not, nothing is
    written, and ``fd`` is as it was."""
    if not _FLAG or sum(view.nbytes for view in views) < LEAST_BYTES:
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _FLAG)
        return _write(fd, views)
    except OSError as e:
        # Some file systems take the flag and refuse the first write.
        if e.errno not in _UNKNOWN or os.lseek(fd, 0, os.SEEK_CUR):
            raise
        return False
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def _write(fd: int, views: Sequence[memoryview]) -> bool:
    buffer = _buffer()
    filled = total = 0
    for view in views:
        data = np.frombuffer(view, np.uint8)
        total += len(data)
        while len(data):
            if filled % _ALIGN == 0 and (n := _at_once(data)):
                _write_all(fd, buffer[:filled])
                _write_all(fd, data[:n])
                data, filled = data[n:], 0
                continue
            n = min(len(data), _BUFFER_BYTES - filled)
            buffer[filled : filled + n] = data[:n]  # numpy lets other threads run meanwhile
            data, filled = data[n:], filled + n
            if filled == _BUFFER_BYTES:
                _write_all(fd, buffer)
                filled = 0
    if filled:
        _write_all(fd, buffer[: -(-filled // _ALIGN) * _ALIGN])
        os.ftruncate(fd, total)
    return True


def _at_once(data: np.ndarray[Any, Any]) -> int:
    """How many bytes of it can be written from where they are."""
    n = len(data) // _ALIGN * _ALIGN
    return n if n >= _WORTH_WRITING and data.ctypes.data % _ALIGN == 0 else 0


def _write_all(fd: int, data: np.ndarray[Any, Any]) -> None:
    while len(data):
        data = data[os.write(fd, data.data) :]
        if len(data) % _ALIGN:
            # Cut short, as on a disk that is full: only the usual way goes on from anywhere, and says what is wrong.
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_FLAG)


def _buffer() -> np.ndarray[Any, Any]:
    """This thread's, aligned as a mapping is."""
    if not hasattr(_own, "buffer"):
        _own.buffer = np.frombuffer(mmap.mmap(-1, _BUFFER_BYTES), np.uint8)
    return _own.buffer  # type: ignore[no-any-return]
