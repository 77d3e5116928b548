"""The lock that a server on this file system holds beside an object until what became of its request is stored.

Objects are named as in a ``LocalStore``: the folder's path, and a name below it. No link below the folder is followed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from hsx_dist.errors import Denied, NotFound
from hsx_dist.format.markers import lock_name
from hsx_dist.store.folders import SAFELY, is_at, opened


@contextmanager
def shared_lock(root: str, name: str) -> Iterator[None]:
    """Hold the lock of the object ``name`` in the folder ``root`` shared, where there is one. Never waits.

    Raises:
        NotFound: a server holds it: the object is not what its latest request asked for.
        Denied: this user may not read the lock file.
    """
    fd = _take(root, name)
    try:
        yield
    finally:
        if fd is not None:
            os.close(fd)


@contextmanager
def exclusive_lock(root: str, name: str) -> Iterator[bool]:
    """Hold the lock of the object ``name`` in the folder ``root`` alone. Yields whether there is one. Never waits.

    Raises:
        NotFound: a server or a reader holds it.
    """
    fd = _take(root, name, alone=True)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


def _take(root: str, name: str, *, alone: bool = False) -> int | None:
    try:
        import fcntl
    except ImportError:  # no POSIX system
        return None
    folder, _, last = lock_name(name).rpartition("/")
    while True:
        fd = None
        try:
            with opened(root, folder) as parent:
                # No link that another user planted, and no FIFO, which would block.
                fd = os.open(last, (os.O_RDWR if alone else os.O_RDONLY) | SAFELY, dir_fd=parent)
                fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
                if is_at(fd, parent, last):
                    return fd
            # A server that wants it puts a new file in the place of one that readers hold.
            os.close(fd)
        except BlockingIOError:
            if fd is not None:
                os.close(fd)
            where = f"{root}/{name}"
            raise NotFound(
                f"{where}: expected a finished object, but a server holds {lock_name(where)}; wait longer"
            ) from None
        except PermissionError as e:
            if alone:
                return None  # none that this user may hold
            # Without the lock a reader could get what an earlier request of this name stored.
            raise Denied(
                f"{lock_name(f'{root}/{name}')}: expected a lock file that this user may read, got {e.strerror}. Run "
                "the reader as the server's user or in its group"
            ) from e
        except OSError:
            return fd  # there is none; or a file system without locks
