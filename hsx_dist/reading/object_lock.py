"""Lock file next to an object. A server on this file system holds it until the result of its request is stored.

Objects are named as in a ``LocalStore``: the folder's path, and a name below it. Links below the folder are not
followed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from hsx_dist.errors import Denied, HsxError, NotFound, Unavailable
from hsx_dist.format.markers import lock_name
from hsx_dist.store.folders import SAFELY, close, close_lock, is_at, opened

#: Errors of a name without a lock file, and of a file system without locks or that can only be read.
_NO_LOCK = frozenset(
    {
        *(errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR, errno.ENAMETOOLONG),
        *(errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EROFS),
    }
)


class LockAppeared(Unavailable):
    """The lock file was missing before a read, and exists after it: read again, under the lock."""


@contextmanager
def shared_lock(root: str, name: str) -> Iterator[None]:
    """Hold the lock of the object ``name`` in the folder ``root`` shared, if there is one. Never waits.

    If there is none, looks for it again after the body.

    Raises:
        NotFound: a server holds the lock, so the object is not yet the result of its latest request.
        Denied: this user may not read the lock file.
        LockAppeared: there is a lock file only after the body. What the body found may be of an earlier request.
        Unavailable: it is not known whether a server holds the lock.
    """
    fd, answer = _take(root, name), None
    try:
        try:
            yield
        except HsxError as e:  # such as a failure that an earlier request recorded
            answer = e
        if fd is None:
            # The mount may have been gone at the first look, and back when the store tried the read again.
            fd = _take(root, name)
            if fd is not None:  # a server may have held it during the body
                where = lock_name(f"{root}/{name}")
                raise LockAppeared(f"{where}: expected no new lock file during a read, got one. Read again") from answer
        if answer is not None:
            raise answer
    finally:
        if fd is not None:
            close_lock(fd)


@contextmanager
def exclusive_lock(root: str, name: str) -> Iterator[Callable[[], bool] | None]:
    """Hold the lock of the object ``name`` in the folder ``root`` exclusively. Never waits.

    Yields None if there is no lock file. Else a function: whether the file still has its name, and is empty. Call it
    before you remove the file: another program may have removed it, and a server may hold a new file of that name. A
    file with content is of another program, such as ``uv.lock``.

    Raises:
        NotFound: a server or a reader holds the lock.
        Denied: this user may not read the lock file, or on NFS not write it.
        Unavailable: it is not known whether another process holds the lock.
    """
    fd = _take(root, name, alone=True)
    try:
        yield None if fd is None else partial(_is_removable, root, name, fd)
    finally:
        if fd is not None:
            close_lock(fd)


def _is_removable(root: str, name: str, fd: int) -> bool:
    folder, _, last = lock_name(name).rpartition("/")
    try:
        with opened(root, folder, search=True) as parent:
            return os.fstat(fd).st_size == 0 and is_at(fd, parent, last)
    except OSError:
        return False


def _take(root: str, name: str, *, alone: bool = False) -> int | None:
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return None
    folder, _, last = lock_name(name).rpartition("/")
    while True:
        fd = None
        try:
            with opened(root, folder, search=True) as parent:
                fd = _open(parent, last, writable=alone)
                fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
                if is_at(fd, parent, last):
                    return fd
            # The lock file was replaced: a server replaces a file that readers hold. Try the new file.
            close(fd)
        except BlockingIOError:
            if fd is not None:
                close(fd)
            where = f"{root}/{name}"
            raise NotFound(
                f"{where}: expected a finished object, got the lock {lock_name(where)}, held by a server. Wait longer"
            ) from None
        except OSError as e:
            if e.errno in _NO_LOCK:
                return fd
            if fd is not None:
                close(fd)
            if isinstance(e, PermissionError) or e.errno == errno.EBADF:  # EBADF: of NFS, see ``_open``
                # Without the lock a reader could get the result of an earlier request of this name, and ``hsx gc``
                # could delete an object in use.
                right, also = ("write", "") if e.errno == errno.EBADF else ("read", " or in its group")
                raise Denied(
                    f"{lock_name(f'{root}/{name}')}: expected a lock file that this user may {right}, got "
                    f"{e.strerror}. Run {'`hsx gc`' if alone else 'the reader'} as the server's user{also}"
                ) from e
            # A server may hold the lock.
            raise Unavailable(
                f"{lock_name(f'{root}/{name}')}: expected a lock file that can be opened and locked, or none, got "
                f"{e.strerror}. Try again. If the mount has no locks, remove its lock files, and start the server with "
                "use_synchronization_lock=false"
            ) from e


def _open(folder: int, last: str, *, writable: bool) -> int:
    """Open a lock file, for writing if ``writable`` and this user may write it: NFS locks no other file exclusively.

    Refuses a link, which another user may have created, and a FIFO, which would block.
    """
    if writable:
        with suppress(PermissionError):
            return os.open(last, os.O_RDWR | SAFELY, dir_fd=folder)
    return os.open(last, os.O_RDONLY | SAFELY, dir_fd=folder)
