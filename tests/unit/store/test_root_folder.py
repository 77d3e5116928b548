"""While the mount of a local store's folder is gone, no object is missing, and none is stored below the mount."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from hsx_dist.errors import AlreadyExists, Denied, NotFound, Unavailable
from hsx_dist.store import RetryPolicy, RetryStore, root_folder
from hsx_dist.store.local import LocalStore
from hsx_dist.store.within import ConfinedFolder

USES: dict[str, Callable[[LocalStore], Any]] = {
    "put": lambda store: store.put("d/new", [b"1"]),
    "put_if_absent": lambda store: store.put_if_absent("d/new", b"1"),
    "put_version": lambda store: store.put_version("d/a", [b"1"], "1-2-3"),
    "get": lambda store: store.get("d/a"),
    "get_ranges": lambda store: store.get_ranges("d/a", [(0, 1)]),
    "head": lambda store: store.head("d/a"),
    "list": lambda store: list(store.list()),
    "list_prefix": lambda store: list(store.list("d/")),
    "list_readable": lambda store: list(store.list_readable(lambda _: None)),
    "unfinished": lambda store: list(store.unfinished()),
    "delete": lambda store: store.delete("d/a"),
    "version": lambda store: store.version("d/a"),
    "delete_version": lambda store: store.delete_version("d/a", "1-2-3"),
}
SEEN: dict[str, Callable[[LocalStore], Any]] = {
    "read": lambda store: store.get("d/a"),
    "stored": lambda store: store.put("d/b", [b"1"]),
    "listed": lambda store: list(store.list()),
    "asked": lambda store: store.head("d/a"),
    "replaced": lambda store: store.put_version("d/a", [b"a"], store.version("d/a")),
}


class Mount:
    """A folder in the place of a mount that is gone for a moment. The store is in its subfolder ``run``."""

    def __init__(self, folder: Path):
        self.root, self._mount, self._away = folder / "mount/run", folder / "mount", folder / "away"
        (self.root / "d").mkdir(parents=True)
        (self.root / "d/a").write_bytes(b"a")

    def goes(self, *, leaves: bool) -> None:
        """``leaves``: the disk below has the root's folder too."""
        self._mount.rename(self._away)
        if leaves:
            self.root.mkdir(parents=True)

    def returns(self) -> None:
        if self._mount.exists():
            assert [path for path in self._mount.rglob("*") if path.is_file()] == []
            shutil.rmtree(self._mount)
        self._away.rename(self._mount)

    def is_copied(self, copy: Path) -> None:
        """The mount is back with other numbers."""
        shutil.copytree(self.root, copy)
        self.goes(leaves=False)
        self.root.parent.mkdir()
        copy.rename(self.root)

    @contextmanager
    def gone(self, *, leaves: bool) -> Iterator[None]:
        self.goes(leaves=leaves)
        try:
            yield
        finally:
            self.returns()


