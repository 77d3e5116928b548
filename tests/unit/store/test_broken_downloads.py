"""A download whose connection breaks. obstore asks for the rest of the object, and that request may fail too."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hsx_dist.errors import NotFound
from hsx_dist.store import Store, open_store
from tests.harness.http_server import Answers, s3_options, served

OLD, NEW = bytes(1 << 20), b"\1" * (1 << 20)
DESCRIBED = {"Last_Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
READS: dict[str, Callable[[Store], bytes]] = {
    "get": lambda store: store.get("a"),
    "get_ranges": lambda store: bytes(store.get_ranges("a", [(0, len(OLD))])[0]),
}


def error(code: str) -> bytes:
    return b"<Error><Code>%s</Code><Message>no</Message></Error>" % code.encode()


class Breaking(Answers):
    """Sends half of the first body. Then ``fails`` answers ``failures`` requests, and the next ones get ``rest``."""

    requests = 0
    failures = 3
    rest = OLD

    def fails(self) -> None:
        self.close_connection = True

    def do_GET(self) -> None:
        self.received()
        type(self).requests += 1
        if self.requests == 1:
            self.object(OLD, broken=True)
        elif self.requests <= 1 + self.failures:
            self.fails()
        elif self.headers.get("If-Match") in (None, '"1"' if self.rest is OLD else '"2"'):
            self.object(self.rest)
        else:
            self.answer(412, error("PreconditionFailed"))

    def object(self, whole: bytes, broken: bool = False) -> None:
        first, _, last = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")
        end = min(int(last or len(whole)) + 1, len(whole))
        body = whole[int(first) : end]
        described = DESCRIBED | {"ETag": '"1"' if whole is OLD else '"2"'}
        if "Range" in self.headers:
            described["Content_Range"] = f"bytes {first}-{end - 1}/{len(whole)}"
        status = 206 if "Range" in self.headers else 200
        self.answer(status, body[: len(body) // 2] if broken else body, length=len(body), **described)
        self.close_connection = broken


@pytest.fixture(params=["obstore", "fsspec"])
def opened(request: pytest.FixtureRequest) -> Callable[[str], Store]:
    return lambda url: open_store("s3://b/r", s3_options(url), backend=request.param, retry_seconds=60)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize(
    ("opened", "status", "body"),
    [
        ("fsspec", 0, b""),  # makes each request anew
        ("obstore", 0, b""),
        ("obstore", 503, error("SlowDown")),
        ("obstore", 404, b"<html>"),
        ("obstore", 400, error("ExpiredToken")),
    ],
    indirect=["opened"],
)
def test_an_outage_after_the_break_is_waited_for(
    opened: Callable[[str], Store], status: int, body: bytes, read: str
) -> None:
    class Server(Breaking):
        def fails(self) -> None:
            if status:
                self.answer(status, body)
            else:
                super().fails()

    with served(Server) as url:
        assert READS[read](opened(url)) == OLD
    assert Server.requests > 4


@pytest.mark.parametrize("read", READS)
def test_an_object_that_is_replaced_after_the_break_is_read_anew(opened: Callable[[str], Store], read: str) -> None:
    class Server(Breaking):
        failures = 0
        rest = NEW

    with served(Server) as url:
        assert READS[read](opened(url)) == NEW


@pytest.mark.parametrize("read", READS)
def test_an_object_that_is_deleted_after_the_break_is_missing(opened: Callable[[str], Store], read: str) -> None:
    class Server(Breaking):
        failures = 1 << 10

        def fails(self) -> None:
            self.answer(404, error("NoSuchKey"))

    with served(Server) as url, pytest.raises(NotFound):
        READS[read](opened(url))


def test_a_rest_without_a_length_that_ends_early_is_not_the_whole(opened: Callable[[str], Store]) -> None:
    class Server(Breaking):
        failures = 1

        def fails(self) -> None:
            self.close_connection = True
            first = int(self.headers["Range"].removeprefix("bytes=").partition("-")[0])
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{len(OLD) - 1}/{len(OLD)}")
            for name, value in (DESCRIBED | {"ETag": '"1"'}).items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(OLD[first : first + 100])

    with served(Server) as url:
        assert opened(url).get("a", len(OLD)) == OLD
