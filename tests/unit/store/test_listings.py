"""A listing returns every object, or fails: a missing receipt would be a lost sample."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest

from hsx_dist.errors import Denied, NotFound, StoreError, Unavailable
from hsx_dist.reading import open_run
from hsx_dist.store import open_store
from hsx_dist.store.folder_listing import FolderListing
from hsx_dist.store.fsspec import FsspecStore
from hsx_dist.store.local import LocalStore
from hsx_dist.store.retry import RetryStore
from hsx_dist.testing.samples import random_sample
from tests.harness.runs import store_run


class Flaky(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
    """fsspec's memory file system, with listings that fail for some folders."""

    protocol = "flaky"
    cachable = False
    failing: dict[str, Exception] = {}  # noqa: RUF012

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        path = self._strip_protocol(path)
        for end, error in self.failing.items():
            if path.endswith(end):
                raise error
        return super().ls(path, detail=detail, **kwargs)


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> FsspecStore:
    monkeypatch.setattr(Flaky, "failing", {})
    monkeypatch.setattr(Flaky, "store", {})
    monkeypatch.setattr(Flaky, "pseudo_dirs", [""])
    monkeypatch.setattr(fsspec, "get_filesystem_class", lambda _: Flaky)
    store = FsspecStore(f"memory://{uuid.uuid4().hex}/run")
    for name in ("m/w1/1", "m/w2/1", "m/w2/deep/2"):
        store.put(name, [b"1"])
    return store


@pytest.mark.parametrize("folder", ["run", "m", "w2", "w2/deep"])
@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EIO, Unavailable), (errno.EACCES, StoreError), (errno.ENOTCONN, Unavailable)]
)
def test_a_folder_whose_listing_fails_ends_the_listing(
    flaky: FsspecStore, folder: str, number: int, kind: type[StoreError]
) -> None:
    Flaky.failing[folder] = OSError(number, "it fails")
    with pytest.raises(kind, match="list memory://"):
        list(flaky.list())
    Flaky.failing.clear()
    assert [i.name for i in flaky.list()] == ["m/w1/1", "m/w2/1", "m/w2/deep/2"]


@pytest.mark.parametrize("folder", ["run", "m", "w2"])
def test_a_folder_that_is_listed_and_said_to_be_missing_is_not_empty(flaky: FsspecStore, folder: str) -> None:
    Flaky.failing[folder] = FileNotFoundError(folder)
    with pytest.raises(Unavailable, match=r"expected to read .*, which its parent lists"):
        list(flaky.list("m/" if folder == "m" else ""))


def test_a_listing_of_a_missing_folder_is_empty(flaky: FsspecStore) -> None:
    assert list(flaky.list("none/")) == []
    assert list(FsspecStore("memory://nothing-was-ever-stored/run").list()) == []