def on_another_device(monkeypatch: pytest.MonkeyPatch, folder: Path, by: int = 1) -> None:
    """Report another device for ``folder``."""
    inode = folder.stat().st_ino

    def moved(look: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def found(*args: Any, **kwargs: Any) -> os.stat_result:
            about = look(*args, **kwargs)
            return os.stat_result((*about[:2], about.st_dev + by, *about[3:10])) if about.st_ino == inode else about

        return found

    for name in ("fstat", "stat"):
        monkeypatch.setattr(os, name, moved(getattr(os, name)))


@pytest.fixture
def mount(tmp_path: Path) -> Mount:
    return Mount(tmp_path)


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize(("seen", "use"), [*(("read", use) for use in USES), *((seen, "list") for seen in SEEN)])
def test_a_folder_that_is_gone_is_unavailable(mount: Mount, seen: str, use: str, leaves: bool) -> None:
    store = LocalStore(mount.root)
    SEEN[seen](store)
    with mount.gone(leaves=leaves), pytest.raises(Unavailable, match="expected the folder, which existed before"):
        USES[use](store)
    assert store.get("d/a") == b"a"
    with pytest.raises(NotFound):
        store.get("d/none")


@pytest.mark.parametrize("use", USES)
def test_an_object_of_another_run_does_not_make_its_folder_the_known_one(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    """Each run has a ``run.json``, also a run that was started below the mount point."""
    on_another_device(monkeypatch, mount.root)
    store = LocalStore(mount.root)
    store.get("d/a")
    seen = (mount.root / "d/a").stat()
    mount.goes(leaves=True)
    (mount.root / "d").mkdir()
    (mount.root / "d/a").write_bytes(b"b")
    os.utime(mount.root / "d/a", ns=(0, seen.st_mtime_ns + 1))
    with pytest.raises(Unavailable, match="got another one"):
        USES[use](store)
    assert (mount.root / "d/a").read_bytes() == b"b"


@pytest.mark.parametrize("own", [False, True])
def test_an_object_that_was_replaced_is_still_known(mount: Mount, tmp_path: Path, own: bool) -> None:
    store, other = LocalStore(mount.root), LocalStore(mount.root)
    store.get("d/a")
    (store if own else other).put("d/a", [b"longer"])
    assert store.get("d/a") == b"longer"
    store.put("b", [b"1"])
    other.delete("b")
    mount.is_copied(tmp_path / "copy")
    assert [info.name for info in store.list()] == ["d/a"]


def test_a_private_folder_below_the_mount_is_unavailable(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(mount.root)
    store.get("d/a")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with mount.gone(leaves=True), monkeypatch.context() as patch:
        patch.setattr(Path, "stat", refuse)  # root passes every permission check
        with pytest.raises(Unavailable, match="expected the folder, which existed before"):
            store.get("d/a")
    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(Denied):
        store.get("d/a")


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("use", ["get", "head"])
def test_a_confined_folder_that_is_gone_is_unavailable(mount: Mount, use: str, leaves: bool) -> None:
    store = ConfinedFolder(mount.root)
    store.get("d/a")
    with mount.gone(leaves=leaves), pytest.raises(Unavailable, match="expected the folder, which existed before"):
        USES[use](store)
    assert store.get("d/a") == b"a"


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("use", ["get", "head", "list", "list_prefix"])
def test_a_mount_that_is_back_before_the_check_hides_no_object(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, use: str, leaves: bool
) -> None:
    """The mount is gone during any one system call, and back before the next."""
    found, faults = list[Any](), list[int]()
    for which in range(20):
        goes = iter([False] * which + [True])

        def during(call: Callable[..., Any], goes: Iterator[bool] = goes) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                if not next(goes, False):
                    return call(*args, **kwargs)
                faults.append(1)
                with mount.gone(leaves=leaves):
                    return call(*args, **kwargs)

            return run

        store = LocalStore(mount.root)
        store.get("d/a")
        with monkeypatch.context() as patch:
            for owner, name in ((os, "open"), (os, "scandir"), (os, "stat"), (Path, "stat")):
                patch.setattr(owner, name, during(getattr(owner, name)))
            with suppress(Unavailable):
                found.append(USES[use](store))
    expected = USES[use](store)
    assert found
    assert all(answer == expected for answer in found)
    assert 2 <= len(faults) < 20  # each call had its fault


def test_an_object_that_is_stored_while_the_mount_goes_is_stored_again(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("put", "put_if_absent"):
        fsync, told = os.fsync, []

        def goes(fd: int, fsync: Callable[[int], None] = fsync, told: list[Unavailable] = told) -> None:
            fsync(fd)
            if not (told or mount.root.with_name("gone").exists()):
                mount.goes(leaves=True)
                mount.root.with_name("gone").touch()

        def returns(error: Unavailable, told: list[Unavailable] = told) -> None:
            told.append(error)
            mount.root.with_name("gone").unlink()
            mount.returns()

        store = RetryStore(LocalStore(mount.root), RetryPolicy(60), sleep=lambda _: None, on_retry=returns)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", goes)
            store.put(f"d/{name}", [b"1"]) if name == "put" else store.put_if_absent(f"d/{name}", b"1")
        assert len(told) == 1
        assert store.get(f"d/{name}") == b"1"
    with pytest.raises(AlreadyExists):
        store.put_if_absent("d/put_if_absent", b"2")


def test_a_mount_that_is_back_with_other_numbers_is_used(mount: Mount, tmp_path: Path) -> None:
    store = LocalStore(mount.root)
    assert store.get("d/a") == b"a"
    store.put("d/b", [b"b"])
    mount.is_copied(tmp_path / "copy")
    store.put("d/c", [b"c"])
    assert [info.name for info in store.list()] == ["d/a", "d/b", "d/c"]
    with pytest.raises(NotFound):
        store.get("d/none")


def test_a_stored_object_is_known_where_a_rename_changes_its_time(
    mount: Mount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CIFS sets the time when a file is closed. FUSE over an object store renames by a copy."""
    store = LocalStore(mount.root)
    link = os.link

    def copy(source: str, name: str, **kwargs: Any) -> None:
        link(source, name, **kwargs)
        os.utime(name, ns=(0, 1), dir_fd=kwargs["dst_dir_fd"])

    monkeypatch.setattr(os, "link", copy)
    store.put("d/b", [b"b"])
    mount.is_copied(tmp_path / "copy")
    store.put("d/c", [b"c"])
    assert [info.name for info in store.list()] == ["d/a", "d/b", "d/c"]


@pytest.mark.parametrize("deleted", ["d/a", "d/b"])
def test_a_deleted_object_is_not_expected_when_the_mount_is_back(mount: Mount, tmp_path: Path, deleted: str) -> None:
    store = LocalStore(mount.root)
    store.get("d/a")
    store.put("d/b", [b"b"])
    store.delete(deleted)
    mount.is_copied(tmp_path / "copy")
    assert len(list(store.list())) == 1


def test_a_listed_object_does_not_replace_the_last_stored_one(mount: Mount, tmp_path: Path) -> None:
    store, other = LocalStore(mount.root), LocalStore(mount.root)
    for name in "abc":
        store.put(name, [b"1"])
    other.put("z", [b"1"])
    assert [info.name for info in store.list()] == ["a", "b", "c", "d/a", "z"]
    for name in "az":
        other.delete(name)
    mount.is_copied(tmp_path / "copy")
    store.put("e", [b"1"])


def test_the_last_listed_object_is_known_when_the_first_is_deleted(mount: Mount, tmp_path: Path) -> None:
    store, other = LocalStore(mount.root), LocalStore(mount.root)
    store.get("d/a")
    other.put("b", [b"1"])
    other.delete("d/a")
    list(store.list())
    mount.is_copied(tmp_path / "copy")
    assert [info.name for info in store.list()] == ["b"]


def test_a_folder_without_objects_may_be_made_again_on_its_disk(tmp_path: Path) -> None:
    """A consumer that waits for a run sees the folder before the driver makes it anew."""
    (tmp_path / "run").mkdir()
    store = LocalStore(tmp_path / "run")
    with pytest.raises(NotFound):
        store.get("a")
    assert list(store.list()) == []
    (tmp_path / "run").rename(tmp_path / "old")
    LocalStore(tmp_path / "run").put("a", [b"1"])
    assert store.get("a") == b"1"


def test_a_folder_that_was_never_there_has_no_objects(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "none/run")
    assert list(store.list()) == list(store.unfinished()) == []
    store.delete("a")
    with pytest.raises(NotFound):
        store.get("a")
    store.put("a", [b"1"])
    assert store.get("a") == b"1"


def test_a_folder_that_was_removed_is_made_again_by_a_store_that_is_opened_anew(mount: Mount) -> None:
    store = LocalStore(mount.root)
    store.get("d/a")
    shutil.rmtree(mount.root)
    with pytest.raises(Unavailable, match="or the folder was removed"):
        store.put("d/a", [b"1"])
    again = LocalStore(mount.root)
    again.put("d/a", [b"1"])
    assert again.get("d/a") == b"1"


@pytest.mark.parametrize("use", USES)
def test_a_folder_that_goes_before_its_first_use_is_unavailable(mount: Mount, use: str) -> None:
    store = LocalStore(mount.root)
    with mount.gone(leaves=False), pytest.raises(Unavailable, match="got none"):
        USES[use](store)


def test_without_objects_the_folder_below_the_mount_is_another_one(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_another_device(monkeypatch, mount.root)
    store = LocalStore(mount.root)
    with mount.gone(leaves=True), pytest.raises(Unavailable, match="got another one"):
        store.put("d/new", [b"1"])


def test_a_store_that_is_opened_before_the_mount_is_there_uses_the_mount(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_another_device(monkeypatch, mount.root)
    mount.goes(leaves=True)
    store = LocalStore(mount.root)
    with pytest.raises(NotFound):
        store.get("d/a")
    mount.returns()
    assert [info.name for info in store.list()] == ["d/a"]


def test_an_unused_store_uses_a_mount_that_is_back_on_another_device(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_another_device(monkeypatch, mount.root)
    store = LocalStore(mount.root)
    mount.goes(leaves=True)
    on_another_device(monkeypatch, mount.root, 2)
    with pytest.raises(NotFound):
        store.get("d/new")
    store.put("d/new", [b"1"])
    assert store.get("d/new") == b"1"


@pytest.mark.parametrize("use", USES)
def test_an_empty_mount_with_the_same_numbers_is_another_one(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    """Linux gives the next mount without a disk the device number of the last one."""
    store = LocalStore(mount.root)
    store.get("d/a")
    shutil.rmtree(mount.root / "d")
    monkeypatch.setattr(root_folder, "mount_id", lambda _: 1)
    with pytest.raises(Unavailable, match="got another one"):
        USES[use](store)
    assert list(mount.root.iterdir()) == []


def test_an_object_of_another_run_does_not_make_its_mount_the_known_one(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(mount.root)
    store.get("d/a")
    seen = (mount.root / "d/a").stat()
    monkeypatch.setattr(root_folder, "mount_id", lambda _: 1)
    os.utime(mount.root / "d/a", ns=(0, seen.st_mtime_ns + 1))
    with pytest.raises(Unavailable, match="got another one"):
        store.put("b", [b"1"])
    os.utime(mount.root / "d/a", ns=(0, seen.st_mtime_ns))
    store.put("b", [b"1"])


_REMOUNTED = """
import os, shutil, subprocess, sys
from pathlib import Path
from hsx_dist.errors import Unavailable
from hsx_dist.store.local import LocalStore
from hsx_dist.store.mount_id import mount_id

root, copy = Path(sys.argv[1], "root"), Path(sys.argv[1], "copy")
root.mkdir()
remount = "umount {0}; mount -t tmpfs -o size=1m tmpfs {0}".format(root)
if subprocess.call(remount, shell=True, stderr=subprocess.DEVNULL) or mount_id(os.open(sys.argv[1], 0)) is None:
    sys.exit(77)
(root / "a").write_bytes(b"a")
store = LocalStore(root)
assert store.get("a") == b"a"
shutil.copytree(root, copy)
subprocess.check_call(remount, shell=True)
for use in (lambda: store.get("a"), lambda: list(store.list()), lambda: store.put("b", [b"1"])):
    try:
        sys.exit(f"expected Unavailable, got {use()}")
    except Unavailable:
        pass
assert os.listdir(root) == []
shutil.copytree(copy, root, dirs_exist_ok=True)
store.put("b", [b"1"])
assert [info.name for info in store.list()] == ["a", "b"]
"""


def test_a_file_system_that_is_mounted_in_the_place_of_another(tmp_path: Path) -> None:
    argv = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", _REMOUNTED, str(tmp_path)]
    if shutil.which("unshare") is None:
        pytest.skip("this machine has no mount namespaces")
    done = subprocess.run(argv, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=120)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this machine lets no user mount a file system, or its kernel numbers no mounts")
    assert done.returncode == 0, done.stderr
