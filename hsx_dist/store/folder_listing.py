"""The objects of a local folder, sorted by name."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from hsx_dist.errors import StoreError
from hsx_dist.store.folders import FOLDER, is_link

#: Prefix of unfinished objects. They are in the folder of their final name: a rename cannot cross file systems.
UNFINISHED = ".hsx-unfinished-"


class FolderListing:
    """One listing of the files below the open folder ``root``. ``path`` is its path, for errors.

    Each step is relative to ``root``, so that the listing is of one folder, even if its mount is gone for a moment.
    A folder that may not be read raises ``PermissionError``. With ``unreadable``, that function gets its name instead.
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

    def objects(self, folder: str = "") -> Iterator[tuple[str, os.stat_result]]:
        """Yield name and status of each object."""
        try:
            entries = _entries(self._root, folder)
        except FileNotFoundError:
            return  # just removed
        except PermissionError:
            if not folder:
                raise
            self._skip(folder)
            return
        for name, through_link in entries:
            is_folder = name.endswith("/")
            if not self._is_wanted(name, is_folder) or name.rpartition("/")[2].startswith(UNFINISHED):
                continue
            try:
                if is_folder and through_link and not self._follow_once(name.rstrip("/")):
                    self._skip(name)
                    continue
                about = None if is_folder else os.stat(name, dir_fd=self._root)
            except FileNotFoundError:
                continue  # just deleted
            except PermissionError:
                self._skip(name if is_folder else folder)
                continue
            if about is None:
                yield from self.objects(name)
            elif stat.S_ISREG(about.st_mode):
                yield name, about

    def _is_wanted(self, name: str, is_folder: bool) -> bool:
        """Whether the name matches, or is a folder that may contain a match."""
        matches = name.startswith(self._prefix) or (is_folder and self._prefix.startswith(name))
        after = self._after
        return matches and (after is None or name > after or (is_folder and after.startswith(name)))

    def _skip(self, name: str) -> None:
        """Report a folder to ``unreadable``. If it is None, reraise the PermissionError that the caller handles."""
        if self._unreadable is None:
            raise
        self._unreadable(name.rstrip("/") or ".")

    def _follow_once(self, name: str) -> bool:
        """Whether the link's target exists. Raises ``StoreError`` for a second link to a folder: a few links can make a
        tree of any size."""
        try:
            target = os.stat(name, dir_fd=self._root)
        except FileNotFoundError:
            if not is_link(self._root, name):
                return True  # just deleted
            if self._unreadable is not None:
                return False
            raise StoreError(
                f"list {self._path / name}: expected a file or a folder, got a symbolic link to nothing: an object may "
                "be lost. Restore the link's target, or remove the link"
            ) from None
        if (target.st_dev, target.st_ino) in self._linked:
            raise StoreError(
                f"list {self._path / name}: expected at most one symbolic link to a folder, got several to one, or a "
                "loop. Remove the link"
            )
        self._linked.add((target.st_dev, target.st_ino))
        return True


def _entries(root: int, folder: str) -> list[tuple[str, bool]]:
    """Return (object name, whether it is a link) of each entry of a folder below the open ``root``, sorted by name.

    Names of folders end in ``/``.
    """
    fd = os.open(folder or ".", FOLDER, dir_fd=root)
    try:
        with os.scandir(fd) as found:
            # Folders sort with their slash: "a-b" is before "a/b", but after "a".
            # A dict: a file system may return a name twice if its object is replaced during the scan.
            return sorted(
                {f"{folder}{e.name}{'/' if _is_folder(fd, e) else ''}": e.is_symlink() for e in found}.items()
            )
    finally:
        os.close(fd)


def _is_folder(parent: int, entry: os.DirEntry[str]) -> bool:
    # A link whose target is missing, or not visible to this process, may be a folder. No listing may ignore it.
    try:
        if entry.is_dir():
            return True
        if entry.is_symlink() and not entry.name.startswith(UNFINISHED):
            os.stat(entry.name, dir_fd=parent)
    except (FileNotFoundError, PermissionError):
        return True
    return False
