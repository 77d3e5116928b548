"""A client of a server may choose an object's path. A path that reads like a library's error changes no result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit
from xml.sax.saxutils import escape

import obstore.store
import pytest

from hsx_dist.errors import NotFound
from hsx_dist.store import Store, open_store
from hsx_dist.store.obstore import ObstoreStore
from tests.harness.http_server import Answers, s3_options, served

_DATA = b"abcdef"
_FAILED = "Error performing GET http:h in 1ms - Server returned non-2xx status code"

NAMES = [
    "plain",
    "a status code: 503 b",
    "a HTTP status 503 b",
    "a (code: AccessDenied)",
    "a An error occurred (SlowDown) when calling b",
    "a <Code>SlowDown</Code> b",
    "a <Error><Code>NoSuchBucket</Code></Error>",
    "Forbidden: b",
    "a Forbidden: b",
    "a credential provider: b",
    "a credential provider: Unavailable: b",
    "External AWS credential provider: Unavailable: ",
    "a performing token request",
    "a performing list request",
    "a HTTP error: error sending request: operation timed out",
    "The specified bucket does not exist",
    '"message": "bucket does not exist',
    "there is no bucket",
    "redirect without LOCATION",
    "a Received redirect without LOCATION",
    "Requested range was invalid",
    "Generic LocalFileSystem error: Requested range was invalid",
    "a (os error 5)",
    "a Got invalid put response",
    "a Got invalid list response: b",
    "Requested 0..5, got 0..3",
    f"a not found: {_FAILED}: 503 Slow Down: <Error><Code>SlowDown<",
    f"{_FAILED}: 503 Slow Down: b",
    f"Generic S3 error: {_FAILED}: 403 Forbidden: b",
    f"Object at location a not found: {_FAILED}: 301 Moved: b",
    "code: 404 (ExpiredToken) 416 InvalidRange",
]
#: obstore refuses control characters.
_NOT_FOR_OBSTORE = ["a status code: 503 b\n\nDebug source:\nb"]


class Service(Answers):
    """S3, GCS's two APIs and a web server, with the objects ``names``."""

    names: ClassVar[set[str]] = set()

    def do_HEAD(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.endswith("/o"):  # a listing of GCS in JSON
            return self.answer(200, b'{"kind": "storage#objects"}', Content_Type="application/json")
        found = next((name for name in self.names if path.endswith(f"/r/{name}")), None)
        if found is None:
            key = escape(path.partition("/r/")[2])
            error = f"<Error><Code>NoSuchKey</Code><Message>No such object: {key}</Message><Key>r/{key}</Key></Error>"
            return self.answer(404, f'<?xml version="1.0"?>\n{error}'.encode(), Content_Type="application/xml")
        if "/o/" in path and "alt=media" not in self.path:
            stated = {"bucket": "b", "name": f"r/{found}", "size": str(len(_DATA)), "generation": "1"}
            return self.answer(200, json.dumps(stated).encode(), Content_Type="application/json")
        date = {"Last_Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "ETag": '"1"'}
        if "Range" not in self.headers:
            return self.answer(200, _DATA, **date)
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        last = min(last, len(_DATA) - 1)
        if first > last:
            return self.answer(416, b"<Error><Code>InvalidRange</Code></Error>")
        return self.answer(206, _DATA[first : last + 1], Content_Range=f"bytes {first}-{last}/{len(_DATA)}", **date)

    do_GET = do_HEAD

    def do_DELETE(self) -> None:
        self.do_HEAD()


def _gcs(url: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Return obstore's GCS at ``url``: only a service account names an endpoint."""
    account = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    real = obstore.store.GCSStore

    def at_url(bucket: str, **more: Any) -> Any:
        more["config"] = {"service_account_key": json.dumps(account)}
        return real(bucket, **{**more, "client_options": {**more["client_options"], "allow_http": True}})

    monkeypatch.setattr(obstore.store, "GCSStore", at_url)
    return ObstoreStore("gs://b/r", {"token": "anon"})


_AT_URL: dict[str, Callable[[str, pytest.MonkeyPatch], Store]] = {
    "obstore s3": lambda url, _: open_store("s3://b/r", s3_options(url), backend="obstore", retry_seconds=0),
    "s3fs": lambda url, _: open_store("s3://b/r", s3_options(url), backend="fsspec", retry_seconds=0),
    "obstore gcs": _gcs,
    "gcsfs": lambda url, _: open_store("gs://b/r", {"token": "anon", "endpoint_url": url}, retry_seconds=0),
    "http": lambda url, _: open_store(f"{url}/r", retry_seconds=0),
}


@pytest.fixture(params=[*_AT_URL, "memory", "file", "obstore file"])
def back_end(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(back_end: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Store]:
    monkeypatch.setattr(Service, "names", set())
    if back_end in _AT_URL:
        with served(Service) as url:
            yield _AT_URL[back_end](url, monkeypatch)
    elif back_end == "obstore file":
        yield ObstoreStore(f"file://{tmp_path}")
    else:
        yield open_store(f"{back_end}://{tmp_path}", retry_seconds=0)


def _names(back_end: str) -> list[str]:
    return NAMES if "obstore" in back_end else NAMES + _NOT_FOR_OBSTORE


def test_the_name_of_a_missing_object_decides_nothing(store: Store, back_end: str) -> None:
    wrong = []
    calls: list[Callable[[str], object]] = [
        store.head,
        store.get,
        lambda name: store.get(name, 100),
        lambda name: store.get_ranges(name, [(0, 3)]),
        lambda name: store.get_ranges(name, [(0, 3), (1 << 22, 1 << 23)]),
    ]
    for name in _names(back_end):
        for number, call in enumerate(calls):
            try:
                wrong.append((number, name, call(name)))
            except NotFound as e:
                if "there is no such object" not in str(e):
                    wrong.append((number, name, str(e)))
            except Exception as e:  # noqa: BLE001
                wrong.append((number, name, repr(e)[:300]))
        if back_end != "http":  # a web server has no deletes
            store.delete(name)
    assert not wrong


def test_the_name_of_an_object_decides_nothing(store: Store, back_end: str) -> None:
    names = _names(back_end)
    for name in names if back_end not in _AT_URL else ():
        store.put(name, [_DATA])
    Service.names.update(names)
    for name in names:
        assert store.head(name).size == len(_DATA)
        assert store.get(name) == store.get(name, 100) == _DATA
        assert store.get_ranges(name, [(1, 3)]) == [_DATA[1:3]]
