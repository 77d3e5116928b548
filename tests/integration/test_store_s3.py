from __future__ import annotations

import socket
import threading
import tracemalloc
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsx_dist.errors import Denied, NotFound, Unavailable
from hsx_dist.format import runs
from hsx_dist.reading.expiry import remove, require_conditional_deletes
from hsx_dist.store import Store, open_store
from hsx_dist.store.base import Conditional
from hsx_dist.store.fsspec import FsspecStore
from hsx_dist.store.obstore import ObstoreStore
from hsx_dist.store.opening import Backend
from hsx_dist.testing.store_suite import StoreSuite
from tests.harness.http_server import Answers, served
from tests.harness.servers import S3Server, seaweedfs
from tests.harness.traced_memory import trace_memory
from tests.integration.relay import Strike, relay

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with seaweedfs(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture
def url(s3: S3Server) -> str:
    return f"{s3.url}/{uuid.uuid4().hex}/run"


_backend: Backend = "auto"


@pytest.fixture(autouse=True, params=["fsspec", "obstore"])
def _with_both(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test runs with both back ends: the same calls, the same errors."""
    global _backend
    _backend = request.param
    yield
    _backend = "auto"


def _store(s3: S3Server, url: str, seconds: float = 0, **changes: Any) -> Store:
    return open_store(url, {**s3.storage_options, **changes}, backend=_backend, retry_seconds=seconds)


def _impatient(s3: S3Server, url: str, **changes: Any) -> Store:
    made = {"fsspec": FsspecStore, "obstore": ObstoreStore}[_backend]
    return made(url, {**s3.storage_options, **changes}, patience=2)


class TestS3(StoreSuite):
    racers = 3  # SeaweedFS takes about two seconds for each contender

    @pytest.fixture
    def store(self, s3: S3Server, url: str) -> Store:
        return _store(s3, url)


def test_gc_keeps_a_newer_version_of_an_expired_object(s3: S3Server, url: str) -> None:
    store = _store(s3, url)
    require_conditional_deletes(store)
    assert list(store.list()) == []
    store.put("a.error.json", [b'{"key": "a", "error": "x", "expires": 1000}'])
    assert isinstance(store, Conditional)
    before = store.version("a.error.json")
    store.put("a.error.json", [b'{"key": "a", "error": "x", "expires": 4000000000}'])
    assert not store.delete_version("a.error.json", before)
    assert not remove(store, "a.error.json")
    store.put("a.error.json", [b'{"key": "a", "error": "x", "expires": 1000}'])
    assert remove(store, "a.error.json")
    assert list(store.list()) == []


def test_credentials_from_the_environment(s3: S3Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    store = open_store(url, backend=_backend)
    store.put("a", [b"1"])
    assert store.get("a") == b"1"


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"secret": "wrong-secret-0123456789"}, "Check the credentials"),
        ({"key": "wrong-key-0123456789", "secret": "wrong-secret-0123456789"}, "Check the credentials"),
    ],
)
def test_wrong_credentials_are_denied_and_not_shown(s3: S3Server, url: str, changes: dict[str, str], hint: str) -> None:
    store = _store(s3, url, 30, **changes)
    for call in (
        lambda: store.put("a", [b"1"]),
        lambda: store.put_if_absent("a", b"1"),
        lambda: store.get("a"),
        lambda: store.get_ranges("a", [(0, 1), (10**7, 10**7 + 1)]),
        lambda: store.head("a"),
        lambda: list(store.list()),
        lambda: store.delete("a"),
    ):
        with pytest.raises(Denied, match=hint) as told:
            call()
        _shows_no_secret(told.value, s3, *changes.values())
        assert url in str(told.value)


def test_read_only_credentials_may_read_and_not_write(s3: S3Server, url: str) -> None:
    _store(s3, url).put("a", [b"1"])
    reader = open_store(url, s3.read_only.storage_options, backend=_backend, retry_seconds=0)
    assert reader.get("a") == b"1"
    assert [o.name for o in reader.list()] == ["a"]
    for call in (
        lambda: reader.put("a", [b"2"]),
        lambda: reader.put("large", [bytes(40 << 20)]),
        lambda: reader.put_if_absent("b", b"2"),
    ):
        with pytest.raises(Denied, match="Check the credentials"):
            call()
    assert reader.get("a") == b"1"


def test_no_credentials_at_all(s3: S3Server, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(Denied, match="Check the credentials"):
        open_store(url, {"endpoint_url": s3.endpoint_url}, backend=_backend, retry_seconds=0).put("a", [b"1"])


def test_missing_bucket_has_its_own_hint(s3: S3Server) -> None:
    store = _store(s3, "s3://no-such-bucket/run", 30)
    for call in (
        lambda: store.put("a", [b"1"]),
        lambda: store.put("large", [bytes(40 << 20)]),
        lambda: store.put_if_absent("a", b"1"),
        lambda: store.get("a"),
        lambda: list(store.list()),
    ):
        with pytest.raises(NotFound, match=r"there is no bucket 'no-such-bucket'\. Make it"):
            call()
    with pytest.raises(NotFound):
        store.head("a")


def test_unreachable_endpoint(s3: S3Server, url: str) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{s.getsockname()[1]}"  # bound, but not listening
        store = _store(s3, url, 0, endpoint_url=endpoint)
        with pytest.raises(Unavailable, match="Check the endpoint's address") as told:
            store.put("a", [b"1"])
        _shows_no_secret(told.value, s3)
        patient = _store(s3, url, 3, endpoint_url=endpoint)
        with pytest.raises(Unavailable, match=r"\(tried \d+ times in \d+ s\)"):
            patient.get("a")


def test_requests_to_a_server_that_never_answers_time_out(s3: S3Server, url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        changes = {"endpoint_url": endpoint, "config_kwargs": {"read_timeout": 1, "retries": {"total_max_attempts": 1}}}
        with pytest.raises(Unavailable, match="Check the endpoint's address"):
            _store(s3, url, 0, **changes).get("a")


def test_a_put_that_the_server_never_accepts_times_out(s3: S3Server, url: str) -> None:
    """The client sends `Expect: 100-continue` and waits. None of its read timeouts covers that."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        store = _impatient(s3, url, endpoint_url=endpoint)
        with pytest.raises(Unavailable, match="Check the endpoint's address"):
            store.put("a", [b"1"])


def test_throttled_requests_are_retried(s3: S3Server, url: str) -> None:
    """A server that answers 503 SlowDown more often than the client alone retries."""
    answers = iter([503] * 7 + [200] * 100)
    with _answering(answers) as endpoint:
        store = _store(s3, url, 60, endpoint_url=endpoint)
        store.put("a", [b"1"])


def test_expired_credentials_are_read_again(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    for name, value in {"ACCESS_KEY_ID": "first-key", "SECRET_ACCESS_KEY": "s", "SESSION_TOKEN": "t"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with _answering(iter([400, 400, 200])) as endpoint:
        store = open_store(url, {"endpoint_url": endpoint}, backend=_backend, retry_seconds=30)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "second-key")
        store.put("a", [b"1"])
    with _answering(iter([400] * 9)) as endpoint:
        given = {"endpoint_url": endpoint, "key": "the-key", "secret": "the-secret", "token": "the-token"}
        with pytest.raises(Denied, match="ExpiredToken"):
            open_store(url, given, backend=_backend, retry_seconds=30).put("a", [b"1"])


@pytest.mark.traced
def test_large_put_never_joins_the_buffers(s3: S3Server, url: str) -> None:
    page = np.random.default_rng(0).integers(0, 256, 8 << 20, np.uint8)
    store = _store(s3, url)
    store.put("warm", [b"x"])
    trace_memory()
    store.put("large", [page] * 32)
    peak = tracemalloc.get_traced_memory()[1]
    assert store.head("large").size == 32 * page.nbytes
    assert peak < 10 * (16 << 20), f"{peak >> 20} MiB for a put of 256 MiB"
    tail = store.get_ranges("large", [(32 * page.nbytes - 5, 32 * page.nbytes)])[0]
    assert bytes(tail) == page[-5:].tobytes()


def test_a_large_put_whose_last_answer_is_lost(s3: S3Server, url: str) -> None:
    """The libraries complete the upload again, but the server does not know it any more."""
    content = np.random.default_rng(0).integers(0, 256, 40 << 20, np.uint8)
    with relay(s3.endpoint_url) as between:
        store = _store(s3, url, seconds=60, endpoint_url=between.endpoint_url)
        line = f"POST /{url.removeprefix('s3://')}/large?".encode()
        between.strike = Strike(line, "after", lambda: None, at=2)  # the second of two: begin, complete
        store.put("large", [content])
        assert between.strike.struck.is_set()
    assert bytes(_store(s3, url).get("large")) == content.tobytes()


def test_a_long_listing_is_paged(s3: S3Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _store(s3, url)
    names = [f"n/{i:05d}" for i in range(1203)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: store.put(name, [b"x"]), names))
    assert [o.name for o in store.list()] == names
    assert [o.name for o in store.list("n/", "n/00100")] == names[101:]
    # As with AWS, which sorts. On this server names are sorted only within a folder.
    monkeypatch.setattr(FsspecStore, "_sorts", lambda _: True)
    assert [o.name for o in store.list("n/", "n/00100")] == names[101:]


def test_attempts_race(s3: S3Server, url: str) -> None:
    start = threading.Barrier(3)

    def take(i: int) -> int:
        store = _store(s3, url)
        start.wait()
        return runs.take_attempt(store, {"driver": i})

    with ThreadPoolExecutor(3) as pool:
        assert sorted(pool.map(take, range(3))) == [1, 2, 3]
    store = _store(s3, url)
    assert runs.newest_attempt(store) == 3
    assert [runs.is_fenced(store, a) for a in (1, 2, 3)] == [True, True, False]


def _shows_no_secret(error: BaseException, s3: S3Server, *others: str) -> None:
    at: BaseException | None = error
    while at is not None:
        for secret in (s3.secret_key, s3.access_key, *others):
            assert secret not in f"{at} {at!r}"
        at = at.__cause__


def _answering(statuses: Iterator[int]) -> AbstractContextManager[str]:
    """Serve an HTTP server that answers PUTs with the given statuses."""

    class Handler(Answers):
        def do_PUT(self) -> None:
            self.received()
            status = next(statuses)
            code = {200: "", 400: "ExpiredToken", 503: "SlowDown"}[status]
            body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode() if code else b""
            self.answer_object(status, body)

    return served(Handler)
