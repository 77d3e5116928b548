"""Writing a file past the kernel's page cache (``O_DIRECT``).

An object is synced before ``put`` returns, and seldom read soon after. The page cache allocates a page for every byte
written; in a virtual machine the host must often allocate that page too. Buffered writes took up to 7 CPU seconds per
GB there, direct writes 0.07 (``benchmarks/NOTES.md``).

Aligned memory is written without a copy, other memory through an aligned buffer. File systems without ``O_DIRECT`` get
buffered writes.
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

#: Smaller files get buffered writes: they take one system call, and may be read soon.
LEAST_BYTES = 1 << 20
#: Size of the buffer of each writing thread.
_BUFFER_BYTES = 4 << 20
#: Direct writes need addresses, lengths and offsets that are multiples of the device's block. That is at most 4 KiB on
#: most devices. A device with larger blocks refuses some writes, and gets the rest of such a file buffered.
_ALIGN = 4096
#: Below this size a copy into the buffer costs less than a separate write.
_WORTH_WRITING = 256 << 10
#: Errors of file systems without ``O_DIRECT``.
_UNKNOWN = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
_FLAG = getattr(os, "O_DIRECT", 0)  # macOS has no such flag

_own = threading.local()


def write_direct(fd: int, views: Sequence[memoryview]) -> bool:
    """Write ``views`` (bytes) one after another to the empty file ``fd``.

    Returns False if direct writes are not possible; then ``fd`` is unchanged.
    """
    if not _FLAG or sum(view.nbytes for view in views) < LEAST_BYTES:
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _FLAG)
    except OSError as e:
        if e.errno not in _UNKNOWN:
            raise
        return False
    try:
        _write(fd, views)
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return True


def _write(fd: int, views: Sequence[memoryview]) -> None:
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
            buffer[filled : filled + n] = data[:n]  # numpy releases the GIL
            data, filled = data[n:], filled + n
            if filled == _BUFFER_BYTES:
                _write_all(fd, buffer)
                filled = 0
    if filled:
        _write_all(fd, buffer[: -(-filled // _ALIGN) * _ALIGN])
        os.ftruncate(fd, total)


def _at_once(data: np.ndarray[Any, Any]) -> int:
    """Number of leading bytes that can be written without a copy."""
    n = len(data) // _ALIGN * _ALIGN
    return n if n >= _WORTH_WRITING and data.ctypes.data % _ALIGN == 0 else 0


def _write_all(fd: int, data: np.ndarray[Any, Any]) -> None:
    while len(data):
        try:
            data = data[os.write(fd, data.data) :]
        except OSError as e:
            # Some file systems accept the flag and refuse the first write, or a part of a block.
            if e.errno not in _UNKNOWN or not fcntl.fcntl(fd, fcntl.F_GETFL) & _FLAG:
                raise
            _continue_buffered(fd)
        if len(data) % _ALIGN:
            # A short write, as on a full disk. Only a buffered write can continue at an unaligned offset, and it
            # raises the cause.
            _continue_buffered(fd)


def _continue_buffered(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_FLAG)


def _buffer() -> np.ndarray[Any, Any]:
    """This thread's buffer, page-aligned because it is a mapping.

    Private: Python's default is shared, so the puts of a forked process would overwrite this process's buffer.
    """
    if not hasattr(_own, "buffer"):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        _own.buffer = np.frombuffer(mmap.mmap(-1, _BUFFER_BYTES, flags=flags), np.uint8)
    return _own.buffer  # type: ignore[no-any-return]
