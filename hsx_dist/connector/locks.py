"""Companion locks, as in vLLM's own connector: ``PATH.lock`` is held exclusively until the object is stored.

vLLM's and this project's ``load_hidden_states`` take the lock shared. Both sleep until the object or its marker is
stored.

A thread makes the lock files while the model runs. One file may take half a millisecond (ext4, after many deletions),
which would delay the engine's thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import queue
import resource
import stat
import struct
import sys
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from hsx_dist.format.markers import lock_name
from hsx_dist.logger import get_logger
from hsx_dist.store.folder_listing import UNFINISHED
from hsx_dist.store.folders import SAFELY, close, close_lock, closed_on_error, is_at, opened
from hsx_dist.transport.affinity import any_core

log = get_logger(__name__)

#: Seconds that ``release_all`` waits for lock files that are being made.
END_S = 5.0
#: Seconds that a step waits, for all its locks together, while other processes hold some. `hsx gc` holds a lock for a
#: moment, another server for the duration of a request.
BRIEF_S = 0.02
#: Seconds between two tries of these locks.
PAUSE_S = 0.001
#: Seconds between two tries of locks that were not taken within ``BRIEF_S``.
RETRY_S = 0.005
#: Any process that may open a lock file can hold its lock. vLLM's ``load_hidden_states`` opens it for reading. The
#: server's group may do so; other users may not.
MODE = 0o640


@dataclass(slots=True)
class _Lock:
    fd: int
    held: bool  # if False, another process holds the lock and removes the file; the thread retries
    holders: set[str] = field(default_factory=set)
    going: bool = False  # the last holder's thread is checking whether to remove the file
    stored: bool = False  # an object was stored under this lock: the file stays
    #: Locks on earlier files, which another program removed. Readers that opened them still wait.
    removed: list[int] = field(default_factory=list)

    def close(self) -> None:
        for fd in (self.fd, *self.removed):
            close_lock(fd)


class _TooManyLocks(OSError):
    """Half of the process's file descriptors hold locks."""


