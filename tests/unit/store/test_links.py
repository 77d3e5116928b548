"""A folder on a shared disk in which another user plants links, FIFOs and folders."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from hsx_dist.errors import ConfigError, Denied, NotFound, StoreError
from hsx_dist.format.place import open_place
from hsx_dist.reading.garbage import remove_run
from hsx_dist.store import open_store
from hsx_dist.store.folders import private_folder
from hsx_dist.store.local import LocalStore
from tests.harness.runs import write_v1_run
from tests.harness.users import as_root

NOBODY = 65534


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "precious").write_bytes(b"not of the run")
    (folder / ".hsx-unfinished-0").write_bytes(b"of another run")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def plant(link: Path, target: Path | str, *, owner: int | None = NOBODY) -> None:
    link.symlink_to(target)
    if owner is not None:
        os.chown(link, owner, owner, follow_symlinks=False)


@pytest.mark.parametrize("backend", ["auto", "fsspec", "obstore"])
@pytest.mark.parametrize("name", ["data/precious", "deep/data/precious"])
def test_a_delete_passes_no_link(root: Path, victim: Path, backend: str, name: str) -> None:
    (root / "deep").mkdir()
    for folder in (root, root / "deep"):
        (folder / "data").symlink_to(victim)
    store = open_store(str(root), backend=backend, retry_seconds=0)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match=r"symbolic link.*Name the folder"):
        store.delete(name)
    assert (victim / "precious").exists()


def test_a_link_in_the_place_of_an_object_is_deleted_and_its_target_stays(root: Path, victim: Path) -> None:
    (root / "a").symlink_to(victim / "precious")
    LocalStore(root).delete("a")
    assert list(root.iterdir()) == []
    assert (victim / "precious").exists()


def test_a_folder_swapped_for_a_link_at_any_moment_loses_nothing(root: Path, victim: Path) -> None:
    """Another user swaps ``data`` for a link and back while objects are deleted."""
    store = LocalStore(root)
    (root / "data").mkdir()
    (root / "spare").symlink_to(victim)
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            (root / "data").rename(root / "real")
            (root / "spare").rename(root / "data")
            (root / "data").rename(root / "spare")
            (root / "real").rename(root / "data")

    neighbour = threading.Thread(target=swap)
    neighbour.start()
    refused = calls = 0
    try:
        while calls < 2000 or (not refused and calls < 500_000):  # on busy cores it may take long until the two meet
            calls += 1
            try:
                store.delete("data/precious")
            except StoreError:
                refused += 1
    finally:
        done.set()
        neighbour.join()
    assert (victim / "precious").exists()
    assert refused > 0  # otherwise the test has not seen the link


def test_unfinished_files_behind_links_are_not_listed(root: Path, victim: Path) -> None:
    (root / "data").symlink_to(victim)
    (root / ".hsx-unfinished-1").symlink_to(victim / "precious")
    (root / "own").mkdir()
    (root / "own" / ".hsx-unfinished-2").touch()
    assert [info.name for info in LocalStore(root).unfinished()] == [".hsx-unfinished-1", "own/.hsx-unfinished-2"]


def test_no_unfinished_file_is_listed_behind_a_link_that_replaces_a_folder(
    root: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "own").mkdir()
    inner = os.open

    def swapped(path: str | Path, *arguments: int, **options: Any) -> int:
        if str(path).startswith("own") and not (root / "own").is_symlink():
            (root / "own").rmdir()
            (root / "own").symlink_to(victim)
        return inner(path, *arguments, **options)

    monkeypatch.setattr(os, "open", swapped)
    told: list[str] = []
    assert list(LocalStore(root).unfinished(unreadable=told.append)) == []
    assert told == ["own"]


def test_reading_follows_links(root: Path, victim: Path) -> None:
    """A downloaded run may be stored as links into a cache."""
    (root / "a").symlink_to(victim / "precious")
    (root / "data").symlink_to(victim)
    store = LocalStore(root)
    assert [info.name for info in store.list()] == ["a", "data/precious"]
    for name in ("a", "data/precious"):
        assert store.get(name) == b"not of the run"
        assert store.head(name).size == 14
        assert bytes(store.get_ranges(name, [(0, 3)])[0]) == b"not"


def test_the_root_itself_may_be_a_link(tmp_path: Path, root: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    store = LocalStore(tmp_path / "link")
    store.put("d/a", [b"1"])
    assert (root / "d" / "a").read_bytes() == b"1"
    store.delete("d/a")
    assert not (root / "d" / "a").exists()


def test_a_removal_of_a_run_empties_no_folder_that_a_link_leads_to(root: Path, victim: Path) -> None:
    store = open_store(str(root), retry_seconds=0)
    write_v1_run(store, {"meaning": {}})
    (root / "data").symlink_to(victim)
    part = "part-0001-w-000001.safetensors"
    (victim / part).touch()
    with pytest.raises(StoreError, match=r"'data' is a symbolic link.*or remove the link"):
        remove_run(store, open_place(store))
    assert sorted(p.name for p in victim.iterdir()) == [".hsx-unfinished-0", part, "precious"]


@pytest.mark.parametrize("targets", [[".", "."], ["..", "."]])
def test_a_listing_ends_with_circular_links(root: Path, targets: list[str]) -> None:
    (root / "d").mkdir()
    for i, target in enumerate(targets):
        (root / "d" / f"l{i}").symlink_to(target)
    with pytest.raises(StoreError, match="or a loop"):
        list(LocalStore(root).list())


def test_fifos_and_devices_are_not_objects(root: Path) -> None:
    os.mkfifo(root / "fifo")
    (root / "device").symlink_to("/dev/null")
    store = LocalStore(root)
    assert list(store.list()) == []
    for name in ("fifo", "device"):
        with pytest.raises(StoreError, match="expected a file"):
            store.get(name)
        with pytest.raises(StoreError, match="expected a file"):
            store.get_ranges(name, [(0, 1)])
    with pytest.raises(NotFound):
        store.head("fifo")
    store.put("fifo", [b"now an object"])
    assert store.get("fifo") == b"now an object"


def test_a_put_replaces_a_link_and_writes_nothing_through_it(root: Path, victim: Path) -> None:
    (root / "a").symlink_to(victim / "precious")
    LocalStore(root).put("a", [b"new"])
    assert (victim / "precious").read_bytes() == b"not of the run"
    assert (root / "a").read_bytes() == b"new"
    assert not (root / "a").is_symlink()


@as_root
def test_a_put_follows_this_users_links_and_no_other_users(root: Path, victim: Path) -> None:
    (root / "mine").symlink_to(victim)
    plant(root / "planted", victim)
    store = LocalStore(root)
    store.put("mine/a", [b"1"])
    assert (victim / "a").read_bytes() == b"1"
    for put in (lambda: store.put("planted/b", [b"1"]), lambda: store.put_if_absent("planted/b", b"1")):
        with pytest.raises(StoreError, match=r"'planted' is a symbolic link"):
            put()
    assert sorted(p.name for p in victim.iterdir()) == [".hsx-unfinished-0", "a", "precious"]


@as_root
@pytest.mark.parametrize("target", ["planted", "planted/below", "../run/planted", "/absolute"])
def test_a_put_follows_no_link_of_another_user_behind_an_own_link(root: Path, victim: Path, target: str) -> None:
    (victim / "below").mkdir()
    plant(root / "planted", victim)
    (root / "mine").symlink_to(root / "planted/below" if target == "/absolute" else target)
    with pytest.raises(StoreError, match=r"'planted' is a symbolic link"):
        LocalStore(root).put("mine/a", [b"1"])
    assert [*(victim / "below").iterdir()] == []


@pytest.mark.parametrize("target", ["second", "./second/", "../run/second", "/absolute", "second/below/.."])
def test_a_put_follows_own_links_behind_an_own_link(root: Path, victim: Path, target: str) -> None:
    (victim / "below").mkdir()
    (root / "second").symlink_to(victim)
    (root / "mine").symlink_to(root / "second" if target == "/absolute" else target)
    LocalStore(root).put("mine/a", [b"1"])
    assert (victim / "a").read_bytes() == b"1"


def test_a_put_through_links_in_a_circle_is_refused(root: Path) -> None:
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")
    with pytest.raises(StoreError, match="is a symbolic link"):
        LocalStore(root).put("a/x", [b"1"])


@as_root
def test_a_folder_that_another_user_made_where_all_may_is_not_written_into(root: Path) -> None:
    root.chmod(0o1777)
    for name in ("planted", "shared"):
        (root / name).mkdir(mode=0o777)
    os.chown(root / "planted", NOBODY, NOBODY)
    store = LocalStore(root)
    with pytest.raises(Denied, match=r"'planted' belongs to another user"):
        store.put("planted/a", [b"1"])
    store.put("shared/a", [b"1"])
    root.chmod(0o755)  # a folder of this user's team: its owner decides who may make folders in it
    store.put("planted/a", [b"1"])


@as_root
@pytest.mark.parametrize("kind", ["other owner", "open to all", "link", "file"])
def test_a_private_folder_that_another_user_prepared_is_refused(tmp_path: Path, victim: Path, kind: str) -> None:
    path = tmp_path / "private"
    if kind == "link":
        victim.chmod(0o700)
        plant(path, victim)
    elif kind == "file":
        path.touch()
    else:
        path.mkdir(mode=0o700)
        if kind == "other owner":
            os.chown(path, NOBODY, NOBODY)
        else:
            path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"expected a folder of user 0 .*TMPDIR"):
        private_folder(path)


def test_a_private_folder(tmp_path: Path) -> None:
    for _ in range(2):
        fd = private_folder(tmp_path / "p")
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o700
        os.close(fd)


@as_root
def test_an_unprivileged_process_is_denied_another_users_folder() -> None:
    """Root passes every permission check. Another user's process shows that the owner checks alone are enough."""
    code = (
        "import os, sys\n"
        "from hsx_dist.errors import Denied\n"
        "from hsx_dist.store.local import LocalStore\n"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "store = LocalStore(sys.argv[1])\n"
        "store.put('own/a', [b'1'])\n"
        "try:\n    store.put('planted/a', [b'1'])\n"
        "except Denied:\n    print('denied')\n"
    )
    with tempfile.TemporaryDirectory() as folder:  # pytest's folders are readable by root only
        root = Path(folder)
        root.chmod(0o1777)
        (root / "planted").mkdir()
        (root / "planted").chmod(0o777)
        os.chown(root / "planted", 1234, 1234)
        done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=60)
        assert done.stdout == "denied\n", done.stderr
        assert (root / "own" / "a").read_bytes() == b"1"
        assert list((root / "planted").iterdir()) == []