def test_a_symbolic_link_that_fsspec_lists_raises(flaky: FsspecStore, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Flaky.ls

    def ls(self: Flaky, path: str, **kwargs: Any) -> Any:
        return [{**i, "type": "link"} if i["name"].endswith("w2/1") else i for i in inner(self, path, **kwargs)]

    monkeypatch.setattr(Flaky, "ls", ls)
    with pytest.raises(StoreError, match="got the symbolic link"):
        list(flaky.list())


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_name_outside_the_listed_folder_raises(
    flaky: FsspecStore, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(Flaky, "ls", lambda *_, **__: [{"name": "elsewhere/run/m", "type": kind, "size": 1}])
    with pytest.raises(StoreError, match=r"list .*: expected names that begin with .*, got 'elsewhere/run/m/?'"):
        list(flaky.list())


@pytest.mark.parametrize("backend", ["auto", "fsspec", "obstore"])
def test_a_folder_is_reached_without_a_library(tmp_path: Path, backend: Any) -> None:
    for url in (str(tmp_path), f"file://{tmp_path}", f"local://{tmp_path}"):
        assert isinstance(open_store(url, backend=backend)._inner, LocalStore)  # type: ignore[attr-defined]


def test_a_forked_reader_raises_when_a_folder_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_run(open_store(str(tmp_path / "run")), [random_sample("a", 3, seed=1)])
    run = open_run(str(tmp_path / "run"))
    run._pid = -1  # as in a child process
    scan = os.scandir

    def failing(folder: int) -> Any:
        if Path(f"/proc/self/fd/{folder}").readlink().name == "attempts":
            raise PermissionError(errno.EACCES, "Permission denied")
        return scan(folder)

    monkeypatch.setattr(os, "scandir", failing)
    with pytest.raises(StoreError, match="Permission denied"):
        run.refresh()


@pytest.mark.parametrize("link", ["a", "m/w/000002.json", "m/w", "m"])
def test_a_link_to_nothing_ends_a_listing_of_what_it_may_hold(tmp_path: Path, link: str) -> None:
    store = LocalStore(tmp_path)
    store.put("z/1", [b"1"])
    path = tmp_path / link
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(tmp_path / "gone")
    prefix = "" if link == "a" else "m/w/"
    for after in (None, "m/w/000001.json"):
        if link == "a" and after:
            continue  # the link's name sorts before it
        with pytest.raises(StoreError, match="a symbolic link to nothing"):
            list(store.list(prefix, after))
    with pytest.raises(NotFound):
        store.get(link)
    told: list[str] = []
    assert [i.name for i in store.list_readable(told.append)] == ["z/1"]
    assert [name.rstrip("/") for name in told] == [link]
    assert [i.name for i in store.list("z/")] == ["z/1"]


NO_TARGETS = {"loop": "odd", "through a file": "m/1/x", "a long name": "y" * 300, "nothing": "gone"}


@pytest.mark.parametrize("target", NO_TARGETS.values(), ids=list(NO_TARGETS))
@pytest.mark.parametrize("folder", ["", "m/"])
def test_a_link_that_cannot_be_followed_ends_only_a_listing_of_its_name(
    tmp_path: Path, target: str, folder: str
) -> None:
    store = LocalStore(tmp_path)
    for name in ("m/1", "z/1"):
        store.put(name, [b"1"])
    link = f"{folder}odd"
    (tmp_path / link).symlink_to(target)
    assert [i.name for i in store.list("z/")] == ["z/1"]
    assert [i.name for i in store.list("m/1")] == ["m/1"]
    for prefix in (link, f"{link}/x", ""):
        with pytest.raises(StoreError, match=f"{tmp_path / link}: .* a symbolic link to nothing") as raised:
            list(store.list(prefix))
        assert not isinstance(raised.value, NotFound)
    told: list[str] = []
    assert [i.name for i in store.list_readable(told.append)] == ["m/1", "z/1"]
    assert told == [link]


def test_a_link_of_another_program_next_to_a_run_does_no_harm(tmp_path: Path) -> None:
    store_run(open_store(str(tmp_path)), [random_sample("a", 3, seed=1)])
    (tmp_path / "odd").symlink_to("run.json/x")
    assert list(open_run(str(tmp_path)).keys()) == ["a"]


@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_mount_that_is_gone_behind_a_link_ends_a_listing_of_its_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = LocalStore(tmp_path / "run")
    (tmp_path / "mount").mkdir()
    (tmp_path / "mount" / "lost").touch()
    for name in ("a/1", "m/1", "z/1"):
        store.put(name, [b"1"])
    (tmp_path / "run" / "m" / "dead").symlink_to(tmp_path / "mount")
    inner = os.stat

    def fails(path: Any, **options: Any) -> os.stat_result:
        if Path(path).name == "dead" and options.get("follow_symlinks", True):
            raise OSError(number, os.strerror(number))
        return inner(path, **options)

    assert "m/dead/lost" in [i.name for i in store.list()]
    monkeypatch.setattr(os, "stat", fails)
    for prefix in ("", "m", "m/", "m/dead/lost"):
        with pytest.raises(Denied if number == errno.EACCES else Unavailable, match="link 'm/dead'"):
            list(store.list(prefix))
    assert [i.name for i in store.list("z/")] == ["z/1"]
    told: list[str] = []
    assert [i.name for i in store.list_readable(told.append)] == ["a/1", "m/1", "z/1"]
    assert told == ["m/dead"]


def test_a_link_to_an_object_with_an_error_for_a_moment_is_listed_by_a_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").touch()
    (tmp_path / "run").mkdir()
    for name in ("a", "b", "b-c"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "cache")
    inner, failed = os.stat, list[str]()

    def fails_once(path: Any, **options: Any) -> os.stat_result:
        if path == "b" and not failed:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return inner(path, **options)

    monkeypatch.setattr(os, "stat", fails_once)
    store = RetryStore(LocalStore(tmp_path / "run"), sleep=lambda _: None)
    assert [i.name for i in store.list()] == ["a", "b", "b-c"]
    assert failed == ["b"]


def test_a_second_link_to_a_folder_is_reported_and_the_listing_continues(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "x").touch()
    store = LocalStore(tmp_path / "run")
    store.put("z", [b"1"])
    for name in ("l1", "l2"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "shared")
    told: list[str] = []
    assert [i.name for i in store.list_readable(told.append)] == ["l1/x", "z"]
    assert told == ["l2"]


@pytest.mark.parametrize("broken", ["m/dead", "m/dead/1"])
def test_an_error_of_a_folder_or_file_is_reported_and_the_listing_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    store = LocalStore(tmp_path)
    for name in ("a", "m/dead/1", "z"):
        store.put(name, [b"1"])

    def failing(inner: Any) -> Any:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if str(path).rstrip("/") == broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return inner(path, *arguments, **options)

        return call

    monkeypatch.setattr(os, "stat", failing(os.stat))
    monkeypatch.setattr(os, "open", failing(os.open))
    with pytest.raises(Unavailable):
        list(store.list())
    told: list[str] = []
    assert [i.name for i in store.list_readable(told.append)] == ["a", "z"]
    assert told == [broken]


def test_a_name_that_the_file_system_gives_twice_is_listed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tmpfs does this if objects of a large folder are replaced during the listing."""
    store = LocalStore(tmp_path)
    for name in ("a", "b", "d/c"):
        store.put(name, [b"1"])
    entries = list(os.scandir(tmp_path))
    below = list(os.scandir(tmp_path / "d"))

    @contextmanager
    def twice(folder: int) -> Iterator[Iterator[os.DirEntry[str]]]:
        yield iter((below if os.path.samestat(os.fstat(folder), (tmp_path / "d").stat()) else entries) * 2)

    monkeypatch.setattr(os, "scandir", twice)
    assert [info.name for info in store.list()] == ["a", "b", "d/c"]


def test_a_folder_that_is_removed_during_a_listing_is_not_an_empty_one(tmp_path: Path, monkeypatch: Any) -> None:
    """Linux answers the scan of an open folder that was removed as if the folder were missing."""
    store = LocalStore(tmp_path / "r")
    store.put("a", [b"1"])
    entries = FolderListing._entries

    def removed(self: FolderListing, folder: str) -> Any:
        shutil.rmtree(tmp_path / "r", ignore_errors=True)
        return entries(self, folder)

    monkeypatch.setattr(FolderListing, "_entries", removed)
    with pytest.raises(Unavailable, match="existed before"):
        list(store.list())


def test_a_folder_that_is_replaced_during_a_listing_is_an_error(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "r")
    for name in ("a", "b"):
        store.put(name, [b"1"])
    listed = store.list()
    assert next(listed).name == "a"
    (tmp_path / "r").rename(tmp_path / "away")
    (tmp_path / "r").mkdir()
    with pytest.raises(Unavailable, match="existed before"):
        list(listed)
    left = LocalStore(tmp_path / "away").list()
    assert next(left).name == "a"
    left.close()  # type: ignore[attr-defined]  # a listing that is not read to its end
