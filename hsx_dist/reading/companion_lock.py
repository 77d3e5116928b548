"""The lock that a server on this file system holds beside an object until what became of its request is stored."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hsx_dist.errors import NotFound
from hsx_dist.format.companions import lock_name


@contextmanager
def shared_lock(path: str) -> Iterator[None]:
    """Hold ``PATH.lock`` shared, where there is one. Never waits.

    Raises:
        NotFound: a server holds it: what lies at ``path`` is not what its latest request asked for.
    """
    fd = _take(path)
    try:
        yield
    finally:
        if fd is not None:
            os.close(fd)


def _take(path: str) -> int | None:
    try:
        import fcntl
    except ImportError:  # no POSIX system
        return None
    lock = lock_name(path)
    while True:
        try:
            fd = os.open(lock, os.O_RDONLY)
        except OSError:
            return None  # there is none, or none for us
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
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
