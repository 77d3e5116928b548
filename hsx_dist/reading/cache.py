"""Fetched ranges of a store's objects on a local disk, up to a size; any number of processes may share the folder."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from hsx_dist.format.checksum import crc32c
from hsx_dist.store import ObjectInfo, Store
from hsx_dist.store.base import Buffer

_TRAILER = 4  # crc32c of what is before it
#: How often a process that puts something in looks at the folder's size; a run's objects never change.
_LOOK = 1 / 64


class CachedStore:
    """A ``Store`` whose ``get_ranges`` keeps what it fetched under ``folder``; everything else is the inner store's.

    A file appears whole (renamed into place), ends in its checksum, and may vanish at any time: whoever finds none, or
    a damaged one, fetches again. When the files exceed ``max_bytes`` those unused for longest are removed, down to nine
    tenths, by one process at a time.
    """

    def __init__(self, inner: Store, folder: Path, max_bytes: int):
        self._inner = inner
        self._folder = folder
        self._max = max_bytes
        self._added = 0
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return self._inner.url

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        found = [self._load(self._path(name, r)) for r in ranges]
        missing = [r for r, view in zip(ranges, found, strict=True) if view is None]
        if missing:
            fetched = iter(self._inner.get_ranges(name, missing))
            for i, r in enumerate(ranges):
                if found[i] is None:
                    view = found[i] = next(fetched)
                    self._save(self._path(name, r), view)
        return [view for view in found if view is not None]

    def _path(self, name: str, span: tuple[int, int]) -> Path:
        text = f"{self.url}\0{name}\0{span[0]}\0{span[1]}".encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(text, digest_size=16).hexdigest()
        return self._folder / digest[:2] / digest

    @staticmethod
    def _load(path: Path) -> memoryview | None:
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        view = memoryview(data)
        if len(data) < _TRAILER or crc32c(view[:-_TRAILER]) != int.from_bytes(data[-_TRAILER:], "little"):
            return None
        return view[:-_TRAILER]

    def _save(self, path: Path, view: memoryview) -> None:
        # A full or vanished disk must not end the training: what is not kept is fetched again.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)
            try:
                with os.fdopen(handle, "wb") as f:
                    f.write(view)
                    f.write(crc32c(view).to_bytes(_TRAILER, "little"))
                Path(temporary).replace(path)
            except OSError:
                Path(temporary).unlink(missing_ok=True)
                raise
            self._added += len(view)
            if self._added > self._max * _LOOK or random.random() < _LOOK:  # noqa: S311
                self._added = 0
                self._evict()

    def _evict(self) -> None:
        with (self._folder / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return  # another process is at it
            files = []
            for path in self._folder.glob("??/*"):
                with contextlib.suppress(OSError):
                    status = path.stat()
                    files.append((status.st_mtime, status.st_size, path))
            total = sum(size for _, size, _ in files)
            if total <= self._max:
                return
            for _, size, path in sorted(files):
                path.unlink(missing_ok=True)
                total -= size
                if total <= 0.9 * self._max:
                    return

    # -- the inner store's ---------------------------------------------------------------------------------------------

    def put(self, name: str, buffers: Sequence[Buffer]) -> None:
        self._inner.put(name, buffers)

    def put_if_absent(self, name: str, data: bytes | Sequence[Buffer]) -> None:
        self._inner.put_if_absent(name, data)

    def get(self, name: str) -> bytes:
        return self._inner.get(name)

    def head(self, name: str) -> ObjectInfo:
        return self._inner.head(name)

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        return self._inner.list(prefix, after)

    def delete(self, name: str) -> None:
        self._inner.delete(name)
