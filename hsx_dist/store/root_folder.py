"""The root of a local store, and the check that no other folder is at its path.

While a mount (NFS, FUSE) is gone, its mount point is missing, or is a folder of the disk below it. Objects are missing
there, and an object that is put there disappears when the mount is back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hsx_dist.errors import Unavailable
from hsx_dist.store.folders import FOLDER, SEARCH


class RootFolder:
    """The folder at ``path``, as one store object sees it. Thread-safe.

    The first use stores the folder's device and inode. A mount may have other numbers when it is back, as may a folder
    of FUSE at any time. So a folder with other numbers is accepted if it contains a *witness*, an object that this
    store has read or stored. Without a witness it must be on the same device.

    A folder that was seen is never made again.
    """

    def __init__(self, path: Path):
        self.path = path
        self._identity: tuple[int, int] | None = None
        self._first: str | None = None  # witnesses: in a run, the first is its description, which stays
        self._last: str | None = None  # of a server's objects, the oldest are deleted first

    def saw(self, name: str, *, newest: bool = False) -> None:
        """Remember that the object exists. ``newest``: in the folder that ``opened`` has checked."""
        if self._first is None:
            self._first = name
        elif newest:
            self._last = name

    def forget(self, name: str) -> None:
        """Forget an object that this store deletes."""
        if name == self._first:
            self._first = None
        if name == self._last:
            self._last = None

    @contextmanager
    def opened(self, *, make: bool = False, search: bool = False) -> Iterator[int]:
        """Yield a descriptor of the folder.

        Args:
            make: make the folder if it is missing and was never seen.
            search: only to look for an object. Needs no permission to read the folder, and does not make it seen.

        Raises:
            Unavailable: the folder was seen before, and now none or another one is at its path.
            OSError: the errors of ``open`` and ``mkdir``.
        """
        flags = SEARCH if search else FOLDER
        # Before the call: another thread may be making the folder.
        seen = (self._identity or self._first or self._last) is not None
        try:
            folder = os.open(self.path, flags)
        except (FileNotFoundError, NotADirectoryError):
            if seen:
                raise self._gone("none") from None
            if not make:
                raise
            self.path.mkdir(parents=True, exist_ok=True)
            folder = os.open(self.path, flags)
        try:
            self._require_seen(folder, learn=not search)
            yield folder
        finally:
            os.close(folder)

    def require(self) -> None:
        """Raise ``Unavailable`` if the folder was seen, and now none or another one is at its path."""
        try:
            with self.opened(search=True):
                pass
        except Unavailable:
            raise
        except OSError:
            pass  # the caller has an error to raise

    def require_still(self, folder: int) -> None:
        """Raise ``Unavailable`` if the open ``folder`` is no longer at the path."""
        try:
            if os.path.samestat(self.path.stat(), os.fstat(folder)):
                return
        except (FileNotFoundError, NotADirectoryError):
            pass
        raise self._gone("none or another one")

    def _require_seen(self, folder: int, *, learn: bool) -> None:
        found = os.fstat(folder)
        known, identity = self._identity, (found.st_dev, found.st_ino)
        if identity == known:
            return
        witnesses = [name for name in (self._first, self._last) if name is not None]
        if not (
            any(_has(folder, name) for name in witnesses) if witnesses else known is None or known[0] == identity[0]
        ):
            raise self._gone("another one")
        if known or witnesses or learn:
            self._identity = identity

    def _gone(self, got: str) -> Unavailable:
        return Unavailable(
            f"{self.path}: expected the folder, which existed before, got {got}: its mount is gone, or the folder was "
            "removed. Check its mount. If a run there was removed, its samples are lost: start it again"
        )


def _has(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder)
    except OSError:
        return False
    return True
