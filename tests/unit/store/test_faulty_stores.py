"""The faulty stores: without a fault they behave like any store, and each applies its fault to a matching call."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from hsx_dist.errors import AlreadyExists, Denied, NotFound, Unavailable
from hsx_dist.store import Store
from hsx_dist.store.local import LocalStore
from hsx_dist.store.retry import RetryPolicy, RetryStore
from hsx_dist.testing.faulty_stores import (
    PUTS,
    CountingStore,
    FailingStore,
    HangingStore,
    LyingStore,
    SlowStore,
    Strike,
    TearingStore,
)
from hsx_dist.testing.store_suite import StoreSuite
from hsx_dist.testing.stores import MemoryStore


class TestWrappedByAllThatDoNotStrike(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        never = Strike(times=0)
        store: Store = HangingStore(SlowStore(LocalStore(tmp_path), 60.0, never), never)
        store = FailingStore(store, Denied("no"), never)
        return CountingStore(TearingStore(LyingStore(store, never), 1, never))


def retrying(store: Store) -> RetryStore:
    return RetryStore(store, RetryPolicy(seconds=5.0, first_pause=0.001))


def test_a_strike_affects_only_the_named_calls() -> None:
    strike = Strike(PUTS, prefix="data/", after=1, times=2)
    calls = [("put", "data/a"), ("get", "data/a"), ("put", "x"), *[("put_if_absent", "data/b")] * 4]
    assert [strike.meets(verb, name) for verb, name in calls] == [False, False, False, True, True, False, False]


def test_calls_and_bytes_are_counted_also_of_what_fails() -> None:
    store = CountingStore(FailingStore(MemoryStore(), Unavailable("503"), Strike(times=2)))
    retrying(store).put("a", [b"xyz", b"12"])
    assert store.calls == {"put": 3}
    assert store.bytes_put == 15


def test_a_failing_store_fails_before_or_after_the_call() -> None:
    inner = MemoryStore()
    with pytest.raises(Denied):
        FailingStore(inner, Denied("no")).put("a", [b"1"])
    assert inner.objects == {}
    lost = FailingStore(inner, Unavailable("the answer was lost"), Strike(times=1), done=True)
    retrying(lost).put_if_absent("a", b"1")  # the repetition finds its own object
    assert inner.objects == {"a": b"1"}
    with pytest.raises(AlreadyExists):
        retrying(lost).put_if_absent("a", b"2")


def test_hanging_calls_continue_after_a_release() -> None:
    inner = MemoryStore()
    store = HangingStore(inner, Strike({"put"}))
    thread = threading.Thread(target=store.put, args=("a", [b"1"]))
    thread.start()
    assert store.hanging.wait(30)
    assert inner.objects == {}
    store.release()
    thread.join(30)
    assert store.get("a") == b"1"


def test_a_slow_store_takes_its_time_for_every_byte() -> None:
    store = SlowStore(MemoryStore(), 0.01, bytes_per_second=1000)
    begin = time.monotonic()
    store.put("a", [bytes(40)])
    assert time.monotonic() - begin >= 0.05


def test_a_lying_store_reports_success_without_storing_or_deleting() -> None:
    store = LyingStore(MemoryStore(), Strike({"put", "delete"}))
    store.put("a", [b"1"])
    with pytest.raises(NotFound):
        store.get("a")
    store.put_if_absent("b", b"2")
    store.delete("b")
    assert store.get("b") == b"2"


@pytest.mark.parametrize("silent", [False, True])
def test_a_torn_upload_leaves_its_beginning(silent: bool) -> None:
    store = TearingStore(MemoryStore(), 3, Strike(times=1), silent=silent)
    if silent:
        store.put("a", [b"12", b"3456"])
    else:
        with pytest.raises(Unavailable, match="broke after 3 bytes"):
            store.put("a", [b"12", b"3456"])
    assert store.get("a") == b"123"
    store.put("a", [b"12", b"3456"])
    assert store.get("a") == b"123456"
