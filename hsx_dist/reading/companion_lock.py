"""The lock that a server on this file system holds beside an object until what became of its request is stored."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hsx_dist.errors import Denied, NotFound
from hsx_dist.format.companions import lock_name
from hsx_dist.store.folders import SAFELY


@contextmanager
def shared_lock(path: str) -> Iterator[None]:
    """Hold ``PATH.lock`` shared, where there is one. Never waits.

    Raises:
        NotFound: a server holds it: what lies at ``path`` is not what its latest request asked for.
        Denied: this user may not read the lock file.
    """
    fd = _take(path)
    try:
        yield
    finally:
        if fd is not None:
            os.close(fd)


@contextmanager
def exclusive_lock(path: str) -> Iterator[bool]:
    """Hold ``PATH.lock`` alone, where there is one: whether there is one. Never waits.

    Raises:
        NotFound: a server or a reader holds it.
    """
    fd = _take(path, alone=True)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


def _take(path: str, *, alone: bool = False) -> int | None:
    try:
        import fcntl
    except ImportError:  # no POSIX system
        return None
    lock = lock_name(path)
    while True:
        try:
            # No link that another user planted, and no FIFO, which would block.
            fd = os.open(lock, (os.O_RDWR if alone else os.O_RDONLY) | SAFELY)
        except PermissionError as e:
            if alone:
                return None  # none that this user may hold
            # Without the lock a reader could get what an earlier request of this name stored.
            raise Denied(
                f"{lock}: expected a lock file that this user may read, got {e.strerror}. Run the reader as the "
                "server's user or in its group"
            ) from e
        except OSError:
            return None
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise NotFound(f"{path}: expected a finished object, but a server holds {lock}; wait longer") from None
        except OSError:
            return fd  # a file system without locks
        with suppress(FileNotFoundError):
            # A server that wants it puts a new file in the place of one that readers hold.
            if not os.path.samestat(os.fstat(fd), Path(lock).stat()):
                os.close(fd)
                continue
        return fd
