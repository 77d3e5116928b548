"""A service of S3 whose answers lack a member, or have a wrong one, raises the store's error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hsx_dist.errors import StoreError
from hsx_dist.store import Store, open_store
from hsx_dist.store.base import Conditional, stated_size
from hsx_dist.store.opening import Backend


class Odd(BaseHTTPRequestHandler):
    """Answers HEAD without size and ETag, and lists one object with ``entry`` as its members."""

    entry = ""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT")
        self.end_headers()

    def do_GET(self) -> None:
        answer = (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name>'
            f"<IsTruncated>false</IsTruncated><Contents><LastModified>2025-01-01T00:00:00.000Z</LastModified>{self.entry}"
            "</Contents></ListBucketResult>"
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def options() -> Iterator[dict[str, str]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{server.server_port}"}
    server.shutdown()
    server.server_close()


def _version(store: Store) -> str:
    assert isinstance(store, Conditional)
    return store.version("a")


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
@pytest.mark.parametrize(
    ("entry", "call"),
    [
        ("", lambda store: store.head("a")),
        ("<Key>r/a</Key>", lambda store: list(store.list())),
        ("<Key>r/a</Key><Size>-5</Size>", lambda store: list(store.list())),
        ("<Key>r/a</Key><Size>abc</Size>", lambda store: list(store.list())),
        ("<Size>3</Size>", lambda store: list(store.list())),
        ("", _version),
    ],
)
def test_an_odd_answer_is_a_store_error(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch, backend: Backend, entry: str, call: Callable[[Store], Any]
) -> None:
    monkeypatch.setattr(Odd, "entry", entry)
    with pytest.raises(StoreError, match="conditional deletes" if call is _version else "a: |list ") as told:
        call(open_store("s3://b/r", options, backend=backend, retry_seconds=0))
    assert not told.value.retryable


@pytest.mark.parametrize("value", [None, -1, "", "x", "9" * 5000, 1.5, True, {}])
def test_a_size_is_a_number(value: object) -> None:
    with pytest.raises(StoreError, match="head x: expected the object's size"):
        stated_size(value, "head x")
    assert stated_size("3", "head x") == stated_size(3, "head x") == 3
