"""Locks of files by which replacing puts, conditional deletes and conditional puts exclude each other.

They are advisory locks of the *current* object's inode: open file description locks, which NFS passes to its server.
Each operation locks the inode exclusively. Of two puts the second waits, and then finds another current object.

They exclude no delete by a program that takes no lock. Such a delete, and a put of the same name behind it, may both
happen between the check of a conditional operation and its change of the name.

Only a process that may write the file can lock it exclusively. A put continues if others hold read locks only, so that
a user who may only read cannot block it. A put by a user who may not write the object takes a read lock: it excludes
deletes, but not other such puts. A user who may not read the object cannot replace it. Lock files use ``flock``, which
does not interact with these locks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hsx_dist.errors import Unavailable

#: Seconds that a put waits for the lock. A holder keeps it for two system calls, unless its process is stopped.
LONGEST_S = 10.0
#: Seconds between two attempts to lock.
_PAUSE_S = 0.002
_BUSY = (errno.EAGAIN, errno.EACCES)
#: Errors of a system or a file system without such locks.
_NO_LOCKS = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
#: Errors of opening a name that is deleted, a link, a socket, a device or a folder, or a running file, or a file for
#: which another process, such as a Samba server, has a lease. A conditional delete cannot open such a name either.
NOT_OPENED = frozenset(
    {errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR, errno.ETXTBSY, errno.EAGAIN}
)
#: Devices whose locks worked in this process, and devices that had none for ``LONGEST_S``.
_locking: set[int] = set()
_lockless: set[int] = set()
#: Linux only: Python's ``fcntl`` does not name them on macOS.
_SET = getattr(fcntl, "F_OFD_SETLK", None)


@contextmanager
def unlocked_after(fd: int) -> Iterator[None]:
    """Release the lock of ``fd`` at the end of the block, and close ``fd``.

    Closing alone would keep the lock while a process that was forked meanwhile has a copy of the descriptor.
    """
    try:
        yield
    finally:
        # Not by ``_lock``: unlocking may succeed on a device without locks, which would count as a lock that worked.
        with suppress(OSError):
            if _SET is not None:
                fcntl.fcntl(fd, _SET, _whole_file(fcntl.F_UNLCK))
        os.close(fd)


def lock_exclusively(fd: int) -> bool:
    """Lock the file, open for writing. Returns False if another process holds the lock.

    Raises:
        OSError: the system or the file system has no such locks (``lacks_locks``), or none for now.
    """
    return _lock(fd, fcntl.F_WRLCK)


def lacks_locks(fd: int, error: OSError) -> bool:
    """Whether ``error`` of locking the file means that its device has no locks.

    NFS has the error ``ENOLCK`` for a lock service that restarts, and for none. It counts only if no lock worked
    before.
    """
    return error.errno in _NO_LOCKS or (error.errno == errno.ENOLCK and os.fstat(fd).st_dev not in _locking)


def lock_for_put(fd: int, what: str) -> None:
    """Lock the file against other puts and conditional deletes.

    If the file is open for reading, or others hold read locks, the lock excludes only deletes and exclusive locks.
    Returns without a lock on systems without such locks. These systems have no conditional deletes either. ``ENOLCK``
    counts as no locks only if it also lasts for ``LONGEST_S``.

    Raises:
        OSError: no lock for now, or the file system's error.
        Unavailable: another process holds the lock for ``LONGEST_S``.
    """
    end, device = time.monotonic() + LONGEST_S, os.fstat(fd).st_dev
    writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    while True:
        late = time.monotonic() > end
        try:
            locked = (writable and _lock(fd, fcntl.F_WRLCK)) or _lock(fd, fcntl.F_RDLCK)
        except OSError as e:
            if not lacks_locks(fd, e):
                raise
            if e.errno != errno.ENOLCK:
                return
            if late or device in _lockless:
                _lockless.add(device)
                return
        else:
            if locked:
                return
            if late:
                raise Unavailable(
                    f"{what}: expected another put or `hsx gc` to release the object, got no lock in {LONGEST_S:g} s. "
                    "End or continue that process"
                )
        time.sleep(_PAUSE_S)


def _lock(fd: int, kind: int) -> bool:
    if _SET is None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    try:
        fcntl.fcntl(fd, _SET, _whole_file(kind))
        locked = True
    except OSError as e:
        if e.errno not in _BUSY:
            raise
        locked = False
    _locking.add(os.fstat(fd).st_dev)
    return locked


def _whole_file(kind: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)
