"""A listing in pages has every object, or fails: the names of a page that is missing would be lost samples."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from hsx_dist.errors import StoreError
from hsx_dist.store import open_store
from hsx_dist.store.opening import Backend

NAMES = [f"r/data/{i}" for i in range(5)]
SILENT = ("silent", "token alone")


class Bucket(BaseHTTPRequestHandler):
    """Lists ``NAMES`` as S3 does, in pages of two, or in a way that some stores list."""

    way = "version 2"
    requests = 0

    def do_GET(self) -> None:
        type(self).requests += 1
        asked = {name: value[0] for name, value in parse_qs(urlsplit(self.path).query).items()}
        names = [name for name in NAMES if name.startswith(asked.get("prefix", ""))]
        token = asked.get("continuation-token", "")
        start = int(token or 0) if self.way not in ("token ignored", "version 1", "no token", "silent") else 0
        stop = start + min(int(asked.get("max-keys", 2)), 2)
        following = {
            "version 2": f"<NextContinuationToken>{stop}</NextContinuationToken>",
            "same token": f"<NextContinuationToken>{token or stop}</NextContinuationToken>",
            "token ignored": f"<NextContinuationToken>{self.requests}</NextContinuationToken>",
            "page instead of another": f"<NextContinuationToken>{stop}</NextContinuationToken>",
            "version 1": f"<NextMarker>{names[min(stop, len(names)) - 1]}</NextMarker>",
            "no token": "",
            "silent": "",
            "token alone": f"<NextContinuationToken>{stop}</NextContinuationToken>",
        }[self.way]
        truncated = stop < len(names)
        said = f"<IsTruncated>{str(truncated).lower()}</IsTruncated>" if self.way not in SILENT else ""
        entries = "".join(
            f"<Contents><Key>{name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>1</Size></Contents>"
            for name in (names[:2] if self.way == "page instead of another" and start == 2 else names[start:stop])
        )
        answer = (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"{said}{following if truncated else ''}{entries}"
            "<Name>b</Name></ListBucketResult>"
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    monkeypatch.setattr(Bucket, "requests", 0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{server.server_port}"}
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("version 1", "NextContinuationToken .* got none"),
        ("no token", "NextContinuationToken .* got none"),
        ("silent", "the store cuts its listings"),
        ("same token", "expected each name once|the token of this page"),
        ("token ignored", "expected each name once"),
        ("page instead of another", "expected each name once"),
    ],
)
def test_a_store_that_does_not_continue_its_pages_is_refused(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch, backend: Backend, way: str, says: str
) -> None:
    monkeypatch.setattr(Bucket, "way", way)
    with pytest.raises(StoreError, match=f"list s3://b/r/data/: .*({says})") as told:
        list(open_store("s3://b/r", options, backend=backend, retry_seconds=0).list("data/"))
    assert not told.value.retryable


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
def test_a_token_alone_says_that_there_are_more_pages(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> None:
    monkeypatch.setattr(Bucket, "way", "token alone")
    store = open_store("s3://b/r", options, backend=backend, retry_seconds=0)
    assert [info.name for info in store.list("data/")] == [name.removeprefix("r/") for name in NAMES]


@pytest.mark.parametrize(("backend", "checks"), [("obstore", 1), ("fsspec", 0)])
def test_a_listing_of_several_pages_is_whole_and_its_store_is_checked_once(
    options: dict[str, str], backend: Backend, checks: int
) -> None:
    store = open_store("s3://b/r", options, backend=backend, retry_seconds=0)
    for requests in (3 + checks, 6 + checks):
        assert [info.name for info in store.list("data/")] == [name.removeprefix("r/") for name in NAMES]
        assert Bucket.requests == requests
