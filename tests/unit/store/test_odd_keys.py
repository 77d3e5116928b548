"""Keys that S3 has and a file system has not: empty parts, ``.`` and ``..``, and folder markers of consoles."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from hsx_dist.errors import ConfigError, StoreError
from hsx_dist.store import Store, open_store
from hsx_dist.store.base import ObjectInfo
from hsx_dist.store.fsspec import FsspecStore
from hsx_dist.store.obstore import ObstoreStore
from hsx_dist.store.opening import Backend
from hsx_dist.store.pages import put_in_order, without_markers
from tests.harness.http_server import Answers, entry, listing, s3_options, served


class Bucket(Answers):
    """The bucket ``b`` of a service of S3. It stores each key as written, and lists by name."""

    keys: dict[str, bytes] = {}  # noqa: RUF012
    ignores_prefixes = False

    def do_PUT(self) -> None:
        self.keys[self._key()] = self.received()
        self.answer_object(200)

    def do_HEAD(self) -> None:
        found = self.keys.get(self._key())
        self.answer_object(404 if found is None else 200, found or b"")

    def do_GET(self) -> None:
        if self._key() not in ("", "/b"):  # an object, which a HEAD did not find
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        prefix = parse_qs(urlsplit(self.path).query).get("prefix", [""])[0]
        found = [key for key in sorted(self.keys) if self.ignores_prefixes or key.startswith(prefix)]
        self.answer(200, listing(entry(key, len(self.keys[key])) for key in found))

    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix("/b/")


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    monkeypatch.setattr(Bucket, "keys", {})
    with served(Bucket) as url:
        yield s3_options(url)


def _inner(store: Store) -> Store:
    inner: Store = store._inner  # type: ignore[attr-defined]
    return inner


@pytest.mark.parametrize("path", ["/exp", "x//y", "./x", "x/../y"])
def test_a_url_with_an_odd_part_has_one_place(options: dict[str, str], path: str) -> None:
    """obstore changes or refuses these paths, and readers in child processes use fsspec."""
    store = open_store(f"s3://b/{path}", options, retry_seconds=0)
    assert isinstance(_inner(store), FsspecStore)
    store.put_if_absent("m/1", b"1")
    assert list(Bucket.keys) == [f"{path}/m/1"]
    assert [info.name for info in store.list("m/")] == ["m/1"]
    with pytest.raises(ConfigError, match=r"the URL has an empty part, .* Set fsspec or auto"):
        open_store(f"s3://b/{path}", options, backend="obstore")


@pytest.mark.parametrize("url", ["s3://b", "s3://b/", "s3://b//", "s3://b/x/", "s3://b/x//"])
def test_slashes_at_the_end_of_a_url_do_not_count(options: dict[str, str], url: str) -> None:
    assert isinstance(_inner(open_store(url, options, backend="obstore")), ObstoreStore)
    for backend in ("obstore", "fsspec"):
        open_store(url, options, backend=backend, retry_seconds=0).put("a", [backend.encode()])  # type: ignore[arg-type]
    assert list(Bucket.keys) == [f"{url[5:].rstrip('/')}/a".removeprefix("b/")]


@pytest.mark.parametrize("sorts", [True, False])
@pytest.mark.parametrize("made", [ObstoreStore, FsspecStore])
def test_folder_markers_are_no_objects(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch, made: type[ObstoreStore | FsspecStore], sorts: bool
) -> None:
    for name in ("", "empty/", "none", "user-1", "user/", "user/x"):
        Bucket.keys[f"m/{name}"] = b"1" if name.startswith("user") and name != "user/" else b""
    store = made("s3://b/m", options)
    monkeypatch.setattr(FsspecStore, "_sorts", lambda _: sorts)
    assert [info.name for info in store.list()] == ["none", "user-1", "user/x"]
    assert [info.name for info in store.list("user/")] == ["user/x"]


@pytest.mark.parametrize("size", [0, 1])
def test_an_object_with_the_name_of_a_folder_marker_is_listed(options: dict[str, str], size: int) -> None:
    Bucket.keys.update({"m/k": bytes(size), "m/k-2": b"1", "m/k/": b"", "m/l/": b""})
    store = ObstoreStore("s3://b/m", options)
    assert list(store.list()) == [ObjectInfo("k", size), ObjectInfo("k-2", 1)]
    assert list(store.list("k")) == list(store.list())


@pytest.mark.parametrize("names", [["k", "k-2", "k"], ["k", "k", "k-2"]])
def test_a_marker_before_its_object_and_a_repeated_page(names: list[str]) -> None:
    """A store that lists in any order may list the marker first. A page of empty objects may come again and again."""
    listed = [ObjectInfo(name, n) for n, name in enumerate(names)]
    assert put_in_order(without_markers(listed, lambda _: False), "list") == [
        ObjectInfo("k", names.index("k", 1)),
        ObjectInfo("k-2", names.index("k-2")),
    ]
    again = (ObjectInfo(name, 0) for name in names * 3)
    with pytest.raises(StoreError, match="the store repeats a page"):
        put_in_order(without_markers(again, lambda _: False), "list")


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
def test_a_key_with_an_odd_part_ends_no_listing(options: dict[str, str], backend: Backend) -> None:
    Bucket.keys.update({"m/d//e": b"1", "m/f": b"1"})
    store = open_store("s3://b/m", options, backend=backend, retry_seconds=0)
    assert [info.name for info in store.list()] == ["d//e", "f"]


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
def test_a_store_that_lists_other_names_is_refused(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> None:
    monkeypatch.setattr(Bucket, "ignores_prefixes", True)
    Bucket.keys["other/a"] = b"1"
    with pytest.raises(StoreError, match="expected names that begin with 'm/', got 'other/a'"):
        list(open_store("s3://b/m", options, backend=backend, retry_seconds=0).list())
