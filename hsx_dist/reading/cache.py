"""Cache of fetched object ranges on a local disk, of limited size. Any number of processes may share the folder."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import re
import stat
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from hsx_dist.format.checksum import crc32c
from hsx_dist.logger import get_logger
from hsx_dist.store import ObjectInfo, Store
from hsx_dist.store.base import Buffer
from hsx_dist.store.folders import open_own, opened
from hsx_dist.store.output_file import writable

log = get_logger(__name__)

_TRAILER = 4  # bytes: the crc32c of the data before it
#: A process checks the folder's size with this probability before each new file, and after adding this share of the
#: limit.
_LOOK = 1 / 64
#: Independent of ``random``, whose numbers a training loop may seed in each process.
_chance = random.SystemRandom()
_NEW = ".new-"
_FOLDER = re.compile("[0-9a-f]{2}")
#: Names of the cache's files. Other programs may use the same folder.
_FILE = re.compile(r"(\.new-)?[0-9a-f]{32}")


class CachedStore:
    """A ``Store`` whose ``get_ranges`` caches fetched bytes in ``folder``. Other methods call the inner store.

    Entries never become stale, since a run's objects never change. A file is renamed into place when it is complete,
    and ends with its checksum. It may disappear at any time: a process that finds no file, or a damaged one, fetches
    the range again. The checksum does not show damage before the bytes arrived here: a reader whose own checks fail
    calls ``refetch``.

    Before this user's files exceed ``max_bytes``, a process removes the least recently used ones, down to 90 % of the
    limit. If it cannot remove them, it adds no files. Links, and files and folders of other users, are not read,
    replaced or removed.
    """

    def __init__(self, inner: Store, folder: Path, max_bytes: int, run_id: str = ""):
        """``run_id``: keeps the entries of different runs apart, also if the runs have the same URL."""
        self._inner = inner
        self._run = run_id
        self._folder = folder
        self._max = max_bytes
        self._added = 0
        self._full = False
        with writable(f"cache_dir={folder}", "folder"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return self._inner.url

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        found = [self._load(*self._place(name, r)) for r in ranges]
        missing = [r for r, view in zip(ranges, found, strict=True) if view is None]
        if missing:
            fetched = iter(self.refetch(name, missing))
            found = [next(fetched) if view is None else view for view in found]
        return [view for view in found if view is not None]

    def refetch(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """``get_ranges`` from the inner store. Replaces the entries of ``ranges``: a reader found them damaged."""
        views = self._inner.get_ranges(name, ranges)
        for r, view in zip(ranges, views, strict=True):
            self._save(*self._place(name, r), view)
        return views

    def _place(self, name: str, span: tuple[int, int]) -> tuple[str, str]:
        """(subfolder, file name) of a range in the cache."""
        text = f"{self._run}\0{self.url}\0{name}\0{span[0]}\0{span[1]}".encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(text, digest_size=16).hexdigest()
        return digest[:2], digest

    @contextlib.contextmanager
    def _opened(self, folder: str, *, make: bool = False) -> Iterator[int]:
        with opened(self._folder, folder, make=make) as fd:
            if os.fstat(fd).st_uid != os.geteuid():
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
            yield fd

    def _load(self, folder: str, name: str) -> memoryview | None:
        try:
            with self._opened(folder) as fd, os.fdopen(open_own(fd, name, os.O_RDONLY), "rb") as f:
                data = f.read()
                os.utime(f.fileno())
        except OSError:
            return None
        view = memoryview(data)
        if len(data) < _TRAILER or crc32c(view[:-_TRAILER]) != int.from_bytes(data[-_TRAILER:], "little"):
            return None
        return view[:-_TRAILER]

    def _save(self, folder: str, name: str, view: memoryview) -> None:
        size = len(view) + _TRAILER
        if not self._has_room(size):
            return
        # A full or missing disk must not end the training: a range that is not cached is fetched again.
        with contextlib.suppress(OSError), self._opened(folder, make=True) as fd:
            temporary = f"{_NEW}{uuid.uuid4().hex}"
            try:
                with os.fdopen(open_own(fd, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as f:
                    f.write(view)
                    f.write(crc32c(view).to_bytes(_TRAILER, "little"))
                os.rename(temporary, name, src_dir_fd=fd, dst_dir_fd=fd)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=fd)
                raise
            self._added += size

    def _has_room(self, size: int) -> bool:
        """Whether a file of ``size`` bytes may be added. Removes files if a check of the folder's size is due."""
        if size > self._max:
            return False
        look = _chance.random() < _LOOK
        if not look and (self._full or self._added <= self._max * _LOOK):
            return not self._full
        try:
            self._evict(size)
        except OSError as e:
            if not self._full:
                log.warning("cache_dir=%s: no range is added, because files cannot be removed: %r", self._folder, e)
            self._full = True
        else:
            self._full, self._added = False, 0
        return not self._full

    def _evict(self, size: int) -> None:
        """Make room for ``size`` bytes. Raises ``OSError`` if that is impossible.

        Takes no lock, since a neighbour in a shared folder could hold it. Processes that do this at the same time
        remove the same files: each counts a file that another one removed as removed.
        """
        files = []
        with opened(self._folder) as top, os.scandir(top) as found:
            folders = [entry.name for entry in found if _FOLDER.fullmatch(entry.name)]
        for folder in folders:
            with contextlib.suppress(OSError), self._opened(folder) as fd, os.scandir(fd) as found:
                for entry in found:
                    with contextlib.suppress(FileNotFoundError):  # another process just removed or renamed it
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode) and _FILE.fullmatch(entry.name):
                            files.append((status.st_mtime, status.st_size, folder, entry.name))
        total = size + sum(nbytes for _, nbytes, _, _ in files)
        if total <= self._max:
            return
        for _, nbytes, folder, name in sorted(files):
            with contextlib.suppress(FileNotFoundError), self._opened(folder) as fd:
                os.unlink(name, dir_fd=fd)
            total -= nbytes
            if total <= 0.9 * self._max:
                return

    # -- the inner store's ---------------------------------------------------------------------------------------------

    def put(self, name: str, buffers: Sequence[Buffer]) -> None:
        self._inner.put(name, buffers)

    def put_if_absent(self, name: str, data: bytes | Sequence[Buffer]) -> None:
        self._inner.put_if_absent(name, data)

    def get(self, name: str, most: int | None = None) -> bytes:
        return self._inner.get(name, most)

    def head(self, name: str) -> ObjectInfo:
        return self._inner.head(name)

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        return self._inner.list(prefix, after)

    def delete(self, name: str) -> None:
        self._inner.delete(name)