class ObjectLocks:
    """The locks of one worker on objects under ``folder``. Thread-safe."""

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)
        # Such a folder is not made again: its mount may be gone.
        self._made = os.path.isdir(folder)  # noqa: PTH112 - ``Path.is_dir`` raises the errors of a mount
        self._held: dict[str, _Lock] = {}
        #: Names whose lock another process held at the last try.
        self._lacking: set[str] = set()
        self._removed = 0  # number of ``_Lock.removed`` of all locks
        #: Holder → name, from the holder's ``ask`` to its release, also while its lock is not held.
        self._names: dict[str, str] = {}
        self._mutex = threading.Lock()  # ``release`` never holds it during file system calls: steps wait for ``hold``
        self._asked: queue.Queue[tuple[str, str] | None] = queue.Queue()
        self._end: float | None = None  # when the current step stops waiting for other processes
        self._closed = False
        self._short = False  # descriptors do not suffice for all locks; logged once per shortage
        self._thread = threading.Thread(target=self._run, name="hsx-lock", daemon=True)
        with any_core():
            self._thread.start()

    def ask(self, name: str, holder: str) -> None:
        """Queue a ``hold`` of the lock on the thread; ``wait`` blocks until it is done.

        Does nothing after the end, or if the holder has asked before. If the holder is released first, the thread takes
        no lock for it.
        """
        if not self._closed and holder not in self._names:
            self._names[holder] = name  # without the mutex, which the thread holds during file system calls
            self._asked.put((name, holder))

    def wait(self) -> None:
        """Block until each queued lock is held, its file cannot be made (which is logged), or ``BRIEF_S`` has passed.

        The thread retries locks that another process still holds. Called at the end of a step: the next step may wait
        for ``BRIEF_S`` again.
        """
        self._asked.join()
        self._end = None

    def _run(self) -> None:
        busy: list[tuple[str, str]] = []  # other processes hold these locks; they are tried again after all others
        retry = time.monotonic() + RETRY_S  # when the lacking locks are tried again, also if requests never pause
        while True:
            wait = PAUSE_S if busy else max(0.0, retry - time.monotonic()) if self._lacking else None
            try:
                asked = self._asked.get(timeout=wait)
            except queue.Empty:
                busy = [asked for asked in busy if not self._settle(*asked)]
            else:
                if asked is None:
                    break
                if not self._settle(*asked):
                    busy.append(asked)
            if not busy and time.monotonic() >= retry:
                self._take_lacking()
                retry = time.monotonic() + RETRY_S
        for _ in (None, *busy):
            self._asked.task_done()

    def _take_lacking(self) -> None:
        """Retry locks that another process held. Without its lock, a request's reader would get an earlier object."""
        for name in list(self._lacking):
            with self._mutex:
                lock = self._held.get(name)
                if lock is not None and lock.going:
                    continue  # that thread may be replacing the file
                if lock is None or lock.held:
                    self._lacking.discard(name)
                    continue
            try:
                taken = self._open(name, last=False)
            except OSError:
                continue
            if taken is None:
                continue
            fd, held = taken
            with self._mutex:
                kept = self._held.get(name) is lock and not lock.going
                if kept:
                    fd, lock.fd, lock.held = lock.fd, fd, held
            if held and not kept and not self._is_there(name):
                self._remove(name, fd)
            close_lock(fd)

    def _settle(self, name: str, holder: str) -> bool:
        """Try a queued lock. Returns whether no further try is needed."""
        try:
            settled = self._hold(name, holder, last=self._end is not None and time.monotonic() >= self._end)
        except _TooManyLocks as e:
            log.log(logging.DEBUG if self._short else logging.WARNING, "no lock file for %r: %s", name, e)
            self._short = settled = True
        except Exception as e:  # noqa: BLE001 - a name that the file system refuses must not end the engine
            log.warning("no lock file for %r: %s", name, e)
            settled = True
        if settled:
            self._asked.task_done()
        elif self._end is None:
            self._end = time.monotonic() + BRIEF_S
        return settled

    def hold(self, name: str, holder: str) -> None:
        """Make the lock file of an object and hold its lock for ``holder``, a request.

        A second call for the same holder does nothing. Blocks for the file system, but not for a process that holds the
        lock.

        Raises:
            OSError: the file cannot be made or locked.
        """
        self._names.setdefault(holder, name)
        while not self._hold(name, holder, last=True):
            pass  # another process removed the file: make it again

    def _hold(self, name: str, holder: str, *, last: bool) -> bool:
        with self._mutex:
            if self._names.get(holder) != name:
                return True  # released since it asked: nothing would release a lock that is taken now
            lock = self._held.get(name)
            if lock is None:
                self._check_room()
                taken = self._open(name, last=last)
                if taken is None:
                    return False
                self._held[name] = _Lock(*taken, holders={holder})
                return True
            lock.holders.add(holder)
            # ``release`` looks for the file itself, and makes it again.
            return lock.going or not lock.held or self._has_name(name, lock) or self._make_again(name, lock, last=last)

    def _make_again(self, name: str, lock: _Lock, *, last: bool) -> bool:
        """Lock a new file, because another program removed the file. Returns whether no further try is needed.

        Without it, readers of a new request would find no lock.
        """
        self._check_room()
        taken = self._open(name, last=last)
        if taken is None:
            return False
        lock.removed.append(lock.fd)
        self._removed += 1
        lock.fd, lock.held = taken
        return True

    def _has_name(self, name: str, lock: _Lock) -> bool:
        """Whether a file of the lock has its name. vLLM's ``cleanup_hidden_states`` removes files of held locks too.

        True also on a file system error.
        """
        folder, _, last = lock_name(name).rpartition("/")
        try:
            with opened(self._folder, folder, own_links=True) as place:
                return any(is_at(fd, place, last) for fd in (lock.fd, *lock.removed))  # a mount may be back
        except OSError as e:
            return not isinstance(e, FileNotFoundError)

    def _check_room(self) -> None:
        """Check the number of open lock files.

        Raises:
            _TooManyLocks: lock files use half of the file descriptors. Sockets and the store need the others.
        """
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = limit // 2 if limit != resource.RLIM_INFINITY else sys.maxsize
        files = len(self._held) + self._removed
        if files >= most:
            raise _TooManyLocks(
                errno.EMFILE,
                f"expected at most {most} open lock files (half of RLIMIT_NOFILE), got one more. Readers of this "
                "sample must poll. Raise ulimit -n",
            )
        if files < most // 2:
            self._short = False

    def pass_on(self, holder: str, to: str) -> None:
        """Transfer the lock of ``holder`` to ``to``, so that one holder stands for all waiting requests of a name."""
        with self._mutex:
            name = self._names.pop(holder, None)
            if name is None:
                return
            lock = self._held.get(name)
            if lock is None or holder not in lock.holders:
                self.ask(name, to)  # the thread has not taken the lock yet
                return
            lock.holders.discard(holder)
            lock.holders.add(to)
            self._names[to] = name

    def release(self, holder: str, *, stored: bool) -> None:
        """Remove a holder. The last one releases the lock, and removes the lock file if there is no object."""
        with self._mutex:
            name = self._names.pop(holder, None)
            lock = self._held.get(name) if name is not None else None
            if name is None or lock is None:
                return
            lock.holders.discard(holder)
            lock.stored |= stored
            if lock.holders or lock.going:
                return
            lock.going = True
        looked = False
        while True:
            empty = not lock.stored and not self._is_there(name)
            with self._mutex:
                joined = bool(lock.holders)  # new requests, for which ``_hold`` has not looked for the file
                if joined and looked:
                    lock.going = False
                    return
                empty = empty and not lock.stored  # a new request may have stored an object and ended
            if not joined:
                if empty and lock.held:
                    for fd in (lock.fd, *lock.removed):
                        self._remove(name, fd)
                with self._mutex:
                    if self._held.get(name) is not lock:
                        return  # ``release_all`` has closed it
                    if not lock.holders:
                        del self._held[name]
                        self._removed -= len(lock.removed)
                        lock.close()
                        return
            # The file was removed, here or by another program: make another one for the new request.
            if lock.held and not self._has_name(name, lock):
                self._renew(name, lock)
            looked = True

    def _is_there(self, name: str) -> bool:
        """Whether there is an object. True also on a file system error, which must not block the release."""
        try:
            return (self._folder / name).exists()
        except OSError:
            return True

    def _renew(self, name: str, lock: _Lock) -> None:
        try:
            while (taken := self._open(name, last=True)) is None:
                pass  # another process removed the file
        except OSError as e:
            log.warning("no lock file for %r: %s", name, e)
            return
        fd, held = taken
        with self._mutex:
            if self._held.get(name) is lock:
                fd, lock.fd, lock.held = lock.fd, fd, held
            close_lock(fd)

    def release_all(self) -> None:
        """Close all lock files at shutdown, which releases their locks."""
        if not self._closed:
            self._closed = True
            self._asked.put(None)
        self._thread.join(END_S)
        if self._thread.is_alive():
            return  # a file system call hangs: the process's end releases the locks instead
        with self._mutex:
            for lock in self._held.values():
                lock.close()
            self._held.clear()
            self._names.clear()

    def _open(self, name: str, *, last: bool) -> tuple[int, bool] | None:
        """Open the lock file and try to lock it.

        Returns:
            The descriptor, and whether the lock is held. None if another process removed the file. If another process
            holds the lock to write the same object: None, except on the ``last`` try, which returns False.
        """
        try:
            return self._take(name, last=last)
        except FileNotFoundError:
            if not self._made:
                self._folder.mkdir(parents=True, exist_ok=True)
            return self._take(name, last=last)

    def _take(self, name: str, *, last: bool) -> tuple[int, bool] | None:
        folder, _, file = lock_name(name).rpartition("/")
        with opened(self._folder, folder, make=True, own_links=True) as place:
            self._made = True
            fd, made = _open_or_make(place, file)
            try:
                if _lock(fd, place, file, made=made):
                    return (os.dup(fd), True) if is_at(fd, place, file) else None
                if _flock(fd, fcntl.LOCK_SH):
                    # Readers hold it. Another server may have replaced it since it was opened, and hold the new file.
                    alone = _locks_out_replacers(fd)
                    if not is_at(fd, place, file):
                        return None
                    if alone:
                        return _replace(place, file), True
                    fcntl.flock(fd, fcntl.LOCK_UN)
                if not last:
                    return None
                self._lacking.add(name)
                return os.dup(fd), False
            finally:
                close(fd)

    def _remove(self, name: str, fd: int) -> None:
        """Remove the lock file ``fd``. Another server's file may be there: the mount may have been gone meanwhile."""
        folder, _, last = lock_name(name).rpartition("/")
        with contextlib.suppress(OSError), opened(self._folder, folder) as place:
            if is_at(fd, place, last):
                os.unlink(last, dir_fd=place)


