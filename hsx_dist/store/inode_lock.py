"""Locks by which puts that replace an object, and conditional deletes and puts, exclude each other on files.

They are advisory locks of the *current* object's inode (open file descriptions' locks, which NFS passes to its server).
All of them lock it exclusively: of two puts the second one waits, and then finds another current object. Only a process
that may write the file can do so. A put goes on where others lock the file for reading only, so that a user who may
only read cannot stop it; a put of a user who may not write the object excludes deletes, and not other such puts.
Companion locks use ``flock``, which does not interact with them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time

from hsx_dist.errors import Unavailable

#: How long a put waits for another process that holds the lock (for two system calls, unless it is stopped).
LONGEST_S = 10.0
#: Seconds between two tries. The holder needs the lock for two system calls.
_PAUSE_S = 0.002
_BUSY = (errno.EAGAIN, errno.EACCES)
#: Linux only: Python's ``fcntl`` does not name them on macOS.
_SET = getattr(fcntl, "F_OFD_SETLK", None)


def lock_exclusively(fd: int) -> bool:
    """Lock the file, open for writing, until ``fd`` is closed. False when another process holds it.

    Raises:
        OSError: the system, or its file system, has no such locks.
    """
    return _lock(fd, fcntl.F_WRLCK)


def lock_for_put(fd: int, what: str) -> None:
    """Keep other puts and conditional deletes from the file until ``fd`` is closed; only deletes and exclusive locks if
    it is open for reading, or locked for reading. Returns at once where there are no such locks: then there are no
    conditional deletes either.

    Raises:
        Unavailable: another process holds it for ``LONGEST_S``.
    """
    end = time.monotonic() + LONGEST_S
    try:
        writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        while not (writable and _lock(fd, fcntl.F_WRLCK)) and not _lock(fd, fcntl.F_RDLCK):
            if time.monotonic() > end:
                raise Unavailable(
                    f"{what}: expected another put or `hsx gc` to release the object, it holds it for {LONGEST_S:g} s. "
                    "End or continue that process"
                )
            time.sleep(_PAUSE_S)
    except OSError as e:
        if isinstance(e, Unavailable):
            raise


def _lock(fd: int, kind: int) -> bool:
    if _SET is None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    try:
        fcntl.fcntl(fd, _SET, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))
    except OSError as e:
        if e.errno in _BUSY:
            return False
        raise
    return True
