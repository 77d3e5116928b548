"""Folders opened component by component, so that another user's link cannot redirect a write or a delete.

Every step is relative to the open descriptor of the parent folder. Swapping a folder for a link between two steps has
no effect.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hsx_dist.errors import ConfigError

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
#: Opening never follows a link in the last component, and never blocks on a FIFO.
SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
#: Refers to a link itself; macOS has no such flag.
_LINK = getattr(os, "O_PATH", 0)
#: As in Linux.
_MOST_LINKS = 40
#: Opens a folder from which files are opened. Linux needs no permission to read the folder.
SEARCH = FOLDER | _LINK


@contextmanager
def opened(
    root: str | os.PathLike[str] | int,
    path: str = "",
    *,
    make: bool = False,
    own_links: bool = False,
    search: bool = False,
    entered: Callable[[int, int, str], None] | None = None,
) -> Iterator[int]:
    """Yield a descriptor of the folder ``path`` (``/`` between its components) below ``root``.

    ``root`` may be a link, or the descriptor of a folder.

    Args:
        make: make missing folders. Refuses another user's folder in a parent where every user may make folders.
        own_links: follow links that belong to this process's user or to root, also in the targets of links.
        search: also open folders that this user may search but not read. They cannot be listed or synced.
        entered: called for each component with the descriptors of a folder and of its subfolder, and the name.

    Raises:
        OSError: ``ELOOP`` for a link that is not followed, ``EACCES`` for a folder of another user, and the errors of
            ``open`` and ``mkdir``.
    """
    if isinstance(root, int) and search:  # it may be open for searching only
        folder = open_folder(".", dir_fd=root, search=True)
    else:
        folder = os.dup(root) if isinstance(root, int) else open_folder(root, search=search)
    try:
        for name in path.split("/") if path else ():
            with closed_on_error(_enter(folder, name, make=make, own_links=own_links, search=search)) as child:
                if entered is not None:
                    entered(folder, child, name)
            close(folder)
            folder = child
        yield folder
    finally:
        close(folder)


def open_folder(
    path: str | os.PathLike[str], flags: int = 0, *, dir_fd: int | None = None, search: bool = False
) -> int:
    """Open a folder. With ``search``, this user need not have the right to read it.

    A readable folder is opened for reading: only then an NFS client asks its server for new names.
    """
    try:
        return os.open(path, FOLDER | flags, dir_fd=dir_fd)
    except PermissionError:
        if not search:
            raise
        return os.open(path, SEARCH | flags, dir_fd=dir_fd)


def _enter(folder: int, name: str, *, make: bool, own_links: bool, search: bool) -> int:
    while True:
        try:
            child = open_folder(name, os.O_NOFOLLOW, dir_fd=folder, search=search)
        except FileNotFoundError:
            if not make:
                raise
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=folder)
            continue
        except OSError as e:
            if e.errno not in (errno.ENOTDIR, errno.ELOOP) or not is_link(folder, name):
                raise
            if not own_links:
                raise OSError(errno.ELOOP, f"{name!r} is a symbolic link") from None
            return _through(folder, name)
        with closed_on_error(child):
            if make and _is_planted(folder, child):
                raise PermissionError(errno.EACCES, f"the folder {name!r} belongs to another user")
        return child


def close(fd: int) -> None:
    """Close a descriptor through which nothing was written.

    Its errors have no meaning. Linux closes it nevertheless: a second try could close another thread's descriptor.
    """
    with suppress(OSError):
        os.close(fd)


def close_lock(fd: int) -> None:
    """Release the ``flock`` of a descriptor, and close it.

    Closing alone would keep the lock while a forked process has a copy of the descriptor.
    """
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    close(fd)


@contextmanager
def closed_on_error(fd: int) -> Iterator[int]:
    """Yield ``fd``, and close it if the block raises. Each call on an open descriptor may fail, also ``fstat``."""
    try:
        yield fd
    except BaseException:
        close(fd)
        raise


def is_link(folder: int, name: str) -> bool:
    """Whether ``name`` in the open ``folder`` is a symbolic link."""
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def is_at(fd: int, folder: int, name: str) -> bool:
    """Whether the open file ``fd`` still has the name ``name`` in the open ``folder``."""
    return has_name(os.fstat(fd), folder, name)


def has_name(found: os.stat_result, folder: int, name: str) -> bool:
    """Whether the file of the status ``found`` has the name ``name`` in the open ``folder``."""
    try:
        return os.path.samestat(found, os.stat(name, dir_fd=folder, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _through(folder: int, name: str) -> int:
    """Open the folder behind a link that this user or root made.

    The target's path may lead through further links, also in its middle. Each of them must be such a link too.
    """
    here, names, links = os.dup(folder), [name], 0
    try:
        while names:
            name = names.pop()
            try:
                found = os.open(name or ".", SEARCH | os.O_NOFOLLOW, dir_fd=here)
            except OSError as e:
                if e.errno not in (errno.ENOTDIR, errno.ELOOP) or not is_link(here, name):
                    raise
                links += 1
                target = _own_target(here, name) if links <= _MOST_LINKS else None
                if target is None:
                    raise OSError(errno.ELOOP, f"{name!r} is a symbolic link") from None
                names += reversed(target.split("/"))
                if not target.startswith("/"):
                    continue
                found = os.open("/", SEARCH)
            close(here)
            here = found
        return os.open(".", FOLDER, dir_fd=here)
    finally:
        close(here)


def _own_target(folder: int, name: str) -> str | None:
    """Return the target of a link that this user or root made; None for another user's link.

    Owner and target are read from one open descriptor, so that both belong to the same link. A link cannot be changed.
    """
    if not _LINK:
        return None
    link = os.open(name, _LINK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        found = os.fstat(link)
        own = stat.S_ISLNK(found.st_mode) and found.st_uid in (0, os.geteuid())
        return os.readlink("", dir_fd=link) if own else None
    finally:
        close(link)


def _is_planted(folder: int, child: int) -> bool:
    above, found = os.fstat(folder), os.fstat(child)
    everybody = above.st_mode & (stat.S_ISVTX | stat.S_IWOTH) == stat.S_ISVTX | stat.S_IWOTH
    return everybody and found.st_uid not in (0, os.geteuid(), above.st_uid)


def private_folder(path: Path) -> int:
    """Return a descriptor of a folder that only this process's user can enter. Makes the folder if it is missing.

    Raises:
        ConfigError: the path is no folder, a link, another user's folder, or a folder that other users can enter.
        OSError: the folder cannot be made.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    try:
        folder = os.open(path, FOLDER | os.O_NOFOLLOW)
    except OSError as e:
        if e.errno not in (errno.ENOTDIR, errno.ELOOP, errno.EACCES):
            raise
        raise ConfigError(_not_private(path, str(e.strerror))) from e
    with closed_on_error(folder):
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            owner = f"owner {found.st_uid} and mode {stat.S_IMODE(found.st_mode):o}"
            raise ConfigError(_not_private(path, owner))
    return folder


