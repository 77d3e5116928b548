from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from gcsfs.retry import HttpError

from hsx_dist.errors import NotFound, StoreError, Unavailable
from hsx_dist.format import runs
from hsx_dist.reading.expiry import require_conditional_deletes
from hsx_dist.store import Store, open_store
from hsx_dist.store.fsspec import FsspecStore
from hsx_dist.testing.store_suite import StoreSuite
from tests.harness.servers import GcsServer, fake_gcs

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    with fake_gcs(tmp_path_factory.mktemp("gcs")) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.env.items():
            patch.setenv(name, value)
        yield server


def _store(gcs: GcsServer, url: str, **changes: Any) -> Store:
    return open_store(url, {**gcs.storage_options, **changes}, retry_seconds=0)


class TestGcs(StoreSuite):
    has_conditional_puts = False  # this emulator ignores the condition, and the probe detects that

    @pytest.fixture
    def store(self, gcs: GcsServer) -> Store:
        return _store(gcs, f"{gcs.url}/{uuid.uuid4().hex}/run")

    def test_a_conditional_delete_keeps_a_newer_version(self, store: Store) -> None:
        """This emulator ignores the condition. The probe detects that before anything is deleted."""
        with pytest.raises(StoreError, match="expected a store with conditional deletes"):
            require_conditional_deletes(store)
        assert list(store.list()) == []


def test_the_condition_of_a_delete_and_a_put(gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the emulator answer like the service: 412 for another generation, as GCS documents it."""
    store = FsspecStore(f"{gcs.url}/{uuid.uuid4().hex}", gcs.storage_options)
    call = store._fs.call
    asked: list[str] = []

    def service(method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        if method == "GET":
            return call(method, path, *args, **kwargs)
        asked.append(kwargs["ifGenerationMatch"])
        if kwargs["ifGenerationMatch"] != store.version("a"):
            raise HttpError({"code": 412, "message": "At least one of the pre-conditions you specified did not hold."})
        return call(method, path, *args, **kwargs)

    monkeypatch.setattr(store._fs, "call", service)
    store.put("a", [b"old"])
    old = store.version("a")
    store.put("a", [b"new"])
    assert not store.delete_version("a", old)
    assert store.get("a") == b"new"
    assert not store.put_version("a", [b"x"], old)
    assert store.put_version("a", [b"new", b"er"], store.version("a"))
    assert store.get("a") == b"newer"
    assert store.delete_version("a", store.version("a"))
    assert list(store.list()) == []
    assert asked[:2] == [old, old]
    assert old not in asked[2:]


def test_missing_bucket(gcs: GcsServer) -> None:
    store = _store(gcs, "gs://no-such-bucket/run")
    for call in (lambda: store.put("a", [b"1"]), lambda: store.get("a"), lambda: store.head("a")):
        with pytest.raises(NotFound):
            call()


def test_unreachable_endpoint(gcs: GcsServer) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{s.getsockname()[1]}"
        store = FsspecStore(f"{gcs.url}/x", {**gcs.storage_options, "endpoint_url": endpoint}, patience=3)
        with pytest.raises(Unavailable, match="Check the endpoint's address"):
            store.put("a", [b"1"])


def test_attempts(gcs: GcsServer) -> None:
    store = _store(gcs, f"{gcs.url}/{uuid.uuid4().hex}")
    assert [runs.take_attempt(store, {}) for _ in range(3)] == [1, 2, 3]
    assert runs.newest_attempt(store) == 3
    assert [runs.is_fenced(store, a) for a in (1, 2, 3)] == [True, True, False]
