"""Failure markers: of one name the latest wins, conflicts stay, and only threads that store ever wait."""

from __future__ import annotations

import json
import threading
import time

import pytest

from hsx_dist.connector import markers as module
from hsx_dist.connector.markers import Markers
from hsx_dist.errors import Denied
from hsx_dist.testing.faulty_stores import PUTS, FailingStore, HangingStore, Strike
from hsx_dist.testing.stores import MemoryStore


def settle(markers: Markers) -> None:
    end = time.monotonic() + 30
    while markers.pending:
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def hanging(store):
    """Markers on a store whose first put hangs, while that of ``a`` is under way."""
    slow = HangingStore(store, Strike(PUTS, times=1))
    markers = Markers(slow)
    markers.fail("a", "a.safetensors", "first")
    assert slow.hanging.wait(30)
    yield markers, slow
    slow.release()
    markers.close()


@pytest.mark.parametrize("conflict", [False, True])
def test_the_latest_wins_but_for_a_conflict(store, hanging, conflict):
    markers, slow = hanging
    told: list[int] = []
    (markers.conflict if conflict else markers.fail)("a", "a.safetensors", "second", then=lambda: told.append(1))
    markers.clear("a", "a.safetensors", then=lambda: told.append(2))
    assert markers.pending == 1
    assert told == []
    slow.release()
    settle(markers)
    assert told == [1, 2]  # whoever waits for what was told hears of it, also of what was overtaken
    if conflict:
        markers.fail("a", "a.safetensors", "third")
        markers.clear("a", "a.safetensors")
        settle(markers)
        (name,) = store.objects
        assert name == "a.safetensors.conflict.json"
        assert json.loads(store.objects[name]) == {"key": "a", "error": "second", "conflict": True}
    else:
        assert store.objects == {}


def test_a_conflict_marker_of_an_earlier_version_stays(store):
    store.put("a.error.json", [b'{"key": "a", "error": "twice", "conflict": true}'])
    markers = Markers(store)
    markers.fail("a", "a.safetensors", "aborted", requests=["1"])
    markers.clear("a", "a.safetensors")
    settle(markers)
    assert store.objects == {"a.error.json": b'{"key": "a", "error": "twice", "conflict": true}'}


def test_a_thread_that_stores_waits_where_many_names_wait_and_a_step_does_not(hanging, monkeypatch):
    markers, slow = hanging
    monkeypatch.setattr(module, "_MANY", 1)
    markers.clear("b", "b.safetensors")  # as a step does
    patient = threading.Thread(target=markers.clear, args=("c", "c.safetensors"), kwargs={"patient": True})
    patient.start()
    patient.join(0.2)
    assert patient.is_alive()
    slow.release()
    patient.join(30)
    assert not patient.is_alive()


def test_more_than_can_wait_is_dropped_and_its_lock_opened(hanging, monkeypatch, caplog):
    markers, _ = hanging
    monkeypatch.setattr(module, "_MOST_WAITING", 0)
    told: list[int] = []
    markers.fail("b", "b.safetensors", "why", then=lambda: told.append(1))
    assert told == [1]
    assert "b.safetensors" in caplog.text


def test_a_lock_stays_until_the_store_takes_the_marker(store, caplog, monkeypatch):
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    markers = Markers(FailingStore(store, Denied("not allowed"), Strike(PUTS, times=3)))
    told: list[dict[str, bytes]] = []
    markers.conflict("a", "a.safetensors", "why", then=lambda: told.append(dict(store.objects)))
    end = time.monotonic() + 30
    while not told:
        assert time.monotonic() < end
        time.sleep(0.002)
    assert list(told[0]) == ["a.safetensors.conflict.json"]
    assert "not allowed" in caplog.text
    settle(markers)
    assert markers.close() == []


def test_a_store_that_refuses_markers_keeps_few_locks_and_stops_no_end(store, caplog, monkeypatch):
    monkeypatch.setattr(module, "_MOST_KEPT", 1)
    monkeypatch.setattr(module, "_AGAIN_S", 3600)
    markers = Markers(FailingStore(store, Denied("not allowed"), Strike(PUTS)))
    told: list[str] = []
    for key in "ab":
        markers.fail(key, f"{key}.safetensors", "why", then=lambda key=key: told.append(key))
        settle(markers)
    assert told == ["b"]
    markers.clear("a", "a.safetensors", then=lambda: told.append("again"))  # of a later request, which is stored
    settle(markers)
    assert told == ["b", "a", "again"]
    assert "not allowed" in caplog.text
    assert markers.close() == []