def _not_private(path: Path, got: str) -> str:
    return (
        f"{path}: expected a folder of user {os.geteuid()} that no other user can enter, got {got}. Remove it, or set "
        "TMPDIR to a private folder"
    )


def open_own(folder: int, name: str, flags: int, mode: int = 0o600) -> int:
    """Open the regular file ``name`` of this process's user in the open ``folder``.

    Raises:
        OSError: ``EACCES`` for a file of another user, ``ELOOP`` for a link, ``EINVAL`` for a FIFO or a device.
    """
    with closed_on_error(os.open(name, flags | SAFELY, mode, dir_fd=folder)) as fd:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), name)
        if found.st_uid != os.geteuid():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
    return fd


class SyncedFolders:
    """The last ``most`` used folders whose names this process synced. Thread-safe.

    An inode alone does not identify a folder: a file system reuses the inode of a removed folder for the next one.
    Another process may make that folder and never sync it. Each folder is therefore kept open: the inode of an open
    folder is not reused. (An NFS server may reuse it, but stores a new folder's name before it answers.) When there are
    more than ``most`` folders, the least recently used one is closed; its next object costs one more ``fsync``.
    """

    def __init__(self, most: int = 64):
        self._most = most
        self._kept: OrderedDict[tuple[Hashable, int, int], int] = OrderedDict()  # where, device and inode → descriptor
        self._renew()
        os.register_at_fork(after_in_child=self._renew)  # another thread of the parent may have held the mutex

    def _renew(self) -> None:
        self._mutex = threading.Lock()

    def once(self, where: Hashable, folder: int, sync: Callable[[], None]) -> None:
        """Call ``sync``, unless it already returned for the open ``folder`` at ``where``."""
        found = os.fstat(folder)
        key = (where, found.st_dev, found.st_ino)
        with self._mutex:
            if key in self._kept:
                self._kept.move_to_end(key)
                return
        sync()
        try:
            kept = os.dup(folder)
        except OSError:  # no descriptor is left in this process: the next put syncs the name again
            return
        with self._mutex:
            if key in self._kept:  # another thread was faster
                close(kept)
                return
            self._kept[key] = kept
            if len(self._kept) > self._most:
                close(self._kept.popitem(last=False)[1])

    def close(self) -> None:
        """Close all folders. A file system cannot be unmounted while this process keeps one of its folders open."""
        with self._mutex:
            while self._kept:
                close(self._kept.popitem()[1])
