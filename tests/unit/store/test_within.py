from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsx_dist.errors import ConfigError, HsxError, NotFound, StoreError
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.page import Page, Segment
from hsx_dist.reading import object_lock
from hsx_dist.reading.load import load_object
from hsx_dist.store import folders, local, open_store, within
from hsx_dist.store.within import open_within
from hsx_dist.writers.sink import PartSink, SinkOptions


@pytest.mark.parametrize(
    ("prefix", "place"),
    [
        ("s3://bucket", "s3://bucket/x.safetensors"),
        ("s3://bucket/a/", "s3://bucket/a/b/x y%2F..@z.safetensors"),
        ("S3://bucket/a", "s3://bucket/a/x"),
        ("gs://bucket/a", "gs://bucket/a/.x"),
        ("memory://a", "memory://a/b"),
    ],
)
def test_a_url_under_the_prefix_is_named_below_it(prefix: str, place: str) -> None:
    assert f"{prefix.rstrip('/').lower()}/{_name(prefix, place)}" == place


def test_an_http_url_is_decoded_to_the_name_that_the_store_quotes() -> None:
    assert _name("http://h/a%20b", "http://h/a%20b/x%20y%2541") == "x y%41"


def _name(prefix: str, place: object) -> str:
    """Return only the name: a store at the prefix need not be reachable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(within, "open_store", lambda *_: None)
        return open_within(prefix, place)[1]


@pytest.mark.parametrize(
    ("prefix", "place"),
    [
        ("s3://bucket/a", "s3://bucket/a"),
        ("s3://bucket/a", "s3://bucket/a/"),
        ("s3://bucket/a", "s3://bucket/ab/x"),
        ("s3://bucket/a", "s3://bucket/b/x"),
        ("s3://bucket/a", "s3://bucket2/a/x"),
        ("s3://bucket", "s3://bucket2/x"),
        ("s3://bucket", "s3://bucket@evil/x"),
        ("s3://bucket/a", "s3://key:secret@bucket/a/x"),
        ("s3://bucket/a", "gs://bucket/a/x"),
        ("s3://bucket/a", "s3://bucket/a/../b/x"),
        ("s3://bucket/a", "s3://bucket/a/./x"),
        ("s3://bucket/a", "s3://bucket/a//x"),
        ("s3://bucket/a", "s3://bucket/a/x?versionId=3"),
        ("s3://bucket/a", "s3://bucket/a/x#y"),
        ("s3://bucket/a", "s3://bucket/a/x\\y"),
        ("s3://bucket/a", "s3://bucket/a/x\ny"),
        ("s3://bucket/a", "s3://bucket/a/x::file:///etc/passwd"),
        ("s3://bucket/a", "simplecache::s3://bucket/a/x"),
        ("s3://bucket/a", "zip://s3://bucket/a/x"),
        ("s3://bucket/a", "/etc/passwd"),
        ("s3://bucket/a", "file:///etc/passwd"),
        ("s3://bucket/a", "x"),
        ("s3://bucket/a", ""),
        ("s3://", "s3://bucket/x"),
        ("http://h/a", "http://h/a/%2e%2e/b"),
        ("http://h/a", "http://h/a/..%2Fb"),
        ("http://h/a", "http://h/a/..%5Cb"),
        ("http://h/a", "http://h/a/x%5c..%5cy"),
        ("webdav://h/a", "webdav://h/a/..%5Cb"),
        ("http://h/a", "http://h:80/a/x"),
        ("/data/a", "s3://bucket/data/a/x"),
        ("/data/a", "http://h/data/a/x"),
        ("/data/a", "/data/ab/x"),
        ("/data/a", "/data/a"),
        ("/data/a", "/data/a/../b"),
        ("/data/a", "/data/a/.."),
        ("/data/a", "~/x"),
        ("/data/a", "/data/a/x\0y"),
        ("/data/a", "file://data/a/x"),
    ],
)
def test_any_other_place_is_refused(prefix: str, place: str) -> None:
    with pytest.raises(ConfigError, match="expected a path or URL under it") as e:
        open_within(prefix, place)
    assert "secret" not in str(e.value)


@pytest.mark.parametrize("place", [None, 3, b"s3://bucket/a/x", ["s3://bucket/a/x"], {}])
def test_a_place_that_is_no_string_is_refused(place: object) -> None:
    with pytest.raises(ConfigError, match="expected a path or URL under it"):
        open_within("s3://bucket/a", place)


@pytest.mark.parametrize("prefix", ["s3://bucket/a", "http://h/a", "/data/a"])
@pytest.mark.parametrize(
    "name", ["x" * 5000, "x/" * 3000 + "y", "\ud800", "\udc80x", "a\0b", "a\nb", "\x1b[2J", "\u202e", "\x85", "\x7f"]
)
def test_an_odd_name_is_refused(prefix: str, name: str) -> None:
    with pytest.raises(ConfigError, match="expected a path or URL under it") as e:
        open_within(prefix, f"{prefix}/{name}.safetensors")
    assert len(str(e.value)) < 500
    assert str(e.value).isprintable()


@pytest.mark.parametrize("name", ["x" * 300, "é" * 200, "/".join(["d" * 200] * 15)])
def test_a_name_that_no_file_has_is_an_error_of_the_store(tmp_path: Path, name: str) -> None:
    store, found = open_within(str(tmp_path), f"{tmp_path}/{name}")
    for use in (store.get, store.head, store.delete, lambda n: load_object(store, n)):
        try:
            use(found)
        except HsxError:
            continue
        assert use == store.delete


def test_the_name_has_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, other = tmp_path / "real", tmp_path / "other"
    (real / "inner").mkdir(parents=True)
    other.mkdir()
    (tmp_path / "prefix").symlink_to(real)
    (real / "in").symlink_to(real / "inner")
    (real / "out").symlink_to(other)
    (real / "loop").symlink_to(real / "loop")
    prefix = str(tmp_path / "prefix")
    assert _name(prefix, f"{prefix}/a") == "a"
    assert _name(prefix, f"file://{real}/in/a") == "inner/a"
    assert _name(f"file://{prefix}", str(real / "a")) == "a"
    for place in (real / "out" / "a", other / "a", tmp_path, Path("/")):
        with pytest.raises(ConfigError):
            open_within(prefix, str(place))
    store, name = open_within(prefix, str(real / "loop" / "a"))
    with pytest.raises(StoreError, match="links are not followed"):
        store.get(name)
    monkeypatch.chdir(tmp_path)
    store, name = open_within("prefix", "prefix/a")
    assert (store.url, name) == (prefix, "a")


# -- a folder or an object that is swapped for a link after the check ------------------------------------------------

PLACE = "sub/inner/x.safetensors"


def _put(root: Path, value: int) -> None:
    data = np.full((1, 4, 8), value, np.uint32)
    segment = Segment("x", 0, 0, 4, 4)
    page = Page(segment, 0, 4, 4, (1,), "float32", data.shape, "LTH", np.arange(4, dtype=np.int64), data)
    store = open_store(str(root))
    sink = PartSink(store, SinkOptions(resolve_codec("none"), {"model": "m"}, "w", layout="sample"), lambda _: None)
    sink.add(page)
    sink.close()


def _places(folder: Path) -> tuple[Path, Path]:
    """(prefix, a folder outside the prefix), with an object of the same name in each."""
    prefix, outside = folder / "prefix", folder / "outside"
    _put(prefix / "sub" / "inner", 1)
    _put(outside / "inner", 2)
    _put(outside, 3)
    for place in (prefix / "sub" / "inner", outside / "inner", outside):
        (place / "x.safetensors.lock").touch()
    return prefix, outside


def _swaps(prefix: Path, outside: Path) -> dict[str, Callable[[], None]]:
    def swap(path: Path, target: Path) -> None:
        if not path.is_symlink():
            path.rename(prefix / "moved")
            path.symlink_to(target)

    return {
        "outer": lambda: swap(prefix / "sub", outside),
        "inner": lambda: swap(prefix / "sub" / "inner", outside / "inner"),
        "object": lambda: swap(prefix / PLACE, outside / "inner" / "x.safetensors"),
    }


@pytest.mark.parametrize("swap", ["outer", "inner", "object"])
def test_links_that_are_swapped_in_after_the_check_are_not_followed(tmp_path: Path, swap: str) -> None:
    prefix, outside = _places(tmp_path)
    store, name = open_within(str(prefix), str(prefix / PLACE))
    assert load_object(store, name, framework="numpy")["hidden_states"].view(np.uint32).max() == 1
    _swaps(prefix, outside)[swap]()
    for use in (store.get, store.head, lambda n: store.get_ranges(n, [(0, 8)]), lambda n: load_object(store, n)):
        with pytest.raises(StoreError, match="links are not followed"):
            use(name)
    if swap == "object":
        store.delete(name)  # the link's name
        assert not (prefix / PLACE).is_symlink()
    else:
        with pytest.raises(StoreError, match="links are not followed"):
            store.delete(name)
    assert (outside / "x.safetensors").exists()
    assert (outside / "inner" / "x.safetensors").exists()


@pytest.mark.parametrize("swap", ["outer", "inner", "object"])
def test_a_swapped_folder_never_leads_outside_the_prefix(tmp_path: Path, swap: str) -> None:
    """The swap happens before the n-th call that opens or checks a file, for every n."""
    for step in range(1000):
        prefix, outside = _places(tmp_path / str(step))
        store, name = open_within(str(prefix), str(prefix / PLACE))
        system, flock = _System(step, _swaps(prefix, outside)[swap]), _Flock()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fcntl, "flock", flock)
            for module in (folders, local, within, object_lock):
                patch.setattr(module, "os", system)
            try:
                found = load_object(store, name, framework="numpy")["hidden_states"].view(np.uint32).max()
            except (StoreError, NotFound):
                found = None
        assert found in (None, 1)
        assert not {_file(path.stat()) for path in outside.rglob("*")} & flock.locked
        if not system.was_called:
            break
    assert step > 20
    assert found == 1


class _System:
    """Replaces ``os``. ``act`` is called before the n-th call (from 0) of ``open`` or ``stat``."""

    def __init__(self, n: int, act: Callable[[], None]) -> None:
        self._left, self._act = n, act

    @property
    def was_called(self) -> bool:
        return self._left < 0

    def _step(self) -> None:
        if self._left == 0:
            self._act()
        self._left -= 1

    def open(self, *args: Any, **kwargs: Any) -> int:
        self._step()
        return os.open(*args, **kwargs)

    def stat(self, *args: Any, **kwargs: Any) -> os.stat_result:
        self._step()
        return os.stat(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class _Flock:
    """Replaces ``fcntl.flock``, and records the locked files."""

    def __init__(self) -> None:
        self._flock, self.locked = fcntl.flock, set[tuple[int, int]]()

    def __call__(self, fd: int, how: int) -> None:
        self.locked.add(_file(os.fstat(fd)))
        self._flock(fd, how)


def _file(about: os.stat_result) -> tuple[int, int]:
    return about.st_dev, about.st_ino


def test_a_fifo_or_a_device_is_no_object(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    store, name = open_within(str(tmp_path), f"{tmp_path}/x.safetensors")
    for use in (store.get, store.head):
        with pytest.raises(StoreError, match="FIFO"):
            use(name)
    with pytest.raises(StoreError, match="name of an object"):
        list(store.list())


@pytest.mark.parametrize("prefix", ["s3://bucket/a", "/data/a"])
def test_the_name_of_an_unfinished_file_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="expected a path or URL under it"):
        open_within(prefix, f"{prefix}/x/.hsx-unfinished-1")


@pytest.mark.parametrize("put", ["put", "put_if_absent", "put_version"])
def test_a_put_in_a_confined_folder_follows_no_link(tmp_path: Path, put: str) -> None:
    """``LocalStore`` follows links of this user."""
    victim, root = tmp_path / "victim", tmp_path / "root"
    victim.mkdir()
    root.mkdir()
    (root / "link").symlink_to(victim)
    store = within.ConfinedFolder(root)
    with pytest.raises(StoreError, match="symbolic link"):
        getattr(store, put)("link/a", [b"1"], *["1"] * (put == "put_version"))
    assert list(victim.iterdir()) == []
    store.put("folder/a", [b"1"])
    assert store.get("folder/a") == b"1"