def _open_or_make(place: int, name: str) -> tuple[int, bool]:
    """Return the open lock file, and whether this call made it."""
    try:
        return _open_file(place, name, os.O_EXCL), True
    except FileExistsError:
        return _open_file(place, name), False


def _lock(fd: int, place: int, name: str, *, made: bool) -> bool:
    """Lock a lock file. Returns False if another process holds it.

    Removes a file that this process ``made`` and that has no locks: its readers cannot know that no server holds it.

    Raises:
        OSError: the file has no locks.
    """
    try:
        return _flock(fd, fcntl.LOCK_EX)
    except OSError as e:
        if made and is_at(fd, place, name):
            os.unlink(name, dir_fd=place)
        raise OSError(e.errno, f"{e.strerror}. If the mount has no locks, set use_synchronization_lock=false") from e


def _open_file(place: int, name: str, flags: int = 0) -> int:
    """Open or make a lock file. A link or a FIFO that another user planted is an ``OSError``."""
    with closed_on_error(os.open(name, os.O_CREAT | os.O_RDWR | SAFELY | flags, MODE, dir_fd=place)) as fd:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "expected a regular file as lock file, got another kind of file", name)
        if found.st_size:  # a client chose the name of another program's file, such as uv.lock
            raise OSError(errno.EINVAL, "expected an empty lock file, got a file of another program", name)
    own = (
        found.st_uid == os.geteuid() and found.st_nlink == 1
    )  # else another user may have linked this user's file here
    if own and found.st_mode & ~MODE & 0o777:  # made by an earlier version or by vLLM's connector
        with contextlib.suppress(OSError):  # a file system without modes
            os.fchmod(fd, stat.S_IMODE(found.st_mode) & MODE)
    return fd


def _flock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _locks_out_replacers(fd: int) -> bool:
    """Lock a file against other callers until ``fd`` is closed. Readers use ``flock``, which does not see this lock."""
    if not hasattr(fcntl, "F_OFD_SETLK"):
        return True  # macOS
    whole_file = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, whole_file)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without such locks
        return True
    return True


def _replace(place: int, name: str) -> int:
    """Replace a lock file that readers hold. These readers continue; later readers wait for the new file's lock."""
    new = f"{UNFINISHED}{uuid.uuid4().hex}"  # a name that no store lists
    renewed = _open_file(place, new, os.O_EXCL)
    try:
        fcntl.flock(renewed, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(new, name, src_dir_fd=place, dst_dir_fd=place)
    except BaseException:
        close(renewed)
        with contextlib.suppress(OSError):
            os.unlink(new, dir_fd=place)
        raise
    return renewed
