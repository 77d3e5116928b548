"""A conditional upload whose answer is lost: a retry of the library would find its object, and report a conflict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hsx_dist.errors import Unavailable
from hsx_dist.store import Store, open_store
from hsx_dist.store.s3_answers import CheckedS3
from tests.harness.http_server import Answers, s3_options, served

PUTS: dict[str, Callable[[Any], object]] = {
    "if absent": lambda store: store.put_if_absent("a", b"1"),
    "version": lambda store: store.put_version("a", [b"1"], "1"),
}


class Losing(Answers):
    """Stores each upload. Answers none, or with the status ``status``."""

    status = 0
    uploads = 0

    def do_PUT(self) -> None:
        self.received()
        type(self).uploads += 1
        if self.uploads > 1 and {"If-None-Match", "If-Match"} & set(self.headers):
            self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        elif self.status and self.uploads == 1:
            self.answer(self.status, b"<Error><Code>InternalError</Code></Error>")
        elif self.uploads == 1:
            self.close_connection = True
        else:
            self.answer_object(200)

    def do_POST(self) -> None:
        self.received()
        type(self).uploads += 1
        if self.uploads > 1:
            self.answer(412)
        elif self.status:
            self.answer(self.status)
        else:
            self.close_connection = True


@pytest.fixture(params=[0, 503])
def losing(request: pytest.FixtureRequest) -> type[Losing]:
    class Server(Losing):
        status = request.param

    return Server


def s3(url: str) -> Store:
    return open_store("s3://b/r", s3_options(url), backend="fsspec", retry_seconds=0)


@pytest.mark.parametrize("put", PUTS)
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_conditional_upload_is_sent_once(
    monkeypatch: pytest.MonkeyPatch, losing: type[Losing], scheme: str, put: str
) -> None:
    with served(losing) as url:
        if scheme == "s3":
            store = s3(url)
        else:
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
            options = {"token": "anon", "project": "p", "endpoint_url": url}
            store = open_store("gs://b/r", options, backend="fsspec", retry_seconds=0)
        with pytest.raises(Unavailable):
            PUTS[put](store)
    assert losing.uploads == 1


def test_botocore_repeats_another_upload(losing: type[Losing]) -> None:
    with served(losing) as url:
        s3(url).put("a", [b"1"])
    assert losing.uploads == 2


@pytest.mark.parametrize("put", PUTS)
def test_an_upload_to_gcs_is_repeated_after_a_token_that_was_not_renewed(
    monkeypatch: pytest.MonkeyPatch, put: str
) -> None:
    """gcsfs gives the same error if the service of tokens fails once."""

    class Expired(Answers):
        uploads = 0

        def do_POST(self) -> None:
            self.received()
            Expired.uploads += 1
            if self.uploads == 1:
                return self.answer(401, b'{"error": {"code": 401, "message": "Invalid Credentials"}}')
            return self.answer(200, b'{"name": "r/a", "generation": "2", "size": "1"}')

    with served(Expired) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        options = {"token": "anon", "project": "p", "endpoint_url": url}
        PUTS[put](open_store("gs://b/r", options, backend="fsspec", retry_seconds=0))
    assert Expired.uploads == 2


def test_botocore_repeats_a_read_with_a_condition() -> None:
    """s3fs reads an input with the condition that it is still the same object."""

    class Busy(Answers):
        reads = 0

        def do_HEAD(self) -> None:
            self.answer_object(200, b"rows")

        def do_GET(self) -> None:
            Busy.reads += 1
            assert self.headers["If-Match"]
            if self.reads == 1:
                return self.answer(503, b"<Error><Code>InternalError</Code></Error>")
            date = "Thu, 01 Jan 2026 00:00:00 GMT"
            return self.answer(206, b"rows", ETag='"1"', Last_Modified=date, Content_Range="bytes 0-3/4")

    with served(Busy) as url, CheckedS3(**s3_options(url), skip_instance_cache=True).open("b/r/a") as file:
        assert file.read() == b"rows"
    assert Busy.reads == 2
