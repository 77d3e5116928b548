"""The objects of a local folder, sorted by name."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from hsx_dist.errors import StoreError, Unavailable
from hsx_dist.store.folders import FOLDER, is_link

#: Prefix of unfinished objects. They are in the folder of their final name: a rename cannot cross file systems.
UNFINISHED = ".hsx-unfinished-"
#: Errors of a link that lead to no file or folder, now and later.
_NO_TARGET = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})

_Kind = Literal["file", "folder", "link", "unknown"]


class FolderListing:
    """One listing of the files below the open folder ``root``. ``path`` is its path, for errors.

    Each step is relative to ``root``, so that the listing is of one folder, even if its mount is gone for a moment.
    A folder, link or file below ``root`` that cannot be read raises its ``OSError``. With ``unreadable``, that function
    gets its name instead. Names that do not begin with ``prefix`` are not looked at, so their errors do no harm.
    """

    def __init__(
        self,
        path: Path,
        root: int,
        prefix: str,
        after: str | None,
        unreadable: Callable[[str], None] | None = None,
    ):
        self._path = path
        self._root = root
        self._prefix = prefix
        self._after = after
        self._unreadable = unreadable
        self._linked: set[tuple[int, int]] = set()  # device and inode of each folder entered through a link

    def objects(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield name and status of each object."""
        # A stack, not a recursion: folders may have more levels than Python has.
        pending = [iter(self._entries(""))]
        while pending:
            name, kind = next(pending[-1], ("", "file"))
            if not name:
                pending.pop()
                continue
            try:
                if kind in ("link", "unknown"):
                    self._check_link(name.rstrip("/"), kind)
                if kind != "file":
                    pending.append(iter(self._entries(name)))
                    continue
                about = os.stat(name, dir_fd=self._root)
            except FileNotFoundError:
                continue  # just deleted
            except OSError as e:
                if self._unreadable is None:
                    raise
                in_closed_folder = isinstance(e, PermissionError) and kind == "file"
                self._unreadable((name.rpartition("/")[0] or ".") if in_closed_folder else name.rstrip("/"))
                continue
            if stat.S_ISREG(about.st_mode):
                yield name, about

    def _is_wanted(self, name: str) -> bool:
        """Whether the name matches, or is a folder (its name ends in ``/``) that may contain a match."""
        is_folder = name.endswith("/")
        matches = name.startswith(self._prefix) or (is_folder and self._prefix.startswith(name))
        after = self._after
        return matches and (after is None or name > after or (is_folder and after.startswith(name)))

    def _entries(self, folder: str) -> list[tuple[str, _Kind]]:
        """Return name and kind of each wanted entry of a folder, sorted by name. Names of folders end in ``/``."""
        fd = os.open(folder or ".", FOLDER, dir_fd=self._root)
        # A dict: a file system may return a name twice if its object is replaced during the scan.
        found: dict[str, _Kind] = {}
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    name = f"{folder}{entry.name}"
                    wanted = self._is_wanted(name)
                    # Before its kind is read: it may be a link of another program, with an error.
                    if not wanted and not self._is_wanted(f"{name}/"):
                        continue
                    kind = _kind(fd, entry)
                    if kind in ("folder", "link"):
                        # Folders sort with their slash: "a-b" is before "a/b", but after "a".
                        found[f"{name}/"] = kind
                    elif kind == "unknown":
                        # Before "a-b": a retry after "a-b" would leave out the object "a".
                        found[name] = kind
                    elif wanted and not entry.name.startswith(UNFINISHED):
                        found[name] = kind
        finally:
            os.close(fd)
        return sorted(found.items())

    def _check_link(self, name: str, kind: _Kind) -> None:
        """Check the target of a link to a folder, or to a target that could not be looked at.

        Raises:
            StoreError: the link leads to nothing, or is the second to its folder: a few links can make a tree of any
                size.
            Unavailable: the target could not be looked at a moment ago.
            FileNotFoundError: the link was just deleted.
            OSError: any other error of the target, with the link's name. The target may be on a mount that is gone.
        """
        where = f"list {self._path / name}: expected"
        try:
            target = os.stat(name, dir_fd=self._root)
        except OSError as e:
            if not is_link(self._root, name):
                raise
            if e.errno in _NO_TARGET:
                why = "" if e.errno == errno.ENOENT else f" ({e.strerror})"
                raise StoreError(
                    f"{where} a file or a folder, got a symbolic link to nothing{why}: an object may be lost. Restore "
                    "the link's target, or remove the link"
                ) from None
            raise OSError(e.errno, f"{e.strerror}: target of the symbolic link {name!r}") from e
        if kind == "unknown":
            raise Unavailable(f"{where} the target of a symbolic link, got an error for a moment. Try again")
        if (target.st_dev, target.st_ino) in self._linked:
            raise StoreError(
                f"{where} at most one symbolic link to a folder, got several to one, or a loop. Remove the link"
            )
        self._linked.add((target.st_dev, target.st_ino))


def unfinished_files(
    root: int, unreadable: Callable[[str], None] | None = None
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield name and status of each unfinished object below the open folder ``root``. Links are not followed.

    ``unreadable``: see ``FolderListing``.
    """
    pending = [""]
    while pending:
        folder = pending.pop()
        try:
            # Without the slash: with it, Linux follows a link that has replaced the folder.
            fd = os.open(folder.rstrip("/") or ".", FOLDER | os.O_NOFOLLOW, dir_fd=root)
            try:
                with os.scandir(fd) as entries:
                    below, names = [], []
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            below.append(f"{folder}{entry.name}/")
                        elif entry.name.startswith(UNFINISHED):
                            names.append(entry.name)
                found = [(f"{folder}{name}", _status(fd, name)) for name in sorted(names)]
            finally:
                os.close(fd)
        except FileNotFoundError:
            continue  # just deleted
        except OSError:
            if unreadable is None or not folder:
                raise
            unreadable(folder.rstrip("/"))
            continue
        yield from ((name, about) for name, about in found if about is not None)
        pending += sorted(below, reverse=True)


def _status(folder: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None  # just finished


def _kind(parent: int, entry: os.DirEntry[str]) -> _Kind:
    """``link``: to a folder. ``unknown``: a link whose target has an error, so it may be a folder."""
    if not entry.is_symlink():
        return "folder" if entry.is_dir(follow_symlinks=False) else "file"
    try:
        return "link" if stat.S_ISDIR(os.stat(entry.name, dir_fd=parent).st_mode) else "file"
    except OSError as e:
        return "file" if e.errno == errno.ENOENT and entry.name.startswith(UNFINISHED) else "unknown"
