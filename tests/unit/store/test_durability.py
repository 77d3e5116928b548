"""An object that a put reports as stored survives a power cut, also if any sync failed and was repeated."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from hsx_dist.errors import AlreadyExists, Unavailable
from hsx_dist.store import RetryPolicy, RetryStore, local
from hsx_dist.store.folders import SyncedFolders, opened
from hsx_dist.store.local import LocalStore
from tests.unit.open_files import open_files
from tests.unit.store.on_a_failing_disk import NO_LOOP


class Disk:
    """The state of the disk after a power cut: names as of their folders' last sync, and files that were synced whole.

    The sync number ``fails`` raises EIO once. A file whose sync failed never counts again, as the kernel may have
    dropped its bytes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: int):
        self._left = fails
        self._names: dict[str, set[str]] = {}
        self._files: dict[int, bool] = {}
        self._bad: set[str] = set()
        self.failed = False
        self._sync = os.fsync
        monkeypatch.setattr(os, "fsync", self._fsync)

    def _fsync(self, fd: int) -> None:
        found = os.fstat(fd)
        self._left -= 1
        fails = self._left == -1
        self.failed |= fails
        path = str(Path(f"/proc/self/fd/{fd}").readlink())
        if fails:
            self._bad.add(path)
        if stat.S_ISREG(found.st_mode):
            self._files[found.st_ino] = path not in self._bad
        elif not fails:
            self._names[path] = set(os.listdir(fd))
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._sync(fd)

    def synced(self, folder: Path) -> set[str]:
        """Names in ``folder``, without unfinished files."""
        return {name for name in self._names.get(str(folder), ()) if not name.startswith(".")}

    def holds(self, path: Path) -> bool:
        """Whether the object exists, with every folder between it and the mount point."""
        chain = [path, *path.parents]
        chain = chain[: chain.index(mount_point(path))]
        return self._files[path.stat().st_ino] and all(p.name in self.synced(p.parent) for p in chain)


def mount_point(path: Path) -> Path:
    return [above for above in path.parents if above.stat().st_dev == path.parent.stat().st_dev][-1]


def _patient(root: Path) -> RetryStore:
    return RetryStore(LocalStore(root), RetryPolicy(seconds=60), sleep=lambda _: None)


@pytest.mark.parametrize("verb", ["put", "put over another", "put_if_absent"])
@pytest.mark.parametrize("fails", range(7))
def test_a_retry_syncs_what_the_failed_sync_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, fails: int
) -> None:
    root = tmp_path.resolve() / "new" / "run"
    store = _patient(root)
    if verb == "put over another":
        LocalStore(root).put("a/b/object", [b"old"])
        monkeypatch.setattr(local, "_synced", SyncedFolders())  # another process put it
    above = len(root.parents) - len(mount_point(root.parent).parents)
    # First and last folder above the root, the root, "a", the file, "b". There is no other sync.
    disk = Disk(monkeypatch, [0, above - 1, above, above + 1, above + 2, above + 3, above + 4][fails])
    if verb == "put_if_absent":
        store.put_if_absent("a/b/object", b"1")
    else:
        store.put("a/b/object", [b"1"])
    assert store.get("a/b/object") == b"1"
    assert disk.holds(root / "a/b/object")
    assert disk.failed == (fails < 6)
    assert [p.name for p in (root / "a/b").iterdir()] == ["object"]


def test_a_put_below_a_folder_of_another_process_syncs_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process died after it made the folders and before it synced their names."""
    root = tmp_path.resolve() / "new" / "project" / "run"
    (root / "data").mkdir(parents=True)
    (tmp_path / "link").symlink_to(root.parent)
    disk = Disk(monkeypatch, -1)
    LocalStore(tmp_path / "link" / "run").put("data/a", [b"1"])
    assert disk.holds(root / "data/a")


def test_a_folder_above_that_may_not_be_read_keeps_no_other_from_being_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path.resolve() / "new" / "private" / "run"
    root.mkdir(parents=True)

    def open_or_refuse(path: Path, *args: Any, **kwargs: Any) -> AbstractContextManager[int]:
        if path == root.parent:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr("hsx_dist.store.local.opened", open_or_refuse)
    disk = Disk(monkeypatch, -1)
    LocalStore(root).put("a", [b"1"])
    assert disk.synced(root) == {"a"}
    assert disk.synced(root.parent) == set()
    assert "private" in disk.synced(root.parents[1])
    assert "new" in disk.synced(root.parents[2])


def test_a_root_that_was_removed_and_made_again_is_synced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path.resolve() / "run"
    store = LocalStore(root)
    store.put("a", [b"1"])
    shutil.rmtree(root)
    disk = Disk(monkeypatch, -1)
    LocalStore(root).put("a", [b"1"])
    assert disk.holds(root / "a")


def test_an_object_that_keeps_others_from_storing_is_there_after_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object's own put failed in its last sync."""
    root = tmp_path.resolve() / "run"
    (root / "data").mkdir(parents=True)
    with monkeypatch.context() as broken:
        above = len(root.parents) - len(mount_point(root.parent).parents)
        Disk(broken, above + 2)  # the syncs before it: of the names above, of the folder's name, and of the file
        with pytest.raises(Unavailable):
            LocalStore(root).put_if_absent("data/a", b"1")
    disk = Disk(monkeypatch, -1)
    with pytest.raises(AlreadyExists):
        LocalStore(root).put_if_absent("data/a", b"2")
    assert disk.synced(root / "data") == {"a"}


