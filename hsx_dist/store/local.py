"""Objects as files under a folder of this machine, or of a mount that all nodes share."""

from __future__ import annotations

import errno
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hsx_dist.errors import AlreadyExists, Denied, NotFound, StoreError, Unavailable
from hsx_dist.home import with_home
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
from hsx_dist.store.faults import FULL, TRANSIENT
from hsx_dist.store.file_io import closed_after, read_range, write_all
from hsx_dist.store.folder_listing import UNFINISHED, FolderListing, unfinished_files
from hsx_dist.store.folders import SAFELY, SyncedFolders, has_name, is_at, open_folder, opened
from hsx_dist.store.inode_lock import NOT_OPENED, lacks_locks, lock_exclusively, lock_for_put, unlocked_after
from hsx_dist.store.root_folder import RootFolder

_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})

_synced = SyncedFolders()


class LocalStore:
    """A ``Store`` over a folder. An object is written to a temporary file in its folder, synced, and then renamed.

    The first put makes the folder. Temporary files begin with ``.hsx-unfinished-``. Object names whose last component
    begins so raise ``ValueError``. Killed processes leave temporary files; only ``unfinished`` lists them.

    Symbolic links: ``root`` may be one. Below the root,

    - reading follows links, as a run may be in a cache of links;
    - a put follows links that this process's user or root made, and replaces a link with the object's name;
    - a delete follows none;
    - a listing raises ``StoreError`` for a link whose target is missing or has an error, if an object below the link
      could have the listed prefix: an object or a folder may be lost.

    Sockets, FIFOs and devices are no objects.

    The root's mount may be gone for a moment. A store that has seen its root takes no other folder at that path for it.
    Calls that find an object missing there, or store one, raise ``Unavailable``. See ``RootFolder``.
    """

    #: Whether a put follows links that this process's user or root made.
    _own_links = True

    def __init__(self, root: str | os.PathLike[str]):
        self._root = RootFolder(with_home(root).absolute())

    @property
    def url(self) -> str:
        return str(self._root.path)

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    def put(self, name: str, buffers: Sequence[Buffer]) -> None:
        folder, last = self._split(name)
        views = [view for view in map(as_bytes_view, buffers) if view.nbytes]
        with self._translating("put", name), self._writing(folder) as fd, _unfinished(fd, views) as (temporary, found):
            _place(fd, temporary, last, f"put {self.url}/{name}")
            _sync(fd)
        self._root.saw(name, found, "last")

    def put_if_absent(self, name: str, data: bytes | Sequence[Buffer]) -> None:
        folder, last = self._split(name)
        views = [view for view in map(as_bytes_view, as_buffers(data)) if view.nbytes]
        with self._translating("put", name), self._writing(folder) as fd, _unfinished(fd, views) as (temporary, found):
            try:
                _link(fd, temporary, last)  # atomic: only one of several concurrent links succeeds
            except FileExistsError:
                # The put that made the object may have failed in its sync. A retry of that put and a caller that
                # gets AlreadyExists both rely on the object.
                _sync(fd)
                # If an NFS server's answer is lost, the kernel sends the call again, which finds its own link.
                if not has_name(found, fd, last):
                    raise AlreadyExists(f"{self.url}/{name}: expected no object of this name, got one") from None
            except OSError as e:
                if e.errno not in _NO_LINKS:
                    raise
                raise StoreError(
                    f"{self.url}/{name}: expected a file system with hard links, which create-only writes need, got "
                    f"{e.strerror}. Use another folder, or an object store"
                ) from e
            _sync(fd)
        self._root.saw(name, found, "last")

    def get(self, name: str, most: int | None = None) -> bytes:
        with self._translating("get", name), self._reading(name) as fd, open(fd, "rb", closefd=False) as file:
            return file.read(-1 if most is None else min(most, os.fstat(fd).st_size))

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        check_ranges(name, ranges)
        spans = coalesce(ranges)
        with self._translating("get", name), self._reading(name) as fd:
            size = os.fstat(fd).st_size
            # Clipped before the allocation: a range may be read from a damaged or forged object.
            contents = [read_range(fd, start, min(stop, size)) for start, stop in spans]
        return cut(f"{self.url}/{name}", ranges, spans, contents)

    def head(self, name: str) -> ObjectInfo:
        path = self._path(name)
        with self._translating("head", name):
            found = self._found(path, name)
            if not stat.S_ISREG(found.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            self._root.read(name, found)
            return ObjectInfo(name, found.st_size)

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        with self._translating("list", prefix):
            yield from self._listed(prefix, after)

    def list_readable(self, unreadable: Callable[[str], None], after: str | None = None) -> Iterator[ObjectInfo]:
        """See ``Folders``."""
        with self._translating("list", ""):
            yield from self._listed("", after, unreadable)

    def delete(self, name: str) -> None:
        folder, _, last = check_name(name).rpartition("/")
        with (
            self._translating("delete", name),
            suppress(FileNotFoundError, NotADirectoryError),
            self._opened(folder) as fd,
        ):
            self._root.forget(name)
            os.unlink(last, dir_fd=fd)

    def version(self, name: str) -> str:
        """See ``Conditional``."""
        folder, last = self._split(name)
        with self._translating("head", name), self._opened(folder) as fd:
            return _version(os.stat(last, dir_fd=fd, follow_symlinks=False))

    def delete_version(self, name: str, version: str) -> bool:
        """See ``Conditional``. Also returns False while another process replaces or deletes the object.

        Puts of all processes wait during the call, on NFS also those of other machines.
        """
        folder, last = self._split(name)
        with (
            self._translating("delete", name),
            suppress(FileNotFoundError, NotADirectoryError),
            self._opened(folder) as fd,
            self._locked(fd, last, version) as unchanged,
        ):
            if unchanged:
                self._root.forget(name)
                os.unlink(last, dir_fd=fd)
            return unchanged
        return False

    def put_version(self, name: str, buffers: Sequence[Buffer], version: str) -> bool:
        """See ``Conditional``. Also returns False while another process replaces or deletes the object."""
        folder, last = self._split(name)
        views = [view for view in map(as_bytes_view, buffers) if view.nbytes]
        with (
            self._translating("put", name),
            self._writing(folder) as fd,
            _unfinished(fd, views) as (temporary, found),
            self._locked(fd, last, version) as unchanged,
        ):
            if unchanged:
                os.rename(temporary, last, src_dir_fd=fd, dst_dir_fd=fd)
                _sync(fd)
        if unchanged:
            self._root.saw(name, found, "last")
        return unchanged

    @contextmanager
    def _locked(self, folder: int, last: str, version: str) -> Iterator[bool]:
        """Lock a file in the open ``folder`` against puts and conditional deletes.

        Yields whether the lock is held and ``version`` is still the file's version.
        """
        try:
            file = os.open(last, os.O_RDWR | SAFELY, dir_fd=folder)
        except FileNotFoundError:
            yield False
            return
        with unlocked_after(file):
            try:
                locked = lock_exclusively(file)
            except OSError as e:
                if not lacks_locks(file, e):
                    raise
                raise not_conditional(self.url) from e
            yield locked and is_at(file, folder, last) and _version(os.fstat(file)) == version

    def unfinished(
        self, older_than: float = 0.0, unreadable: Callable[[str], None] | None = None
    ) -> Iterator[ObjectInfo]:
        """See ``Folders``. Links are not followed."""
        with self._translating("list", UNFINISHED), suppress(FileNotFoundError), self._root.opened() as root:
            for name, found in unfinished_files(root, unreadable):
                if time.time() - found.st_mtime >= older_than:
                    yield ObjectInfo(name, found.st_size)
            self._root.require_still(root)

    def _path(self, name: str) -> Path:
        if check_name(name).rpartition("/")[2].startswith(UNFINISHED):
            raise ValueError(
                f"expected a name that does not begin with {UNFINISHED!r} (unfinished objects), got {name!r}"
            )
        return self._root.path / name

    def _split(self, name: str) -> tuple[str, str]:
        """Return (folder below the root, name in the folder)."""
        self._path(name)
        folder, _, last = name.rpartition("/")
        return folder, last

    @contextmanager
    def _reading(self, name: str) -> Iterator[int]:
        path = self._path(name)
        self._require_file(name, self._found(path, name))  # opening a device may have side effects
        try:
            # Opening a FIFO would block until another process writes into it.
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            self._found(path, name)  # raises if the object was just deleted
            raise Unavailable(
                f"get {path}: expected the object that was just found, got none. Check its mount"
            ) from None
        with closed_after(file) as fd:
            found = os.fstat(fd)
            self._require_file(name, found)
            self._root.read(name, found)
            yield fd

    def _found(self, path: Path, name: str) -> os.stat_result:
        """Return the file's status. Raises ``FileNotFoundError`` only after the object's folder was opened.

        An NFS client remembers for a minute that a name is missing, and asks the server when the folder is opened. The
        folder is opened from the root that this object has seen: the mount may be gone.
        """
        with suppress(FileNotFoundError, NotADirectoryError):
            return path.stat()
        folder, last = self._split(name)
        with (
            self._root.opened(search=True) as root,
            closed_after(open_folder(folder or ".", dir_fd=root, search=True)) as parent,
        ):
            return os.stat(last, dir_fd=parent)

    def _require_file(self, name: str, found: os.stat_result) -> None:
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(found.st_mode):
            raise StoreError(f"get {self.url}/{name}: expected a file, got a FIFO, socket or device. Remove it")

    @contextmanager
    def _writing(self, folder: str) -> Iterator[int]:
        """Yield the open folder. Makes it and syncs its name if necessary."""
        with self._root.opened(make=True) as root:
            _synced.once(os.path.realpath(self._root.path), root, lambda: self._sync_root(root))
            with opened(root, folder, make=True, own_links=self._own_links, entered=_sync_name) as fd:
                yield fd
            self._root.require_still(root)

    @contextmanager
    def _opened(self, folder: str) -> Iterator[int]:
        """Yield the open folder, from which files are opened or removed."""
        with self._root.opened(search=True) as root, opened(root, folder, search=True) as fd:
            yield fd

    def _sync_root(self, root: int) -> None:
        """Sync the names of the root and its parents. Another process may have made them and died before its sync."""
        device = os.fstat(root).st_dev
        for folder in Path(os.path.realpath(self._root.path)).parents:
            if folder.stat().st_dev != device:
                break  # the folder below is a mount point, which no process makes by ``mkdir``
            with suppress(PermissionError), opened(folder) as fd:  # searchable, but not readable
                _sync(fd)

    def _listed(
        self, prefix: str, after: str | None, unreadable: Callable[[str], None] | None = None
    ) -> Iterator[ObjectInfo]:
        with ExitStack() as opened:
            try:
                root = opened.enter_context(self._root.opened())
            except FileNotFoundError:
                return  # without a root nothing is stored yet
            try:
                for name, found in FolderListing(self._root.path, root, prefix, after, unreadable).objects():
                    self._root.saw(name, found, "listed")
                    yield ObjectInfo(name, found.st_size)
            except FileNotFoundError:
                self._root.require_still(root)
                raise
            self._root.require_still(root)

    @contextmanager
    def _translating(self, verb: str, name: str) -> Iterator[None]:
        """Translate the file system's errors into the store's."""
        where = f"{verb} {self.url}/{name}"
        try:
            yield
        except StoreError:
            raise
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as e:
            if verb == "put":
                self._root.require()
                raise StoreError(
                    f"{where}: expected a folder to write into, got {e.strerror}: an object and a folder cannot "
                    "share a name here. Choose another name or output"
                ) from e
            if verb == "delete" and isinstance(e, IsADirectoryError):
                raise StoreError(f"{where}: expected an object, got a folder. Name an object in it") from e
            if verb == "list":  # not NotFound: a caller could take the objects for missing
                raise StoreError(f"{where}: expected a folder, got {e.strerror}. Check the path") from e
            raise NotFound(f"{where}: there is no such object") from e
        except PermissionError as e:
            self._root.require()  # the folder below a mount is often private
            raise Denied(f"{where}: {e.strerror}. Check the folder's owner and mode, or choose another output") from e
        except OSError as e:
            if e.errno in FULL:
                raise StoreError(f"{where}: {e.strerror}. Free some space, or choose another output") from e
            if isinstance(e, FileExistsError):
                raise StoreError(f"{where}: expected folders, got a file in the path. Choose another output") from e
            if e.errno == errno.ELOOP:
                raise StoreError(
                    f"{where}: expected folders, got {e.strerror}: links are not followed here. Name the folder "
                    "that the link points to, or remove the link"
                ) from e
            kind = Unavailable if e.errno in TRANSIENT else StoreError
            raise kind(f"{where}: {e.strerror or e}") from e


@contextmanager
def _unfinished(folder: int, views: Sequence[memoryview]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield name and status of a complete, synced file in the open ``folder``, and remove that name at the end.

    A failed sync is not retried on the same file: the kernel may have dropped the bytes, and would report success.
    ``hsx gc`` may remove the file if it finds no heartbeat of this process's driver. A retried put writes another file.
    """
    temporary = f"{UNFINISHED}{uuid.uuid4().hex}"
    try:
        made = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFELY, 0o666, dir_fd=folder)
        with closed_after(made) as fd:
            if not write_direct(fd, views):
                write_all(fd, views)
            os.fsync(fd)
            found = os.fstat(fd)
        yield temporary, found
    except FileNotFoundError as e:
        raise Unavailable(f"put {temporary}: expected the file it wrote, got none: another process removed it") from e
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)


def _link(folder: int, temporary: str, last: str) -> None:
    os.link(temporary, last, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)


def _place(folder: int, temporary: str, last: str, what: str) -> None:
    """Give the file its final name and replace an object of that name.

    Waits for another put or a conditional delete of the object. Raises ``Denied`` for an object that this user may
    not read.
    """
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
            except (PermissionError, BlockingIOError):
                there = os.open(last, os.O_RDONLY | SAFELY, dir_fd=folder)
        except PermissionError as e:  # without a lock, a conditional delete could remove the new object
            raise Denied(
                f"{what}: expected an object that this user may read, so that the put can lock it, got "
                f"{e.strerror}. Change the object's owner or mode, or delete it"
            ) from e
        except OSError as e:
            if e.errno == errno.ENOENT and has_links:
                continue  # just deleted
            if e.errno not in NOT_OPENED:
                raise
            break
        with unlocked_after(there):
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
    """Sync a subfolder's name once.

    Needed even if the subfolder existed: an earlier put's sync may have failed, or a process may have died before it.
    """
    above = os.fstat(parent)
    _synced.once((above.st_dev, above.st_ino, name), child, lambda: _sync(parent))


def _sync(folder: int) -> None:
    """Sync new names in the open ``folder``, so that they survive a power cut."""
    try:
        os.fsync(folder)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network mounts cannot sync a folder
            raise
