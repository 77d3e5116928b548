"""A listing returns every object, or fails: a missing receipt would be a lost sample."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest

from hsx_dist.errors import NotFound, StoreError, Unavailable
from hsx_dist.reading import open_run
from hsx_dist.store import open_store
from hsx_dist.store.fsspec import FsspecStore
from hsx_dist.store.local import LocalStore
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
