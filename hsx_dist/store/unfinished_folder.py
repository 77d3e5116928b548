"""Folders for unfinished files, in a folder in which other users may rename, replace and remove every name.

A library writes a file by its path. Another user could replace a part of that path by a link during the write. So
libraries write into a folder that no other user can change, by a path through its descriptor.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from hsx_dist.store.file_io import closed_after
from hsx_dist.store.folders import FOLDER, SAFELY, is_at
from hsx_dist.store.output_file import regular_file


@dataclass(frozen=True)
class UnfinishedFolder:
    """An empty folder ``fd``, in which no other user can change a name. ``path`` leads through its descriptor.

    It is the only content of a private folder, and has a random name. That name proves to other processes that the
    private folder is no other folder of this user, which a neighbour renamed.
    """

    path: Path
    fd: int
    _private: int
    _name: str
    _parent: int
    _parents_name: str
    _mode: int

    def complete(self, name: str) -> None:
        """Sync a file. Otherwise a file with its final name may be empty after a crash of the machine.

        The file gets the process's default permissions: safetensors makes files that only their owner may read.
        """
        with open(self.path / name, "rb", opener=regular_file) as f:
            if stat.S_IMODE(os.fstat(f.fileno()).st_mode) != self._mode:
                os.fchmod(f.fileno(), self._mode)
            os.fsync(f.fileno())

    def move(self, name: str, folder: int, to: str) -> None:
        """Move a file to the name ``to`` in the open ``folder``. Replaces a file or a link of that name."""
        os.replace(name, to, src_dir_fd=self.fd, dst_dir_fd=folder)

    def link(self, name: str, folder: int) -> None:
        """Give a file the same name in the open ``folder``. Raises ``FileExistsError`` if that name is used."""
        os.link(name, name, src_dir_fd=self.fd, dst_dir_fd=folder, follow_symlinks=False)

    def move_whole(self, folder: int, to: str) -> None:
        """Move this folder to the name ``to`` in the open ``folder``. Raises ``OSError`` if that name is used."""
        os.rename(self._name, to, src_dir_fd=self._private, dst_dir_fd=folder)

    def is_removed(self) -> bool:
        """Whether another process removed it."""
        return not is_at(self._private, self._parent, self._parents_name)


@contextmanager
def unfinished_folder(parent: int, prefix: str) -> Iterator[UnfinishedFolder]:
    """Yield a new folder for unfinished files below the open folder ``parent``, and remove it at the end.

    Raises:
        OSError: ``EACCES`` if another user replaced the folder while it was made, and the errors of ``mkdir``.
    """
    key = uuid4().hex
    name = f"{prefix}{key}"
    os.mkdir(name, 0o700, dir_fd=parent)
    try:
        with closed_after(os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=parent)) as private:
            mode = _private_mode(private)
            if mode is None:
                raise PermissionError(errno.EACCES, f"another user replaced the folder {name!r}")
            try:
                os.mkdir(key, dir_fd=private)
                with closed_after(os.open(key, FOLDER | os.O_NOFOLLOW, dir_fd=private)) as fd:
                    yield UnfinishedFolder(_path_of(fd), fd, private, key, parent, name, mode)
            finally:
                shutil.rmtree(key, ignore_errors=True, dir_fd=private)
    finally:
        _remove_empty(parent, name)


def remove_unfinished_folders(parent: int, prefix: str) -> None:
    """Remove this user's unfinished folders with that prefix, also those of killed processes."""
    pattern = re.compile(re.escape(prefix) + "([0-9a-f]{32})")
    with os.scandir(parent) as found:
        matches = [match for entry in found if (match := pattern.fullmatch(entry.name))]
    for match in matches:
        with suppress(OSError), closed_after(os.open(match[0], FOLDER | os.O_NOFOLLOW, dir_fd=parent)) as private:
            if _private_mode(private) is not None:
                shutil.rmtree(match[1], ignore_errors=True, dir_fd=private)
        _remove_empty(parent, match[0])


def _remove_empty(parent: int, name: str) -> None:
    with suppress(OSError):  # another user may have replaced it
        os.rmdir(name, dir_fd=parent)


def _private_mode(folder: int) -> int | None:
    """Return the mode of new files in the open ``folder``. None if another user may change names in the folder.

    Some mounts give all files one owner and one mode, and all folders another mode. A private file in the folder shows
    both.
    """
    name = uuid4().hex
    with closed_after(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFELY, 0o666, dir_fd=folder)) as fd:
        try:
            mode = stat.S_IMODE(os.fstat(fd).st_mode)
            with suppress(PermissionError):
                os.fchmod(fd, 0o600)
            private, found = os.fstat(fd), os.fstat(folder)
        finally:
            os.unlink(name, dir_fd=folder)
    has_modes = stat.S_IMODE(private.st_mode) == 0o600
    others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return mode if found.st_uid == private.st_uid and not (has_modes and others) else None


def _path_of(fd: int) -> Path:
    if sys.platform == "darwin":  # no path leads through a descriptor there
        import fcntl

        return Path(os.fsdecode(fcntl.fcntl(fd, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")))
    return Path(f"/proc/self/fd/{fd}")
