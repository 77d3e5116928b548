"""Answers of GCS's JSON API through gcsfs: the status decides, and not the text."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from hsx_dist.errors import StoreError, Unavailable
from hsx_dist.store import Store, open_store
from tests.harness.http_server import Answers, served

CALLS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("a", [b"x"]),
    "put_if_absent": lambda store: store.put_if_absent("a", b"x"),
    "list": lambda store: list(store.list()),
    "delete": lambda store: store.delete("a"),
}
LISTING, OBJECT = {"kind": "storage#objects"}, {"name": "r/a", "generation": "1", "size": "1"}
TEXTS = {
    "a page": b"<html>503: upstream sent an invalid header</html>",
    "a message": json.dumps({"error": {"code": 503, "message": "The object b/invalid-prompts/a is busy"}}).encode(),
    "another code": b'{"error": {"code": 412, "message": "m"}}',
    "a name": b'{"error": {"code": "ServiceUnavailable", "message": "m"}}',
    "no message": b'{"error": []}',
}


def _handler(status: int, text: bytes, times: int) -> type[Answers]:
    class Handler(Answers):
        left = times

        def do_GET(self) -> None:
            self.received()
            if Handler.left:
                Handler.left -= 1
                self.answer(status, text)
                return
            is_listing = self.command == "GET" and self.path.partition("?")[0].endswith("/o")
            found = LISTING if is_listing else OBJECT
            self.answer(200, json.dumps(found).encode(), Content_Type="application/json")

        do_POST = do_DELETE = do_GET

    return Handler


def _store(endpoint: str) -> Store:
    return open_store("gs://b/r", {"token": "anon", "endpoint_url": endpoint}, backend="fsspec", retry_seconds=20)


@pytest.mark.parametrize(
    ("status", "text", "call"),
    [
        # Each text and each call, not all of their combinations.
        pytest.param(status, text, call, marks=[] if status == 503 and (i - j) % len(CALLS) == 0 else pytest.mark.soak)
        for status in (503, 429)
        for i, text in enumerate(TEXTS)
        for j, call in enumerate(CALLS)
    ],
)
def test_an_answer_of_a_busy_server_is_tried_again_with_any_text(status: int, text: str, call: str) -> None:
    with served(_handler(status, TEXTS[text], 1)) as endpoint:
        CALLS[call](_store(endpoint))


@pytest.mark.parametrize(
    ("status", "text", "call"),
    [
        *((499, b'{"error": {"code": 499}}', call) for call in (*CALLS, "head", "get")),
        # The text of an answer to a delete does not matter.
        *((200, b'{"status": "maintenance"}', call) for call in ("put", "put_if_absent", "list", "head", "get")),
    ],
)
def test_an_answer_that_is_none_of_gcs_is_unavailable(status: int, text: bytes, call: str) -> None:
    """499: the server or a gateway cancelled the request. gcsfs takes it for success."""
    calls = {**CALLS, "head": lambda store: store.head("a"), "get": lambda store: store.get("a", 1)}
    with served(_handler(status, text, 100)) as endpoint:
        store = open_store("gs://b/r", {"token": "anon", "endpoint_url": endpoint}, backend="fsspec", retry_seconds=0)
        with pytest.raises(Unavailable):
            calls[call](store)


@pytest.mark.parametrize("text", TEXTS)
def test_a_refused_request_is_an_error_with_any_text(text: str) -> None:
    with served(_handler(400, TEXTS[text], 100)) as endpoint, pytest.raises(StoreError) as told:
        _store(endpoint).put_if_absent("a", b"x")
    assert type(told.value) is StoreError