def test_a_link_that_the_kernel_asks_an_nfs_server_for_twice_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer is lost, and the second one says that the link exists."""
    link = os.link

    def twice(*arguments: Any, **more: Any) -> None:
        link(*arguments, **more)
        link(*arguments, **more)

    monkeypatch.setattr(os, "link", twice)
    store = LocalStore(tmp_path / "run")
    store.put_if_absent("a", b"1")
    with pytest.raises(AlreadyExists):
        store.put_if_absent("a", b"2")
    assert store.get("a") == b"1"


def test_a_folder_that_was_removed_and_made_again_is_synced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path.resolve() / "run"
    store = LocalStore(root)
    store.put("data/a", [b"1"])
    store.delete("data/a")
    (root / "data").rmdir()
    disk = Disk(monkeypatch, -1)
    store.put("data/a", [b"1"])
    assert disk.synced(root) >= {"data"}
    assert disk.synced(root / "data") == {"a"}


@pytest.mark.parametrize("which", ["root", "folder"])
def test_a_folder_that_another_process_made_again_is_synced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """A file system may reuse the inode of a removed folder."""
    root = tmp_path.resolve() / "run"
    for _ in range(10):
        store = LocalStore(root)
        store.put("data/a", [b"1"])
        shutil.rmtree(root if which == "root" else root / "data")
        (root / "data").mkdir(parents=True)
        with monkeypatch.context() as patch:
            disk = Disk(patch, -1)
            (LocalStore(root) if which == "root" else store).put("data/a", [b"1"])
            assert disk.holds(root / "data/a") if which == "root" else disk.synced(root) >= {"data"}


def test_a_folder_that_was_renamed_is_synced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path.resolve() / "run"
    store = LocalStore(root)
    store.put("data/a", [b"1"])
    (root / "data").rename(root / "other")
    disk = Disk(monkeypatch, -1)
    store.put("other/b", [b"1"])
    assert disk.synced(root) >= {"other"}


def test_remembered_folders_keep_few_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_synced", SyncedFolders(most=3))
    store = LocalStore(tmp_path)
    before = open_files(tmp_path)
    for k in range(20):
        store.put(f"{k}/a", [b"1"])
    assert open_files(tmp_path) == before + 3
    disk = Disk(monkeypatch, -1)
    store.put("0/b", [b"1"])  # the folder is not in the cache any more
    assert "0" in disk.synced(tmp_path)


def test_known_folders_are_not_synced_for_every_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path / "run")
    store.put("data/x/a", [b"1"])
    calls: list[int] = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(fd), sync(fd)))
    store.put("data/x/b", [b"1"])
    assert len(calls) == 2  # the file and its name


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a loop device")
def test_a_disk_that_fails_in_syncs(tmp_path: Path) -> None:
    """A second sync of the file would succeed, although its bytes were dropped."""
    argv = ["unshare", "--mount", sys.executable, "-m", "tests.unit.store.on_a_failing_disk", str(tmp_path)]
    done = subprocess.run(argv, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=120)
    if done.returncode == NO_LOOP or "unshare" in done.stderr:
        pytest.skip("this machine lets no process mount a loop device")
    assert done.returncode == 0, done.stderr


_FORKED = """
import os, signal, sys
from hsx_dist.store.local import LocalStore, _synced

store = LocalStore(sys.argv[1])
with _synced._mutex:  # as another thread's put
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        store.put("child/a", [b"1"])
        os._exit(0)
assert os.waitpid(child, 0)[1] == 0, "the put of the forked process did not return"
"""


def test_a_process_that_is_forked_during_a_put_can_put(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _FORKED, str(tmp_path)], check=True)
    assert (tmp_path / "child" / "a").read_bytes() == b"1"
