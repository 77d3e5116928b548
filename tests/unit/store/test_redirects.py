"""An HTTP server redirects reads to another server, which gets no secrets, or out of a prefix, which is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import aiohttp
import pytest

from hsx_dist.config import InputConfig
from hsx_dist.errors import ConfigError, StoreError, Unavailable
from hsx_dist.inputs.rows import read_rows
from hsx_dist.store import Store, open_store
from hsx_dist.store.within import open_within
from tests.harness.http_server import Answers, s3_options, served

DATA = b'{"prompt": "a"}\n'
HEADERS = {"headers": {"X-Token": "abc"}}
READS: list[Callable[[Store], object]] = [
    lambda store: store.get("a.jsonl"),
    lambda store: store.get("a.jsonl", 100),
    lambda store: bytes(store.get_ranges("a.jsonl", [(0, len(DATA))])[0]),
    lambda store: bytes(store.get_ranges("a.jsonl", [(0, 1), (len(DATA) << 20, (len(DATA) << 20) + 1)])[0]),
    lambda store: store.head("a.jsonl").size,
]


class Target(Answers):
    """A server with every object. It keeps the headers of requests."""

    asked: ClassVar[list[dict[str, str]]]

    def do_GET(self) -> None:
        self.received()
        self.asked.append({name.lower(): value for name, value in self.headers.items()})
        self.answer(200, DATA)

    do_HEAD = do_PUT = do_GET


@contextmanager
def redirected(status: int = 302, *, to: str = "{other}/hidden/a.jsonl") -> Iterator[tuple[str, type[Target]]]:
    """Serve a server that redirects requests below ``/run/``, and another server. Yields ``/run`` and the other."""

    class Other(Target):
        asked: ClassVar[list[dict[str, str]]] = []

    class First(Target):
        asked: ClassVar[list[dict[str, str]]] = []

        def do_GET(self) -> None:
            if not self.path.startswith("/run/"):
                super().do_GET()
                return
            self.received()
            headers = {"Location": to.format(other=other)} if to else {}
            self.answer(status, b"moved", **headers)

        do_HEAD = do_PUT = do_GET

    with served(Other) as other, served(First) as first:
        yield f"{first}/run", Other


@pytest.mark.parametrize("options", [None, {"client_kwargs": {"headers": {"Authorization": "Bearer abc"}}}])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_read_is_redirected_to_another_server_without_the_credentials(
    status: int, options: dict[str, Any] | None
) -> None:
    with redirected(status) as (url, other):
        store = open_store(url, options, retry_seconds=0)
        assert store.get("a.jsonl") == DATA
        assert store.head("a.jsonl").size == len(DATA)
        assert other.asked
        assert not any("authorization" in headers for headers in other.asked)


@pytest.mark.parametrize(
    "options",
    [
        {"client_kwargs": HEADERS},
        HEADERS,
        {"client_kwargs": {"cookies": {"session": "abc"}}},
        {"client_kwargs": {"auth": aiohttp.BasicAuth("user", "abc")}},
    ],
)
@pytest.mark.parametrize("read", READS)
def test_headers_of_the_options_reach_no_other_server(options: dict[str, Any], read: Callable[[Store], object]) -> None:
    with redirected() as (url, other):
        with pytest.raises(StoreError, match="got a redirect") as found:
            read(open_store(url, options, retry_seconds=0))
        assert type(found.value) is StoreError
        assert not other.asked


def test_a_request_with_headers_is_redirected_within_its_server() -> None:
    with redirected(to="/moved/a.jsonl") as (url, _):
        store = open_store(url, {"client_kwargs": HEADERS}, retry_seconds=0)
        assert store.get("a.jsonl") == DATA
        assert store.head("a.jsonl").size == len(DATA)


@pytest.mark.parametrize("to", ["{other}/hidden/a.jsonl", "/hidden/a.jsonl"])
@pytest.mark.parametrize("read", READS)
def test_a_confined_read_is_redirected_nowhere(to: str, read: Callable[[Store], object]) -> None:
    with redirected(to=to) as (url, other):
        store, name = open_within(url, f"{url}/a.jsonl")
        assert name == "a.jsonl"
        with pytest.raises(StoreError, match="got a redirect") as found:
            read(store)
        assert type(found.value) is StoreError
        assert not other.asked


@pytest.mark.parametrize("read", READS)
def test_a_redirect_without_a_place_is_no_object(read: Callable[[Store], object]) -> None:
    with redirected(to="") as (url, _), pytest.raises(StoreError, match="got a redirect"):
        read(open_store(url, retry_seconds=0))


@pytest.mark.parametrize("to", ["{other}/hidden/a.jsonl", "/moved/a.jsonl"])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_an_upload_is_redirected_nowhere(status: int, to: str) -> None:
    """After a 303, aiohttp sends a GET: its answer looks as if the object was stored."""
    with redirected(status, to=to) as (url, other):
        with pytest.raises(StoreError, match="got a redirect"):
            open_store(url, retry_seconds=0).put("a.jsonl", [b"1"])
        assert not other.asked


def test_s3fs_is_redirected_only_to_a_buckets_region() -> None:
    """aiohttp would remove only ``Authorization``: no session's token, and no customer's key for encryption."""
    said: dict[str, str] = {}
    calls: list[Callable[[Store], object]] = [
        lambda store: store.get("a"),
        lambda store: store.head("a"),
        lambda store: list(store.list()),
        lambda store: store.put("a", [b"1"]),
        lambda store: store.delete("a"),
    ]

    class Other(Target):
        asked: ClassVar[list[dict[str, str]]] = []

    class First(Answers):
        def do_GET(self) -> None:
            self.received()
            if "/eu-north-1/" in self.headers["Authorization"]:
                return self.answer_object(200, DATA)
            return self.answer(statuses[0], Location=f"{other}/b/r/a", **said)

        do_HEAD = do_PUT = do_DELETE = do_GET

    once = {"config_kwargs": {"retries": {"total_max_attempts": 1}}}
    statuses = [301, 302, 303, 307, 308]
    with served(Other) as other, served(First) as first:
        store = open_store("s3://b/r", s3_options(first) | once, backend="fsspec", retry_seconds=0)
        for call in calls:
            with pytest.raises(Unavailable, match="got a redirect"):
                call(store)
            statuses.append(statuses.pop(0))
        said["x_amz_bucket_region"] = "eu-north-1"
        statuses[0] = 307
        assert store.get("a") == DATA
        assert not Other.asked


def test_headers_of_an_input_reach_no_other_server() -> None:
    with redirected() as (url, other):
        with pytest.raises(ConfigError, match="got a redirect"):
            list(read_rows(InputConfig(path=f"{url}/a.jsonl", storage_options={"client_kwargs": HEADERS})))
        assert not other.asked


def test_a_version_of_aiobotocore_that_follows_redirects_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class OldConfig:
        def __init__(self, connector_args: object = None) -> None: ...

    monkeypatch.setattr("aiobotocore.config.AioConfig", OldConfig)
    monkeypatch.delitem(sys.modules, "hsx_dist.store.s3_answers")
    with pytest.raises(ConfigError, match=r"expected aiobotocore 2\.13\.3 or newer.*\[s3\]"):
        open_store("s3://bucket/run", s3_options("http://127.0.0.1:1"), backend="fsspec")
    options = s3_options("http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"aiobotocore 2\.13\.3 or newer is missing\)\. Install the extra s3"):
        list(read_rows(InputConfig(path="s3://bucket/rows.jsonl", storage_options=options)))
