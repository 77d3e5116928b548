"""An answer that is no listing, such as the page of a gateway, is an error and never an empty listing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from hsx_dist.errors import NotFound, StoreError, Unavailable
from hsx_dist.store import Store, open_store
from hsx_dist.store.fsspec import FsspecStore
from hsx_dist.store.obstore import ObstoreStore
from hsx_dist.store.opening import Backend
from hsx_dist.store.pages import pages_of_gcs
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
        page = names[: int(asked.get("max-keys", 1000))]
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


def test_a_page_in_the_middle_of_a_listing_ends_none(url: str) -> None:
    """Of a service that sorts its names, as AWS does."""
    Bucket.names = tuple(f"r/{i:04d}" for i in range(1500))
    store = s3(url, "obstore")
    inner = store._inner  # type: ignore[attr-defined]
    inner._connection = replace(inner._connection, sorts=True)
    assert len(names(store)) == 1500
    Bucket.first[:] = [None, PAGE]  # the page is temporary
    assert len(names(store)) == 1500
    Bucket.first[:] = [None, PAGE, None, PAGE]
    with pytest.raises(Unavailable, match="got one without names that follow"):
        names(store)
    assert len(names(store)) == 1500
    Bucket.names = Bucket.names[:1000]
    assert len(names(store)) == 1000
    assert names(store, "0999") == []
    Bucket.names = (*Bucket.names[:999], "r/z/")  # a console's folder marker ends the page
    assert len(names(store)) == 999
    Bucket.names = (*Bucket.names[:998], "r/z.json", "r/z/")  # the first is before the marker, and not before "r/z"
    assert names(store)[-2:] == ["0997", "z.json"]
    Bucket.names = (*Bucket.names, "r/z/a")
    Bucket.first[:] = [None, PAGE]
    assert names(store)[-3:] == ["0997", "z.json", "z/a"]


@pytest.mark.parametrize("page", [PAGE, EMPTY])
def test_an_object_that_is_stored_after_an_empty_page_is_listed(url: str, page: bytes) -> None:
    """The page may be a gateway's, or the listing that was true before the object was stored."""
    store = s3(url, "obstore")
    Bucket.first[:] = [page]
    assert names(store) == ["a", "b", "c/d"]
    assert names(store, "b") == ["c/d"]


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


def test_an_empty_listing_of_gcs_by_obstore_is_confirmed(tmp_path: Path) -> None:
    store = ObstoreStore(f"file://{tmp_path}")
    other = FsspecStore(f"memory://{tmp_path.name}/confirmed")
    store._scheme, store._slow = "gs", other
    assert names(store) == []
    other.put("a", [b"1"])
    with pytest.raises(Unavailable, match="got one without names that follow"):
        names(store)


def test_pages_of_gcs_that_repeat_a_token_end() -> None:
    """Without objects, no name comes again."""
    page = {"kind": "storage#objects", "nextPageToken": "t"}
    found = pages_of_gcs(lambda **_: page, "r/", "x")
    assert [next(found), next(found)] == [page, page]
    with pytest.raises(StoreError, match=r"x: expected .* to have a new nextPageToken .*, got the token of this page"):
        next(found)
