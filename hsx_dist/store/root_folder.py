"""The root of a local store, and the check that no other folder is at its path.

While a mount (NFS, FUSE) is gone, its mount point is missing, or is a folder of the disk below it. Objects are missing
there, and an object that is put there disappears when the mount is back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Literal, NamedTuple

from hsx_dist.config.urls import check_encodable
from hsx_dist.errors import Unavailable
from hsx_dist.store.folders import FOLDER, SEARCH, close
from hsx_dist.store.mount_id import mount_id


class _Witness(NamedTuple):
    """An object of the folder. Each run has a ``run.json``, so that a name alone identifies no folder."""

    name: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, name: str, found: os.stat_result) -> _Witness:
        return cls(name, found.st_size, found.st_mtime_ns)


class _Identity(NamedTuple):
    device: int
    inode: int
    mount: int | None

    @classmethod
    def of(cls, folder: int) -> _Identity:
        found = os.fstat(folder)
        return cls(found.st_dev, found.st_ino, mount_id(folder))


class RootFolder:
    """The folder at ``path``, as one store object sees it. Thread-safe.

    Its device, inode and mount are stored when the store is opened, or on the first use if the folder is made later. A
    mount has other numbers when it is back, as may a folder of FUSE at any time. So a folder with other numbers is
    accepted if it contains a *witness*: an object that was seen in the known folder, unchanged (``_has``). A store
    without a witness refuses only the folder below the mount: one on another device, which a parent of the known folder
    had. Without ``mount_id`` another file system at the path can have the same numbers (NFS, CIFS, tmpfs, FUSE), and is
    not noticed. An open folder would keep its device number, but its file system could not be unmounted.

    A folder that was seen is never made again.
    """

    def __init__(self, path: Path):
        check_encodable(str(path))
        self.path = path
        self._identity: _Identity | None = None
        self._below: set[int] = set()  # other devices of its parents: of the folder below, if the mount is gone
        #: "first": of a run, usually its description, which stays. "last": the last object that was stored, or read in
        #: a ``ConfinedFolder``. "listed": the last that was listed.
        #: The oldest objects of a server are deleted first.
        self._witnesses: dict[str, _Witness] = {}
        with suppress(OSError), self.opened(search=True):  # raised again by the first use
            pass

    def saw(self, name: str, found: os.stat_result, kind: Literal["last", "listed"]) -> None:
        """Remember an object in the folder that ``opened`` has checked."""
        witness = _Witness.of(name, found)
        first = self._witnesses.setdefault("first", witness)
        if first is not witness:
            self._witnesses["first" if first.name == name else kind] = witness

    def read(self, name: str, found: os.stat_result) -> None:
        """Remember an object that was read by its path, without a check of the folder.

        Checks the folder if there is no witness, or if the witness of this name was another object.

        Raises:
            Unavailable: as ``opened``.
        """
        first = self._witnesses.get("first")
        if first is None or (first.name == name and first != _Witness.of(name, found)):
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError), self.opened(search=True) as folder:
                self.saw(name, os.stat(name, dir_fd=folder), "last")

    def forget(self, name: str) -> None:
        """Forget an object that this store deletes."""
        for kind, witness in list(self._witnesses.items()):
            if witness.name == name:
                self._witnesses.pop(kind, None)

    @contextmanager
    def opened(self, *, make: bool = False, search: bool = False) -> Iterator[int]:
        """Yield a descriptor of the folder.

        Args:
            make: make the folder if it is missing and was never seen.
            search: only to look for an object. Needs no permission to read the folder.

        Raises:
            Unavailable: the folder was seen before, and now none or another one is at its path.
            OSError: the errors of ``open`` and ``mkdir``.
        """
        flags = SEARCH if search else FOLDER
        seen = self._identity is not None  # before the call: another thread may be making the folder
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
            self._require_seen(folder)
            yield folder
        finally:
            close(folder)

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

    def _require_seen(self, folder: int) -> None:
        known, identity = self._identity, _Identity.of(folder)
        if identity == known:
            return
        if known is not None:
            witnesses = list(self._witnesses.values())
            same_mount = (known.device, known.mount) == (identity.device, identity.mount)
            same = any(_has(folder, witness, same_mount) for witness in witnesses)
            if not (same if witnesses else identity.device not in self._below):
                raise self._gone("another one")
        self._below = _devices_above(folder) - {identity.device}
        self._identity = identity

    def _gone(self, got: str) -> Unavailable:
        return Unavailable(
            f"{self.path}: expected the folder, which existed before, got {got}: its mount is gone, or the folder was "
            "removed. Check its mount. If a run there was removed, its samples are lost: start it again"
        )


def _has(folder: int, witness: _Witness, same_mount: bool) -> bool:
    """Whether the open ``folder`` has the object.

    Some file systems (CIFS, FUSE) set the time of change of a stored file once more when it is closed or renamed. So
    the time counts only on another device or mount, which may have another run.
    """
    try:
        found = _Witness.of(witness.name, os.stat(witness.name, dir_fd=folder))
    except OSError:
        return False
    return found.size == witness.size if same_mount else found == witness


def _devices_above(folder: int) -> set[int]:
    """Return the devices of all parents of the open folder. Its path may name another folder by now."""
    devices, below = set[int](), None
    with suppress(OSError):
        for depth in count(1):
            found = os.stat("../" * depth, dir_fd=folder)
            if below is not None and os.path.samestat(found, below):
                break  # the system's root is its own parent
            devices.add(found.st_dev)
            below = found
    return devices
