"""An answer that is no listing, such as the page of a gateway, is an error and never an empty listing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from hsx_dist.errors import NotFound, StoreError, Unavailable
from hsx_dist.store import Store, open_store
from hsx_dist.store.fsspec import FsspecStore
from hsx_dist.store.obstore import ObstoreStore
from hsx_dist.store.opening import Backend
from hsx_dist.store.pages import Pages, objects_of_gcs, pages_of_gcs
from tests.harness.http_server import Answers, entry, listing, s3_options, served

PAGE = b"<html><body>maintenance</body></html>"
ILL_FORMED = b"<!DOCTYPE html><html><body>maintenance<br></body></html>"
EMPTY = b"<ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated></ListBucketResult>"
ERROR = b'<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>'


class Bucket(Answers):
    """Lists ``names`` as S3 does, or as GCS does. The answers in ``first`` come first: a body, or ``None`` to list."""

    names: tuple[str, ...] = ()
    first: list[bytes | None] = []  # noqa: RUF012

    def do_GET(self) -> None:
        if self.path.startswith("/b/r/"):  # an object, which a HEAD did not find
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        asked = {name: value[0] for name, value in parse_qs(urlsplit(self.path).query).items()}
        special = self.first.pop(0) if self.first else None
        body = special if special is not None else (self.s3 if "list-type" in asked else self.gcs)(asked)
        kind = "application/json" if body[:1] == b"{" else "application/xml"
        self.answer(404 if body == b"404" else 200, body, Content_Type=kind)

    def do_HEAD(self) -> None:
        self.send_error(404)

    def s3(self, asked: dict[str, str]) -> bytes:
        start = max(asked.get("start-after", ""), asked.get("continuation-token", ""))
        names = [n for n in self.names if n.startswith(asked.get("prefix", "")) and n > start]
        page = names[: int(asked.get("max-keys", 10))]
        more = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if page != names else ""
        said = f"<IsTruncated>{str(page != names).lower()}</IsTruncated>{more}"
        return listing((entry(n, int(not n.endswith("/"))) for n in page), said)

    def gcs(self, asked: dict[str, str]) -> bytes:
        names = [n for n in self.names if n.startswith(asked.get("prefix", "")) and n >= asked.get("startOffset", "")]
        start = int(asked.get("pageToken", 0))
        page: dict[str, Any] = {
            "kind": "storage#objects",
            "items": [{"name": n, "size": "1"} for n in names[start:][:2]],
        }
        return json.dumps(page | ({"nextPageToken": str(start + 2)} if names[start + 2 :] else {})).encode()


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Bucket, "names", ("r/a", "r/b", "r/c/d"))
    monkeypatch.setattr(Bucket, "first", [])
    with served(Bucket) as url:
        yield url


def s3(url: str, backend: Backend) -> Store:
    once = {"config_kwargs": {"retries": {"total_max_attempts": 1}}}
    return open_store("s3://b/r", s3_options(url) | once, backend=backend, retry_seconds=0)


def names(store: Store, after: str | None = None) -> list[str]:
    return [info.name for info in store.list(after=after)]


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
@pytest.mark.parametrize("answers", [[PAGE] * 9, [ERROR] * 9, [ILL_FORMED], [b"Try later"], [b"{}"], [b""]])
def test_another_answer_of_s3_is_no_listing(url: str, backend: Backend, answers: list[bytes | None]) -> None:
    store = s3(url, backend)
    Bucket.first[:] = answers
    with pytest.raises(Unavailable, match="list s3://b/r/"):
        names(store)
    Bucket.first.clear()
    assert names(store) == ["a", "b", "c/d"]
    Bucket.names = ()
    assert names(store) == []


@pytest.mark.parametrize("option", ["asynchronous", "use_listings_cache", "listings_expiry_time", "max_paths"])
def test_obstore_lists_with_options_that_concern_no_object(url: str, option: str) -> None:
    store = open_store("s3://b/r", s3_options(url) | {option: True}, backend="obstore", retry_seconds=0)
    assert names(store) == ["a", "b", "c/d"]


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
@pytest.mark.parametrize("body", [PAGE, ERROR, EMPTY[:40], b""])
@pytest.mark.parametrize("pages", [1, 2])
def test_another_answer_for_a_later_page_ends_no_listing(url: str, backend: Backend, body: bytes, pages: int) -> None:
    """Pages of any size: a store may list fewer names than asked, so the number of names shows nothing."""
    Bucket.names = tuple(f"r/{i:04d}" for i in range(25))
    store = s3(url, backend)
    assert len(names(store)) == 25
    Bucket.first[:] = [*[None] * pages, *[body] * 9]
    with pytest.raises(Unavailable, match="list s3://b/r/"):
        names(store)
    Bucket.first.clear()
    assert len(names(store)) == 25


@pytest.mark.parametrize("body", [b"{}", b'{"error":{"code":503,"message":"x"}}', b"[]", PAGE])
@pytest.mark.parametrize("before", [0, 1])
def test_another_answer_of_gcs_is_no_listing(
    url: str, monkeypatch: pytest.MonkeyPatch, body: bytes, before: int
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
    store = open_store(
        "gs://b/r", {"token": "anon", "project": "p", "endpoint_url": url}, backend="fsspec", retry_seconds=0
    )
    Bucket.first[:] = [*[None] * before, body]
    with pytest.raises(Unavailable, match="list gs://b/r/"):
        names(store)
    assert (names(store), names(store, "b")) == (["a", "b", "c/d"], ["c/d"])
    Bucket.first[:] = [b"404"]
    with pytest.raises(NotFound):  # the bucket is missing
        names(store)


@pytest.mark.parametrize(("sorts", "left"), [(True, 3), (False, 0)])
def test_a_listing_of_google_yields_each_page_before_the_next(
    url: str, monkeypatch: pytest.MonkeyPatch, sorts: bool, left: int
) -> None:
    """A retry continues behind the last page, and a long listing takes no memory for all names."""
    Bucket.names = tuple(f"r/{i}" for i in range(8))
    Bucket.first[:] = [None] * 4
    store = FsspecStore("gs://b/r", {"token": "anon", "project": "p", "endpoint_url": url})
    assert not store._sorts()
    monkeypatch.setattr(FsspecStore, "_sorts", lambda _: sorts)
    assert next(store.list()).name == "0"
    assert len(Bucket.first) == left
    assert names(store) == [f"{i}" for i in range(8)]


def test_google_sorts_listings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    assert FsspecStore("gs://b/r", {"token": "anon", "project": "p"})._sorts()


def test_obstore_lists_gcs_through_gcsfs(tmp_path: Path) -> None:
    """obstore takes a page of a gateway for the last page of a listing."""
    store = ObstoreStore(f"file://{tmp_path}")
    other = FsspecStore(f"memory://{tmp_path.name}/listed")
    other.put("a", [b"1"])
    store._scheme, store._slow = "gs", other
    assert names(store) == ["a"]


@pytest.mark.parametrize(("cycle", "most"), [(1, 2), (2, 4), (3, 7), (1000, 3000)])
def test_a_listing_that_repeats_a_page_ends(cycle: int, most: int) -> None:
    """Without objects, no name comes again."""
    for token, pages in (
        ("nextPageToken", lambda ask: pages_of_gcs(ask, "r/", "x")),
        ("NextContinuationToken", lambda ask: Pages().answers(ask, "r/", "x")),
    ):
        numbers = itertools.count(1)
        found = pages(
            lambda token=token, numbers=numbers, **_: {
                "kind": "storage#objects", "Name": "b", token: f"t{next(numbers) % cycle}"
            }
        )  # fmt: skip
        with pytest.raises(StoreError, match=rf"x: expected .* to have a new {token} .*, got the token of an earlier"):
            list(itertools.islice(found, most + 1))


@pytest.mark.parametrize(
    "page",
    [
        {"items": None},
        {"items": {"a": 1}},
        {"items": [None]},
        {"items": [{"size": "3"}]},
        {"items": [{"name": 5, "size": "3"}]},
        {"items": [{"name": "", "size": "3"}]},
        {"items": [{"name": "r/a", "size": -3}]},
    ],
)
def test_an_odd_entry_of_gcs_is_a_store_error(page: dict[str, Any]) -> None:
    with pytest.raises(StoreError, match="x: expected "):
        list(objects_of_gcs(lambda **_: {"kind": "storage#objects", **page}, "r/", "x"))
