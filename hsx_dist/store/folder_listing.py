"""The objects of a local folder, sorted by name."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from hsx_dist.errors import StoreError, Unavailable
from hsx_dist.store.base import ObjectInfo

#: Prefix of unfinished objects. They are in the folder of their final name: a rename cannot cross file systems.
UNFINISHED = ".hsx-unfinished-"


class FolderListing:
    """One listing of the files below ``root``.

    A folder that may not be read raises ``PermissionError``. With ``unreadable``, that function gets its name instead.
    ``was_there``: whether ``root`` existed before. If it is missing now, a mount may be gone.
    """

    def __init__(
        self,
        root: Path,
        prefix: str,
        after: str | None,
        unreadable: Callable[[str], None] | None = None,
        *,
        was_there: bool = False,
    ):
        self._root = root
        self._was_there = was_there
        self._prefix = prefix
        self._after = after
        self._unreadable = unreadable
        self._linked: set[tuple[int, int]] = set()  # device and inode of each folder entered through a link

    def objects(self, folder: str = "") -> Iterator[ObjectInfo]:
        try:
            entries = _entries(self._root, folder)
        except FileNotFoundError:
            if self._was_there and not self._root.exists():
                raise Unavailable(
                    f"list {self._root}: expected the folder, which existed before, got none. Check its mount"
                ) from None
            return  # nothing is stored yet, or the folder was just removed
        except PermissionError:
            if not folder:
                raise
            self._skip(folder)
            return
        for name, entry in entries:
            is_folder = name.endswith("/")
            if not self._is_wanted(name, is_folder) or (entry.name.startswith(UNFINISHED) and not is_folder):
                continue
            try:
                if is_folder and entry.is_symlink() and not self._follow_once(entry):
                    self._skip(name)
                    continue
                about = None if is_folder else entry.stat()
            except FileNotFoundError:
                continue  # just deleted
            except PermissionError:
                self._skip(name if is_folder else folder)
                continue
            if about is None:
                yield from self.objects(name)
            elif stat.S_ISREG(about.st_mode):
                yield ObjectInfo(name, about.st_size)

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

    def _follow_once(self, entry: os.DirEntry[str]) -> bool:
        """Whether the link's target exists. Raises ``StoreError`` for a second link to a folder: a few links can make a
        tree of any size."""
        try:
            target = entry.stat()
        except FileNotFoundError:
            if not Path(entry.path).is_symlink():
                return True  # just deleted
            if self._unreadable is not None:
                return False
            raise StoreError(
                f"list {entry.path}: expected a file or a folder, got a symbolic link to nothing: an object may be "
                "lost. Restore the link's target, or remove the link"
            ) from None
        if (target.st_dev, target.st_ino) in self._linked:
            raise StoreError(
                f"list {entry.path}: expected at most one symbolic link to a folder, got several to one, or a loop. "
                "Remove the link"
            )
        self._linked.add((target.st_dev, target.st_ino))
        return True


def _entries(root: Path, folder: str) -> list[tuple[str, os.DirEntry[str]]]:
    """Return (object name, entry) of a folder below ``root``, sorted by name. Names of folders end in ``/``."""
    with os.scandir(root / folder) as found:
        # Folders sort with their slash: "a-b" is before "a/b", but after "a".
        # A dict: a file system may return a name twice if its object is replaced during the scan.
        return sorted({f"{folder}{e.name}{'/' if _is_folder(e) else ''}": e for e in found}.items())


def _is_folder(entry: os.DirEntry[str]) -> bool:
    # A link whose target is missing, or not visible to this process, may be a folder. No listing may ignore it.
    try:
        return entry.is_dir() or (
            entry.is_symlink() and not entry.name.startswith(UNFINISHED) and not Path(entry.path).exists()
        )
    except PermissionError:
        return True
