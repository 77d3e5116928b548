"""Objects as files under one folder of this machine (or of a mount that all nodes share)."""

from __future__ import annotations

import errno
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from hsx_dist.errors import AlreadyExists, Denied, NotFound, StoreError, Unavailable
from hsx_dist.store.base import (
    Buffer,
    ObjectInfo,
    as_buffers,
    as_bytes_view,
    check_name,
    check_ranges,
    coalesce,
    cut,
    not_conditional,
)
from hsx_dist.store.direct import write_direct
from hsx_dist.store.faults import FULL
from hsx_dist.store.folder_listing import UNFINISHED, FolderListing
from hsx_dist.store.folders import SAFELY, SyncedFolders, is_at, opened
from hsx_dist.store.inode_lock import lock_exclusively, lock_for_put

#: Buffers in one `writev`. POSIX systems take 1024; half of it leaves room.
_IOV_MAX = 512
_TRANSIENT = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.EINTR})
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})

_synced = SyncedFolders()


class LocalStore:
    """A ``Store`` over a folder: an object is written beside its name, synced, and renamed when it is whole.

    The folder is made by the first put. Names ending in a component that begins with ``.hsx-unfinished-`` are refused,
    and such files, which a killed process leaves, are not listed (but by ``unfinished``).

    Symbolic links: ``root`` may be one. Below it, reading follows links (a run may lie in a cache of links); a put
    follows links to folders that this process's user or root made, and replaces a link in the object's place; a delete
    follows none. A listing that meets a link to nothing raises ``StoreError``: an object or a folder of objects may be
    lost. What is neither a file nor a folder is no object.
    """

    def __init__(self, root: str | os.PathLike[str]):
        self._root = Path(root).expanduser().absolute()

    @property
    def url(self) -> str:
        return str(self._root)

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    def put(self, name: str, buffers: Sequence[Buffer]) -> None:
        folder, last = self._split(name)
        views = [view for view in map(as_bytes_view, buffers) if view.nbytes]
        with self._telling("put", name), self._writing(folder) as fd, _unfinished(fd, views) as temporary:
            _place(fd, temporary, last, f"put {self.url}/{name}")
            _sync(fd)

    def put_if_absent(self, name: str, data: bytes | Sequence[Buffer]) -> None:
        folder, last = self._split(name)
        views = [view for view in map(as_bytes_view, as_buffers(data)) if view.nbytes]
        with self._telling("put", name), self._writing(folder) as fd, _unfinished(fd, views) as temporary:
            try:
                _link(fd, temporary, last)  # of several that link one name, the kernel lets exactly one
            except FileExistsError:
                # The put that made the object may have failed in its sync. A repetition of that put and a caller that
                # gets AlreadyExists both rely on the object.
                _sync(fd)
                raise AlreadyExists(f"{self.url}/{name}: expected no object of this name, and there is one") from None
            except OSError as e:
                if e.errno not in _NO_LINKS:
                    raise
                raise StoreError(
                    f"{self.url}/{name}: expected a file system with hard links, which create-only writes need; got "
                    f"{e.strerror}. Use another folder, or an object store"
                ) from e
            _sync(fd)

    def get(self, name: str, most: int | None = None) -> bytes:
        with self._telling("get", name), self._reading(name) as fd, open(fd, "rb", closefd=False) as file:
            return file.read(-1 if most is None else min(most, os.fstat(fd).st_size))

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        check_ranges(name, ranges)
        spans = coalesce(ranges)
        with self._telling("get", name), self._reading(name) as fd:
            size = os.fstat(fd).st_size
            # Clipped before anything is allocated: a range may come from an object that lies.
            contents = [_read(fd, start, min(stop, size)) for start, stop in spans]
        return cut(f"{self.url}/{name}", ranges, spans, contents)

    def head(self, name: str) -> ObjectInfo:
        path = self._path(name)
        with self._telling("head", name):
            found = path.stat()
            if not stat.S_ISREG(found.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            return ObjectInfo(name, found.st_size)

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        with self._telling("list", prefix):
            yield from self._listed(prefix, after)

    def list_readable(self, unreadable: Callable[[str], None], after: str | None = None) -> Iterator[ObjectInfo]:
        """See ``Folders``."""
        with self._telling("list", ""):
            yield from self._listed("", after, unreadable)

    def delete(self, name: str) -> None:
        folder, _, last = check_name(name).rpartition("/")
        with (
            self._telling("delete", name),
            suppress(FileNotFoundError, NotADirectoryError),
            opened(self._root, folder) as fd,
        ):
            os.unlink(last, dir_fd=fd)

    def version(self, name: str) -> str:
        """See ``Conditional``."""
        folder, last = self._split(name)
        with self._telling("head", name), opened(self._root, folder) as fd:
            return _version(os.stat(last, dir_fd=fd, follow_symlinks=False))

    def delete_version(self, name: str, version: str) -> bool:
        """See ``Conditional``. False also while another process replaces or deletes the object. A put of any process
        waits meanwhile, also on another machine where the file system passes locks on (NFS)."""
        folder, last = self._split(name)
        with (
            self._telling("delete", name),
            suppress(FileNotFoundError),
            opened(self._root, folder) as fd,
            self._locked(fd, last, version) as unchanged,
        ):
            if unchanged:
                os.unlink(last, dir_fd=fd)
            return unchanged
        return False

    def put_version(self, name: str, buffers: Sequence[Buffer], version: str) -> bool:
        """See ``Conditional``. False also while another process replaces or deletes the object."""
        folder, last = self._split(name)
        views = [view for view in map(as_bytes_view, buffers) if view.nbytes]
        with (
            self._telling("put", name),
            self._writing(folder) as fd,
            _unfinished(fd, views) as temporary,
            self._locked(fd, last, version) as unchanged,
        ):
            if unchanged:
                os.rename(temporary, last, src_dir_fd=fd, dst_dir_fd=fd)
                _sync(fd)
            return unchanged

    @contextmanager
    def _locked(self, folder: int, last: str, version: str) -> Iterator[bool]:
        """Keep puts and conditional deletes from a file in the open ``folder``. Yields whether ``version`` is still its
        version, and False where there is no file or another process holds it."""
        try:
            file = os.open(last, os.O_RDWR | SAFELY, dir_fd=folder)
        except FileNotFoundError:
            yield False
            return
        with _opened(file):
            try:
                locked = lock_exclusively(file)
            except OSError as e:
                raise not_conditional(self.url) from e
            yield locked and is_at(file, folder, last) and _version(os.fstat(file)) == version

    def unfinished(
        self, older_than: float = 0.0, unreadable: Callable[[str], None] | None = None
    ) -> Iterator[ObjectInfo]:
        """See ``Folders``. Links are not followed."""

        def failed(error: OSError) -> None:
            path = Path(error.filename)
            if isinstance(error, PermissionError) and unreadable is not None and path != self._root:
                unreadable(path.relative_to(self._root).as_posix())
            elif not isinstance(error, FileNotFoundError):
                raise error

        with self._telling("list", UNFINISHED):
            for folder, below, names in os.walk(self._root, onerror=failed):
                below.sort()
                for path in (Path(folder, name) for name in sorted(names) if name.startswith(UNFINISHED)):
                    try:
                        found = path.lstat()
                    except FileNotFoundError:
                        continue  # finished meanwhile
                    except PermissionError as e:
                        e.filename = folder
                        failed(e)
                        continue
                    if time.time() - found.st_mtime >= older_than:
                        yield ObjectInfo(path.relative_to(self._root).as_posix(), found.st_size)

    def _path(self, name: str) -> Path:
        if check_name(name).rpartition("/")[2].startswith(UNFINISHED):
            raise ValueError(f"{name!r}: names beginning with {UNFINISHED!r} are kept for objects being written")
        return self._root / name

    def _split(self, name: str) -> tuple[str, str]:
        """(folder below the root, name in it)"""
        self._path(name)
        folder, _, last = name.rpartition("/")
        return folder, last

    @contextmanager
    def _reading(self, name: str) -> Iterator[int]:
        path = self._path(name)
        self._require_file(name, path.stat())  # opening a device may set it going
        # Opening a FIFO would block until another process writes into it.
        with _opened(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as fd:
            self._require_file(name, os.fstat(fd))
            yield fd

    def _require_file(self, name: str, found: os.stat_result) -> None:
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(found.st_mode):
            raise StoreError(f"get {self.url}/{name}: expected a file, got a FIFO, socket or device. Remove it")

    @contextmanager
    def _writing(self, folder: str) -> Iterator[int]:
        """The open folder, made and synced in the folder above it."""
        self._root.mkdir(parents=True, exist_ok=True)
        with opened(self._root) as root:
            _synced.once(os.path.realpath(self._root), root, lambda: self._sync_root(root))
        with opened(self._root, folder, make=True, own_links=True, entered=_sync_name) as fd:
            yield fd

    def _sync_root(self, root: int) -> None:
        """Sync the names of the root and of the folders above it. Another process may have made any of them, and died
        before its sync."""
        device = os.fstat(root).st_dev
        for folder in Path(os.path.realpath(self._root)).parents:
            if folder.stat().st_dev != device:
                break  # the folder below is a mount point: no process made it by ``mkdir``
            with suppress(PermissionError), opened(folder) as fd:  # searchable, but not readable
                _sync(fd)

    def _listed(
        self, prefix: str, after: str | None, unreadable: Callable[[str], None] | None = None
    ) -> Iterator[ObjectInfo]:
        return FolderListing(self._root, prefix, after, unreadable).objects()

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
            if e.errno == errno.ELOOP:
                raise StoreError(
                    f"{where}: expected folders, got {e.strerror}; links are not followed here. Name the folder that "
                    "it leads to, or remove it"
                ) from e
            kind = Unavailable if e.errno in _TRANSIENT else StoreError
            raise kind(f"{where}: {e.strerror or e}") from e


@contextmanager
def _opened(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _unfinished(folder: int, views: Sequence[memoryview]) -> Iterator[str]:
    """Name of a whole and synced file in the open ``folder``; gone when the context ends, whatever happened.

    A file that cannot be synced is never synced again: the kernel may have dropped its bytes, and would report success.
    ``hsx gc`` may remove the file if it sees no sign of life of this process's driver. A repeated put writes another.
    """
    temporary = f"{UNFINISHED}{uuid.uuid4().hex}"
    try:
        with _opened(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFELY, 0o666, dir_fd=folder)) as fd:
            if not write_direct(fd, views):
                _write_all(fd, views)
            os.fsync(fd)
        yield temporary
    except FileNotFoundError as e:
        raise Unavailable(f"put {temporary}: expected the file it wrote, got none: another process removed it") from e
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)


def _link(folder: int, temporary: str, last: str) -> None:
    os.link(temporary, last, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)


def _place(folder: int, temporary: str, last: str, what: str) -> None:
    """Give the file its name, in place of what has it. Waits for another put or a conditional delete."""
    has_links = True
    while True:
        try:
            if has_links:
                _link(folder, temporary, last)
                return
        except FileExistsError:
            pass
        except OSError as e:
            if e.errno not in _NO_LINKS:
                raise
            has_links = False
        try:
            try:
                there = os.open(last, os.O_RDWR | SAFELY, dir_fd=folder)
            except PermissionError:
                there = os.open(last, os.O_RDONLY | SAFELY, dir_fd=folder)
        except OSError as e:
            if e.errno == errno.ENOENT and has_links:
                continue  # deleted meanwhile
            break  # a link, or a file that only another user may read
        with _opened(there):
            lock_for_put(there, what)
            if is_at(there, folder, last):
                os.rename(temporary, last, src_dir_fd=folder, dst_dir_fd=folder)
                return
    os.rename(temporary, last, src_dir_fd=folder, dst_dir_fd=folder)


def _version(found: os.stat_result) -> str:
    if not stat.S_ISREG(found.st_mode):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return f"{found.st_dev}-{found.st_ino}-{found.st_size}-{found.st_mtime_ns}-{found.st_ctime_ns}"


def _sync_name(parent: int, child: int, name: str) -> None:
    """Sync a subfolder's name once, also of a subfolder that exists: an earlier put may have failed in its sync, or
    another process may have died before it."""
    above = os.fstat(parent)
    _synced.once((above.st_dev, above.st_ino, name), child, lambda: _sync(parent))


def _sync(folder: int) -> None:
    """Make new names in the open ``folder`` survive a power cut."""
    try:
        os.fsync(folder)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network mounts cannot sync a folder
            raise


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
