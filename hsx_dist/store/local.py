"""Objects as files under one folder of this machine (or of a mount that all nodes share)."""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from hsx_dist.errors import AlreadyExists, Denied, NotFound, StoreError, Unavailable
from hsx_dist.store.base import Buffer, ObjectInfo, as_buffers, as_bytes_view, check_name, check_ranges, coalesce, cut
from hsx_dist.store.direct import write_direct
from hsx_dist.store.faults import FULL

#: Unfinished objects lie beside their final name, as a rename must stay within one file system.
UNFINISHED = ".hsx-unfinished-"
_IOV_MAX = 512
_TRANSIENT = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.EINTR})
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})


class LocalStore:
    """A ``Store`` over a folder: an object is written beside its name, synced, and renamed when it is whole.

    The folder is made by the first put. Names ending in a component that begins with ``.hsx-unfinished-`` are refused,
    and such files, which a killed process leaves, are not listed (but by ``unfinished``).
    """

    def __init__(self, root: str | os.PathLike[str]):
        self._root = Path(root).expanduser().absolute()

    @property
    def url(self) -> str:
        return str(self._root)

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    def put(self, name: str, buffers: Sequence[Buffer]) -> None:
        path = self._path(name)
        views = [view for view in map(as_bytes_view, buffers) if view.nbytes]
        with self._telling("put", name), _unfinished(path, views) as temporary:
            temporary.replace(path)
            _sync_folder(path.parent)

    def put_if_absent(self, name: str, data: bytes | Sequence[Buffer]) -> None:
        path = self._path(name)
        views = [view for view in map(as_bytes_view, as_buffers(data)) if view.nbytes]
        with self._telling("put", name), _unfinished(path, views) as temporary:
            try:
                os.link(temporary, path)  # of several that link one name, the kernel lets exactly one
            except FileExistsError:
                raise AlreadyExists(f"{self.url}/{name}: expected no object of this name, and there is one") from None
            except OSError as e:
                if e.errno not in _NO_LINKS:
                    raise
                raise StoreError(
                    f"{self.url}/{name}: expected a file system with hard links, which create-only writes need; got "
                    f"{e.strerror}. Use another folder, or an object store"
                ) from e
            _sync_folder(path.parent)

    def get(self, name: str) -> bytes:
        with self._telling("get", name):
            return self._path(name).read_bytes()

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        check_ranges(name, ranges)
        spans = coalesce(ranges)
        with self._telling("get", name), self._path(name).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            # Clipped before anything is allocated: a range may come from an object that lies.
            contents = [_read(file.fileno(), start, min(stop, size)) for start, stop in spans]
        return cut(f"{self.url}/{name}", ranges, spans, contents)

    def head(self, name: str) -> ObjectInfo:
        path = self._path(name)
        with self._telling("head", name):
            if not path.is_file():
                path.stat()  # tells missing from forbidden
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            return ObjectInfo(name, path.stat().st_size)

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        with self._telling("list", prefix):
            yield from self._walk("", prefix, after)

    def delete(self, name: str) -> None:
        with self._telling("delete", name), suppress(FileNotFoundError, NotADirectoryError):
            (self._root / check_name(name)).unlink()

    def unfinished(self, older_than: float = 0.0) -> Iterator[ObjectInfo]:
        """What processes that were killed left of puts, unless it changed within ``older_than`` seconds: no ``list``
        shows it, ``delete`` removes it. Some of it may be being written."""
        with self._telling("list", UNFINISHED):
            for path in sorted(self._root.rglob(f"{UNFINISHED}*")):
                with suppress(FileNotFoundError):  # finished meanwhile
                    found = path.stat()
                    if time.time() - found.st_mtime >= older_than:
                        yield ObjectInfo(path.relative_to(self._root).as_posix(), found.st_size)

    def _path(self, name: str) -> Path:
        if check_name(name).rpartition("/")[2].startswith(UNFINISHED):
            raise ValueError(f"{name!r}: names beginning with {UNFINISHED!r} are kept for objects being written")
        return self._root / name

    def _walk(self, folder: str, prefix: str, after: str | None) -> Iterator[ObjectInfo]:
        try:
            with os.scandir(self._root / folder) as found:
                # "a-b" sorts before "a/b", but after "a": a folder takes its place with its slash.
                entries = sorted((f"{folder}{e.name}/" if e.is_dir() else f"{folder}{e.name}", e) for e in found)
        except FileNotFoundError:
            return  # nothing was ever stored, or the folder went away meanwhile
        for name, entry in entries:
            if name.endswith("/"):
                matches = name.startswith(prefix) or prefix.startswith(name)
                if matches and (after is None or name > after or after.startswith(name)):
                    yield from self._walk(name, prefix, after)
            elif name.startswith(prefix) and (after is None or name > after):
                if entry.name.startswith(UNFINISHED):
                    continue
                with suppress(FileNotFoundError):  # deleted meanwhile
                    yield ObjectInfo(name, entry.stat().st_size)

    @contextmanager
    def _telling(self, verb: str, name: str) -> Iterator[None]:
        """File-system errors as the store's own."""
        where = f"{verb} {self.url}/{name}"
        try:
            yield
        except StoreError:
            raise
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as e:
            if verb == "put":
                raise StoreError(
                    f"{where}: expected a folder to write into, got {e.strerror}; an object and a folder cannot "
                    "share a name here. Choose another name or output"
                ) from e
            raise NotFound(f"{where}: there is no such object") from e
        except PermissionError as e:
            raise Denied(f"{where}: {e.strerror}. Check the folder's owner and mode, or choose another output") from e
        except OSError as e:
            if e.errno in FULL:
                raise StoreError(f"{where}: {e.strerror}. Free some space, or choose another output") from e
            if isinstance(e, FileExistsError):
                raise StoreError(f"{where}: expected a folder, and there is a file of that name in its path") from e
            kind = Unavailable if e.errno in _TRANSIENT else StoreError
            raise kind(f"{where}: {e.strerror or e}") from e


@contextmanager
def _unfinished(path: Path, views: Sequence[memoryview]) -> Iterator[Path]:
    """A whole and synced file beside ``path``; gone when the context ends, whatever happened."""
    temporary = path.parent / f"{UNFINISHED}{uuid.uuid4().hex}"
    _make_folder(path.parent)
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            if not write_direct(fd, views):
                _write_all(fd, views)
            os.fsync(fd)
        finally:
            os.close(fd)
        yield temporary
    finally:
        with suppress(FileNotFoundError, NotADirectoryError):
            temporary.unlink()


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    with suppress(FileExistsError):
        folder.mkdir()
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Make a new name in ``folder`` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network mounts cannot sync a folder
            raise
    finally:
        os.close(fd)


def _write_all(fd: int, views: Sequence[memoryview]) -> None:
    todo = list(reversed(views))
    while todo:
        batch = todo[: -_IOV_MAX - 1 : -1]
        written = os.writev(fd, batch)
        while todo and written >= todo[-1].nbytes:
            written -= todo.pop().nbytes
        if written:
            todo[-1] = todo[-1][written:]


def _read(fd: int, start: int, stop: int) -> memoryview:
    data = np.empty(stop - start, np.uint8).data if stop > start else memoryview(b"")
    done = 0
    while done < data.nbytes:
        n = os.preadv(fd, [data[done:]], start + done)
        if n == 0:
            break  # truncated meanwhile
        done += n
    return data[:done]
