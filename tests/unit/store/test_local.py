from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from hsx_dist.errors import Denied, NotFound, StoreError, Unavailable
from hsx_dist.store import RetryStore, inode_lock, open_store
from hsx_dist.store.folders import is_at
from hsx_dist.store.inode_lock import lock_exclusively, lock_for_put
from hsx_dist.store.local import LocalStore
from tests.harness.users import OTHER, as_a_user, as_root


def _files(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


def test_a_put_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put("a", [b"old"])

    def full(fd: int, buffers: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(StoreError, match=r"No space left on device\. Free some space") as told:
        store.put("a", [b"new"])
    assert type(told.value) is StoreError
    assert not told.value.retryable
    monkeypatch.undo()
    assert store.get("a") == b"old"
    assert _files(tmp_path) == ["a"]


@pytest.mark.parametrize("verb", ["put", "put_if_absent", "put_version"])
def test_a_put_whose_unfinished_file_another_process_removes_is_repeated(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``hsx gc --delete`` does this if it counts the driver as dead."""
    store = open_store(str(tmp_path))
    store.put("data/a" if verb == "put_version" else "data/b", [b"old"])
    version = (store.version("data/a"),) if verb == "put_version" else ()
    fsync, removed = os.fsync, []

    def remove(fd: int) -> None:
        fsync(fd)
        if not removed:
            [left] = store.unfinished()
            store.delete(left.name)
            removed.append(left)

    monkeypatch.setattr(os, "fsync", remove)
    getattr(store, verb)("data/a", [b"new"], *version)
    assert removed
    assert store.get("data/a") == b"new"
    assert not list(store.unfinished())


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, buffers: real(fd, [buffers[0][:3]]))
    store = LocalStore(tmp_path)
    store.put("a", [b"abcdefgh", b"ij", b"klmnop"])
    assert store.get("a") == b"abcdefghijklmnop"


def test_unfinished_files_of_a_killed_process_are_not_objects(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("d/a", [b"1"])
    (tmp_path / "d" / ".hsx-unfinished-0123").write_bytes(b"half")
    assert [o.name for o in store.list()] == ["d/a"]
    with pytest.raises(ValueError, match="expected a name that does not begin with"):
        store.get("d/.hsx-unfinished-0123")
    assert [o.name for o in RetryStore(store).unfinished()] == ["d/.hsx-unfinished-0123"]
    assert list(store.unfinished(older_than=3600)) == []  # it may be a file in progress
    store.delete("d/.hsx-unfinished-0123")
    assert list(store.unfinished()) == []


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.EACCES, Denied),
        (errno.ENAMETOOLONG, StoreError),
        *((number, Unavailable) for number in (errno.EIO, errno.ESTALE, errno.ENOLCK, errno.EREMOTEIO, errno.ENOTCONN)),
        *((number, Unavailable) for number in (errno.ESHUTDOWN, errno.EHOSTDOWN, errno.ENETUNREACH)),
        *((number, Unavailable) for number in (errno.ECONNRESET, errno.ECONNABORTED)),
    ],
)
def test_errors_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[StoreError]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> int:
        raise OSError(number, os.strerror(number))

    store = LocalStore(tmp_path)
    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(expected, match=os.strerror(number)) as told:
        store.put("a", [b"1"])
    assert type(told.value) is expected
    assert str(tmp_path) in str(told.value)


def test_put_if_absent_raises_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(StoreError, match="expected a file system with hard links"):
        LocalStore(tmp_path).put_if_absent("a", b"1")
    assert _files(tmp_path) == []
    for content in (b"1", b"2"):
        LocalStore(tmp_path).put("a", [content])
        assert (tmp_path / "a").read_bytes() == content


def test_an_object_in_the_way_of_a_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", [b"1"])
    for name in ("a/b", "a/b/c"):
        with pytest.raises(StoreError) as told:
            store.put(name, [b"2"])
        assert not isinstance(told.value, NotFound)
        assert "a folder" in str(told.value)
    store.put("d/e", [b"1"])
    with pytest.raises(StoreError, match="cannot share a name"):
        store.put("d", [b"2"])


def test_a_delete_of_a_folder_is_an_error_and_no_missing_object(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("folder/a", [b"1"])
    for delete in (lambda: store.delete("folder"), lambda: store.delete_version("folder", "1")):
        with pytest.raises(StoreError, match="expected an object, got a folder") as found:
            delete()
        assert not isinstance(found.value, NotFound)
    assert store.get("folder/a") == b"1"


def test_below_an_object_there_is_nothing_to_delete(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", [b"1"])
    store.delete("a/b")
    assert not store.delete_version("a/b", "1")


def test_relative_roots_do_not_follow_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = LocalStore("run")
    assert store.url == str(tmp_path / "run")
    store.put("a", [b"1"])
    monkeypatch.chdir("/")
    assert store.get("a") == b"1"


def test_a_range_beyond_the_object_is_not_allocated(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", [b"1"])
    with pytest.raises(ValueError, match="the object is shorter"):
        store.get_ranges("a", [(0, 2**60)])


def _fail_locks(monkeypatch: pytest.MonkeyPatch, number: int, times: float = float("inf")) -> None:
    """The next ``times`` locks fail, on a device that this process has not used."""
    left, call = [times], fcntl.fcntl

    def fail(fd: int, command: int, *args: Any) -> Any:
        if command != inode_lock._SET or left[0] <= 0:
            return call(fd, command, *args)
        left[0] -= 1
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.fcntl", fail)
    for devices in ("_locking", "_lockless"):
        monkeypatch.setattr(inode_lock, devices, set())


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_takes_puts_and_no_conditional_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(inode_lock, "LONGEST_S", 0.02)
    _fail_locks(monkeypatch, number)
    store = LocalStore(tmp_path)
    for content in (b"1", b"2", b"3"):
        store.put("a", [content])
    with pytest.raises(StoreError, match="expected a store with conditional deletes"):
        store.delete_version("a", store.version("a"))
    assert store.get("a") == b"3"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO])
def test_a_conditional_call_whose_lock_fails_for_a_moment_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = LocalStore(tmp_path)
    store.put("a", [b"1"])
    with monkeypatch.context() as broken:
        _fail_locks(broken, number)
        inode_lock._locking.add(tmp_path.stat().st_dev)
        with pytest.raises(Unavailable):
            store.put_version("a", [b"2"], store.version("a"))
        with pytest.raises(Unavailable):
            store.delete_version("a", store.version("a"))
    assert store.put_version("a", [b"2"], store.version("a"))
    assert store.delete_version("a", store.version("a"))


def test_a_put_waits_for_a_lock_service_that_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put("a", [b"old"])
    _fail_locks(monkeypatch, errno.ENOLCK, times=2)
    store.put("a", [b"new"])
    assert inode_lock._locking
    assert not inode_lock._lockless
    assert store.get("a") == b"new"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO, errno.ESTALE])
def test_a_put_without_its_lock_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """``hsx gc`` could delete the object of a put that goes on without the lock."""
    store = LocalStore(tmp_path)
    store.put("a", [b"old"])
    _fail_locks(monkeypatch, number, times=1)
    inode_lock._locking.add(tmp_path.stat().st_dev)
    with pytest.raises(Unavailable):
        store.put("a", [b"new"])
    assert store.get("a") == b"old"
    store.put("a", [b"new"])
    assert _files(tmp_path) == ["a"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EMFILE, errno.EIO, errno.ENFILE, errno.ESTALE])
def test_a_put_that_cannot_open_the_object_to_lock_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store, call = LocalStore(tmp_path), os.open
    store.put("a", [b"old"])

    def fail(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == "a":
            raise OSError(number, os.strerror(number))
        return call(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(StoreError, match=os.strerror(number)):
        store.put("a", [b"new"])
    monkeypatch.undo()
    assert store.get("a") == b"old"
    assert _files(tmp_path) == ["a"]


@as_root
@pytest.mark.parametrize(("mode", "content"), [(0o600, b"old"), (0o604, b"new")])
def test_a_put_replaces_only_an_object_that_its_user_may_read(tmp_path: Path, mode: int, content: bytes) -> None:
    """``hsx gc`` of the object's user could delete the new object: a put without a lock does not exclude it."""
    store = LocalStore(tmp_path)
    store.put("a", [b"old"])
    os.chown(tmp_path / "a", OTHER, OTHER)
    (tmp_path / "a").chmod(mode)
    code = "from hsx_dist.store.local import LocalStore\nLocalStore(sys.argv[1]).put('a', [b'new'])"
    _, err = as_a_user(code, str(tmp_path))
    assert store.get("a") == content
    assert ("Denied" in err and "that this user may read" in err) is (content == b"old")
    assert _files(tmp_path) == ["a"]


@pytest.mark.parametrize("kind", [fcntl.F_RDLCK, fcntl.F_WRLCK])
def test_a_put_does_not_wait_for_another_process_that_has_a_lease(tmp_path: Path, kind: int) -> None:
    """Servers of Samba and NFS have leases. The kernel makes an open wait until the server ends its lease."""
    store = LocalStore(tmp_path)
    store.put("a", [b"old"])
    with (tmp_path / "a").open("rb") as server:
        fcntl.fcntl(server, fcntl.F_SETSIG, signal.SIGURG)  # by default SIGIO, which ends the process
        try:
            fcntl.fcntl(server, fcntl.F_SETLEASE, kind)
        except OSError as e:
            pytest.skip(f"the file system has no leases: {e}")
        store.put("a", [b"new"])
    assert store.get("a") == b"new"


def test_a_put_does_not_wait_for_ever_for_a_delete_that_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hsx_dist.store.inode_lock.LONGEST_S", 0.02)
    store = LocalStore(tmp_path)
    store.put("a", [b"old"])
    with (tmp_path / "a").open("r+b") as stopped:
        assert lock_exclusively(stopped.fileno())
        with pytest.raises(Unavailable, match=r"expected another put or `hsx gc` to release the object"):
            store.put("a", [b"new"])
        assert not store.delete_version("a", store.version("a"))
    store.put("a", [b"new"])
    assert _files(tmp_path) == ["a"]


_FORKED = """
import os, sys
from hsx_dist.store import inode_lock, local
from hsx_dist.store.local import LocalStore

store, (wait, end) = LocalStore(sys.argv[1]), os.pipe()
store.put("a", [b"1"])
version, inode_lock.LONGEST_S = store.version("a"), 0.2

def fork(*args):  # as another thread, while this one holds the lock
    if not os.fork():
        os.close(end)
        os.read(wait, 1)  # until the parent ends
        os._exit(0)
    return is_at(*args)

is_at, local.is_at = local.is_at, fork
calls = {
    "put": lambda: store.put("a", [b"2"]),
    "put_version": lambda: store.put_version("a", [b"2"], "old"),
    "delete_version": lambda: store.delete_version("a", "old"),
}
with open(os.path.join(sys.argv[1], "a"), "r+b") as file:
    calls[sys.argv[2]]()
    assert inode_lock.lock_exclusively(file.fileno())
"""


@pytest.mark.parametrize("call", ["put", "put_version", "delete_version"])
def test_a_released_lock_is_not_kept_by_a_forked_process(tmp_path: Path, call: str) -> None:
    done = subprocess.run([sys.executable, "-c", _FORKED, str(tmp_path), call], stderr=subprocess.PIPE, check=False)
    assert done.returncode == 0, done.stderr


def test_a_reader_does_not_block_a_put(tmp_path: Path) -> None:
    """Another user with read permission on an object can lock it for reading."""
    store = LocalStore(tmp_path)
    store.put("a", [b"old"])
    with (tmp_path / "a").open("rb") as reader:
        with pytest.raises(OSError, match="Bad file descriptor"):
            lock_exclusively(reader.fileno())
        lock_for_put(reader.fileno(), "a")
        store.put("a", [b"new"])
    assert store.get("a") == b"new"


@pytest.mark.parametrize("renews", [False, True])
def test_a_slow_put_waits_while_a_newer_object_is_deleted_or_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renews: bool
) -> None:
    """The slow put of C checks A. Another put stores B. Then C must not replace B while B is deleted or renewed."""
    store = LocalStore(tmp_path)
    store.put("a", [b"A"])
    looked, others = threading.Event(), threading.Event()
    stored: list[str] = []

    def pausing(fd: int, folder: int, name: str) -> bool:
        found = is_at(fd, folder, name)
        if threading.current_thread().name == "slow" and not looked.is_set():
            looked.set()
            others.wait(0.2)
        return found

    def late(call: Any) -> Any:
        def run(*args: Any, **options: Any) -> None:
            if deleting and threading.current_thread() is threading.main_thread() and "a" in args[:2]:
                others.set()
                slow.join(1)
            call(*args, **options)
            if call is rename:
                stored.append(threading.current_thread().name)

        return run

    rename, deleting = os.rename, False
    monkeypatch.setattr("hsx_dist.store.local.is_at", pausing)
    monkeypatch.setattr("os.unlink", late(os.unlink))
    monkeypatch.setattr("os.rename", late(rename))
    slow = threading.Thread(target=lambda: store.put("a", [b"C"]), name="slow")
    slow.start()
    looked.wait()
    store.put("a", [b"B"])
    version, deleting = store.version("a"), True
    done = store.put_version("a", [b"B renewed"], version) if renews else store.delete_version("a", version)
    others.set()
    slow.join()
    assert done
    assert stored[0] == "slow"  # B was the last
    assert [store.get(name) for name in _files(tmp_path)] == ([b"B renewed"] if renews else [])


def _deep(folder: Path, levels: int) -> None:
    at = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("a", dir_fd=at)
        below = os.open("a", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(os.open("x", os.O_WRONLY | os.O_CREAT, dir_fd=at))
    os.close(os.open(".hsx-unfinished-1", os.O_WRONLY | os.O_CREAT, dir_fd=at))
    os.close(at)


def test_folders_in_very_many_levels_are_listed_or_a_typed_error(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a-first", [b"1"])
    store.put("z", [b"1"])
    _deep(tmp_path, 1500)
    try:
        assert [info.name for info in store.list()] == ["a-first", "a/" * 1500 + "x", "z"]
        assert [info.name for info in store.unfinished()] == ["a/" * 1500 + ".hsx-unfinished-1"]
        subprocess.run(["rm", "-rf", str(tmp_path / "a")], check=True)
        _deep(tmp_path, 2500)  # a path of more than 4,096 characters
        for ask in (store.list, store.unfinished):
            with pytest.raises(StoreError, match="File name too long"):
                list(ask())
        skipped: list[str] = []
        assert [info.name for info in store.list_readable(skipped.append)] == ["a-first", "z"]
        assert list(store.unfinished(0, skipped.append)) == []
        assert skipped == [("a/" * 2048)[:-1], ("a/" * 2049)[:-1]]
    finally:  # pytest cannot delete so many levels
        subprocess.run(["rm", "-rf", str(tmp_path / "a")], check=True)


def test_a_listing_of_a_file_is_no_missing_object(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="expected a folder, got Not a directory") as raised:
        list(LocalStore(tmp_path / "file").list())
    assert not isinstance(raised.value, NotFound)


def test_a_name_that_an_nfs_client_remembers_as_missing_is_looked_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated: the client asks the server again when a process opens the folder. No NFS server is needed."""
    missing: set[str] = set()
    real_stat, real_open = Path.stat, os.open

    def cached(path: Path, **kwargs: Any) -> os.stat_result:
        if str(path) in missing:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        try:
            return real_stat(path, **kwargs)
        except FileNotFoundError:
            missing.add(str(path))
            raise

    def opening(path: Any, *args: Any, **kwargs: Any) -> int:
        fd = real_open(path, *args, **kwargs)
        missing.difference_update([m for m in missing if Path(m).parent == Path(path)])
        return fd

    store = LocalStore(tmp_path)
    store.put("a/other", [b""])
    monkeypatch.setattr(Path, "stat", cached)
    monkeypatch.setattr(os, "open", opening)
    for call in (store.head, store.get):
        with pytest.raises(NotFound):
            call("a/b")
    missing.add(str(tmp_path / "a/b"))
    (tmp_path / "a/b").write_bytes(b"of another node")
    assert store.head("a/b").size == 15
    missing.add(str(tmp_path / "a/b"))
    assert store.get("a/b") == b"of another node"


def test_a_missing_object_in_a_folder_that_may_not_be_read_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(0o311)
    try:
        with pytest.raises(NotFound):
            LocalStore(tmp_path).head("a/b")
    finally:
        (tmp_path / "a").chmod(0o755)


def test_a_user_who_may_search_a_folder_reads_and_deletes_known_names(tmp_path: Path) -> None:
    code = """
from hsx_dist.reading.object_lock import shared_lock
from hsx_dist.store.local import LocalStore
from hsx_dist.store.within import ConfinedFolder
for root, name in ((sys.argv[1], "a"), (os.path.dirname(sys.argv[1]), "closed/a")):
    with shared_lock(root, name):
        for store in (LocalStore(root), ConfinedFolder(root)):
            print(store.head(name).size, store.get(name), store.version(name) != "")
LocalStore(sys.argv[1]).delete("a")
"""
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "a").write_bytes(b"1")
    (closed / "a.lock").touch()
    closed.chmod(0o311)
    try:
        out, err = as_a_user(code, str(closed))
    finally:
        closed.chmod(0o755)
    assert out.splitlines() == ["1 b'1' True"] * 4, err
    assert not (closed / "a").exists(), err
