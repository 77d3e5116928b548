"""Failure markers: the latest of a name wins, conflicts stay, and no caller waits for the store."""

from __future__ import annotations

import json
import threading
import time
from itertools import permutations

import numpy as np
import pytest

from hsx_dist.connector import failure_markers as module
from hsx_dist.connector.failure_markers import Markers
from hsx_dist.errors import Denied, FormatError
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.format.container import SegmentEncoder, build_part
from hsx_dist.format.identity import IDENTITY
from hsx_dist.format.json_objects import MAX_JSON_BYTES
from hsx_dist.format.markers import marker_name
from hsx_dist.page import Page, Segment
from hsx_dist.testing.faulty_stores import PUTS, CountingStore, FailingStore, HangingStore, Strike
from hsx_dist.testing.stores import MemoryStore


def put_of(store: MemoryStore, key: str, request: str) -> None:
    """The object of a request with this hash."""
    segment = Segment(key, 0, 0, 1, 1, meta={IDENTITY: {"request": request, "tokens": ""}})
    codec = resolve_codec("none")
    encoder = SegmentEncoder(codec, alone=True)
    data = np.ones((1, 1, 8), np.uint32)
    encoder.add(Page(segment, 0, 1, 1, (1,), "float32", data.shape, "LTH", np.zeros(1, np.int64), data))
    store.put(f"{key}.safetensors", build_part([encoder.finish()], codec, {}).buffers)


def settle(markers: Markers) -> None:
    end = time.monotonic() + 30
    while markers.pending:
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.fixture
def store():
    return MemoryStore()


class ReleaseRecorder:
    """Replaces the locks, and records the requests that released theirs, in order."""

    def __init__(self):
        self.shares: dict[str, set[str]] = {}
        self.released: list[str] = []

    def pass_on(self, holder: str, to: str) -> None:
        self.shares.setdefault(to, {to}).update(self.shares.pop(holder, {holder}))

    def release(self, holder: str, *, stored: bool) -> None:  # noqa: ARG002
        self.released += sorted(self.shares.pop(holder, {holder}))


@pytest.fixture
def locks():
    return ReleaseRecorder()


@pytest.fixture
def hanging(store, locks):
    """Markers on a store whose first put hangs. The put of ``a``'s marker is under way."""
    slow = HangingStore(store, Strike(PUTS, times=1))
    markers = Markers(slow, locks=locks)
    markers.fail("a", "a.safetensors", "first")
    assert slow.hanging.wait(30)
    yield markers, slow
    slow.release()
    markers.close()


def until(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("conflict", [False, True])
def test_a_later_success_replaces_a_failure_but_not_a_conflict(store, hanging, locks, conflict):
    markers, slow = hanging
    (markers.conflict if conflict else markers.fail)("a", "a.safetensors", "second", holder="1")
    markers.stored("a", "a.safetensors", holder="2")
    assert markers.pending == 1
    assert locks.released == []
    slow.release()
    settle(markers)
    assert locks.released == ["1", "2"]  # also the lock of the replaced marker
    if conflict:
        markers.fail("a", "a.safetensors", "third")
        markers.clear("a.safetensors")
        settle(markers)
        (name,) = store.objects
        assert name == "a.safetensors.conflict.json"
        assert json.loads(store.objects[name]) == {"key": "a", "error": "second", "conflict": True}
    else:
        assert store.objects == {}


def test_markers_of_one_name_wait_as_one_entry(store, hanging, locks):
    markers, slow = hanging
    sizes = set()
    for i in range(500):
        markers.fail("a", "a.safetensors", "aborted", requests=[f"{i:032x}"], holder=f"{i:03}")
        sizes.add(markers._bytes)
    assert len(sizes) == 2  # with one hash, and with two
    assert list(locks.shares) == ["000"]
    counting = CountingStore(store)
    markers._store = counting
    put_of(store, "a", request="f" * 32)
    slow.release()
    settle(markers)
    assert counting.calls["put"] == 2  # the failure and the conflict marker
    assert sorted(store.objects) == ["a.safetensors", "a.safetensors.conflict.json"]
    assert locks.released == [f"{i:03}" for i in range(500)]
    assert (markers._names, markers._bytes) == ({}, 0)


@pytest.mark.parametrize("order", permutations(["same", "1", "2"]))
def test_a_failed_request_of_another_sample_among_several_is_a_conflict(store, hanging, order):
    """The hashes of any two requests are enough."""
    markers, slow = hanging
    put_of(store, "a", request="same")
    for request in order:
        markers.fail("a", "a.safetensors", "aborted", requests=[request])
    slow.release()
    settle(markers)
    assert sorted(store.objects) == ["a.safetensors", "a.safetensors.conflict.json"]


def test_a_request_that_fails_while_a_marker_of_its_name_is_written_leaves_no_lock(store, locks):
    """Its lock is passed on to a request that has already released its own."""
    slow = HangingStore(store, Strike(PUTS, times=1))
    markers = Markers(slow, locks=locks)
    markers.fail("a", "a.safetensors", "first", holder="1")
    assert slow.hanging.wait(30)
    pass_on = locks.pass_on

    def late(holder: str, to: str) -> None:
        slow.release()
        until(lambda: "1" in locks.released)
        pass_on(holder, to)

    locks.pass_on = late
    markers.fail("a", "a.safetensors", "second", holder="2")
    assert locks.released[0] == "1"
    assert "2" in locks.released
    assert locks.shares == {}
    settle(markers)


def test_a_conflict_marker_of_an_earlier_version_stays(store):
    store.put("a.error.json", [b'{"key": "a", "error": "twice", "conflict": true}'])
    markers = Markers(store)
    markers.fail("a", "a.safetensors", "aborted", requests=["1"])
    markers.clear("a.safetensors")
    settle(markers)
    assert store.objects == {"a.error.json": b'{"key": "a", "error": "twice", "conflict": true}'}


@pytest.mark.parametrize("left", [b"x" * (MAX_JSON_BYTES + 1), b"\xff{", b"[" * 100_000], ids=["large", "text", "deep"])
def test_an_object_in_place_of_a_failure_marker_is_replaced_and_removed(store, monkeypatch, left):
    monkeypatch.setattr(module, "_AGAIN_S", 0.001)
    markers = Markers(store)
    for name in ("a.safetensors", "b:c/x.bin"):
        store.put(marker_name(name), [left])
        markers.fail("a", name, "aborted")
        until(lambda name=name: store.objects[marker_name(name)] != left)
        assert json.loads(store.objects[marker_name(name)])["error"] == "aborted"
        settle(markers)
        store.put(marker_name(name), [left])
        markers.stored("a", name)
        until(lambda: not store.objects)
        settle(markers)
    markers.close()


def test_quota_of_stored_samples_is_released_when_their_marker_is_removed(store):
    hanging = HangingStore(store, Strike({"get"}, times=1))
    markers = Markers(hanging)
    given: list[int] = []
    markers.stored("a", "a.safetensors", after=lambda: given.append(1))
    assert hanging.hanging.wait(30)
    assert given == []
    markers.stored("a", "a.safetensors", after=lambda: given.append(2))  # the name is already queued
    assert given == [2]
    hanging.release()
    settle(markers)
    assert given == [2, 1]


def test_requests_that_fail_delay_no_stored_sample(store):
    slow = HangingStore(store, Strike(PUTS))
    markers = Markers(slow)
    for i in range(300):
        markers.fail(f"k{i}", f"k{i}.safetensors", "aborted")
    assert slow.hanging.wait(30)
    given: list[str] = []
    for i in range(300):
        markers.stored(f"s{i}", f"s{i}.safetensors", after=lambda: given.append(""))
    until(lambda: len(given) == 300)
    slow.release()
    settle(markers)


def test_markers_beyond_the_limit_are_dropped_and_their_locks_released(store, locks, monkeypatch, caplog):
    monkeypatch.setattr(module, "_MOST_BYTES", 16_000)
    slow = HangingStore(store, Strike(PUTS))
    markers = Markers(slow, locks=locks)
    for i in range(20):  # of 2.8 KB: five wait, and each thread has one or has not taken it yet
        markers.fail("\U000e0001" * 1024, f"k{i}.safetensors", "why", holder=f"k{i}")
    assert markers._bytes < 12_000 + 2_800
    assert 11 <= len(locks.released) <= 15
    assert all(f"{key}.safetensors" in caplog.text for key in locks.released)
    failed = len(locks.released)
    markers.conflict("d", "d.safetensors", "used before", holder="d")  # conflicts have a separate limit
    assert len(locks.released) == failed
    store.put("c.error.json", [b'{"key": "c", "error": "before"}'])
    markers.stored("c", "c.safetensors", holder="c")  # not dropped: the marker hides its object
    slow.release()
    settle(markers)
    assert {"c", "d"} <= set(locks.released)
    assert "c.error.json" not in store.objects
    assert json.loads(store.objects["d.safetensors.conflict.json"])["conflict"]
    assert markers._bytes == 0


def test_a_stored_sample_whose_name_waits_overtakes_requests_that_failed(store, locks):
    slow = HangingStore(store, Strike(PUTS))
    markers = Markers(slow, locks=locks)
    for i in range(50):
        markers.fail(f"k{i}", f"k{i}.safetensors", "aborted", holder=f"k{i}")
    assert slow.hanging.wait(30)
    markers.clear("k49.safetensors")
    markers.stored("k49", "k49.safetensors", holder="again")
    until(lambda: {"again", "k49"} <= set(locks.released))  # a thread may release a lock that another has released
    assert set(locks.released) == {"again", "k49"}  # of both requests of the name
    slow.release()
    settle(markers)
    assert set(locks.released) == {*(f"k{i}" for i in range(50)), "again"}
    assert "k49.error.json" not in store.objects


@pytest.mark.parametrize("refused", ["put", "get", "get_ranges", "head"])
def test_a_conflict_that_is_found_after_a_sample_was_stored_is_tried_again(store, locks, monkeypatch, refused):
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    put_of(store, "k", "theirs")
    markers = Markers(FailingStore(store, Denied("not now"), Strike({refused}, times=1)), locks=locks)
    markers.stored("k", "k.safetensors", requests=["ours"], holder="1")
    until(lambda: locks.released)
    assert json.loads(store.objects["k.safetensors.conflict.json"])["conflict"]
    markers.close()


@pytest.mark.parametrize("stored", [False, True])
def test_an_object_that_was_damaged_on_the_way_is_read_again(store, locks, monkeypatch, stored):
    """The reader of the failed request must not find the other request's object."""
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    put_of(store, "k", "theirs")
    damaging = FailingStore(store, FormatError("damaged"), Strike({"get_ranges"}, times=4))
    markers = Markers(damaging, locks=locks)
    if stored:
        markers.stored("k", "k.safetensors", requests=["ours"], holder="1")
    else:
        markers.fail("k", "k.safetensors", "aborted", requests=["ours"], holder="1")
    until(lambda: locks.released)
    assert set(store.objects) == {"k.safetensors", "k.safetensors.conflict.json"}
    markers.close()


def test_an_object_that_is_damaged_is_hidden_by_a_failure(store, locks, monkeypatch):
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    store.put("k.safetensors", [b"of another program"])
    markers = Markers(store, locks=locks)
    markers.fail("k", "k.safetensors", "aborted", requests=["ours"], holder="1")
    until(lambda: locks.released)
    assert json.loads(store.objects["k.error.json"]) == {"key": "k", "error": "aborted"}
    markers.close()


@pytest.mark.parametrize(("pages", "left"), [(1, True), (99, False)])
def test_a_page_in_place_of_an_earlier_conflict_marker_is_read_again(store, locks, monkeypatch, pages, left):
    """If each answer is a page, the marker is replaced in the end."""
    monkeypatch.setattr(module, "_AGAIN_S", 0.001)
    store.put("k.error.json", [b'{"key": "k", "error": "used before", "conflict": true}'])
    answers, get = ["<html>"] * pages, store.get
    monkeypatch.setattr(store, "get", lambda *args: answers.pop().encode() if answers else get(*args))
    markers = Markers(store, locks=locks)
    markers.stored("k", "k.safetensors", holder="1")
    until(lambda: locks.released)
    assert ("k.error.json" in store.objects) == left
    markers.close()


@pytest.mark.parametrize("refused", ["delete", "get"])
def test_the_removal_of_a_paths_marker_is_tried_again(store, locks, monkeypatch, refused):
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    store.put("p.bin.failed.json", [b'{"key": "p", "error": "aborted"}'])
    markers = Markers(FailingStore(store, Denied("not now"), Strike({refused}, times=2)), locks=locks)
    markers.stored("p", "p.bin", holder="1")
    until(lambda: locks.released)
    assert store.objects == {}
    markers.close()


def test_paths_that_the_store_refuses_do_not_displace_keys(store, locks, monkeypatch):
    """The store refuses each path once."""
    monkeypatch.setattr(module, "_MOST_KEPT", 3)
    monkeypatch.setattr(module, "_AGAIN_S", 3600)
    markers = Markers(FailingStore(store, Denied("not allowed"), Strike(PUTS)), locks=locks)
    markers.conflict("k", "k.safetensors", "used before", holder="k")
    settle(markers)
    for i in range(9):
        markers.fail("a", f"a/{i}", "why", holder=f"{i}")
        settle(markers)
    assert "k.safetensors" in markers._kept
    assert locks.released == ["2", "3", "4", "5", "6", "7", "8"]
    markers.close()


def test_a_lock_stays_until_the_store_takes_the_marker(store, locks, caplog, monkeypatch):
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    markers = Markers(FailingStore(store, Denied("not allowed"), Strike(PUTS, times=3)), locks=locks)
    markers.conflict("a", "a.safetensors", "why", holder="1")
    until(lambda: locks.released)
    assert list(store.objects) == ["a.safetensors.conflict.json"]
    assert caplog.text.count("not allowed") == 1
    settle(markers)
    assert markers.close() == []


def test_a_store_that_refuses_markers_holds_few_locks_and_does_not_block_the_end(store, locks, caplog, monkeypatch):
    monkeypatch.setattr(module, "_MOST_KEPT", 1)
    monkeypatch.setattr(module, "_AGAIN_S", 3600)
    markers = Markers(FailingStore(store, Denied("not allowed"), Strike(PUTS)), locks=locks)
    for key in "ab":
        markers.fail(key, f"{key}.safetensors", "why", holder=key)
        settle(markers)
    assert locks.released == ["b"]  # the newest
    assert markers._kept["a.safetensors"].due <= time.monotonic()  # the next look stores it again
    markers.stored("a", "a.safetensors", holder="again")
    settle(markers)
    assert locks.released == ["b", "a", "again"]
    assert "not allowed" in caplog.text
    markers.fail("c", "c.safetensors", "why")
    settle(markers)
    assert markers.close() == ["c.safetensors"]  # the name is reported at the end


def test_remembered_names_have_at_most_128_characters(store):
    markers = Markers(store)
    path = "\u20ac" * 1024
    markers.fail(path, path, "why")
    assert [len(name) for name in markers._marked] == [128]
    markers.clear(path)
    assert not markers._marked
    settle(markers)


def test_repeated_requests_that_fail_delay_no_stored_sample(store):
    hanging = HangingStore(store, Strike(PUTS | {"get", "head"}, prefix="f"))
    markers = Markers(hanging)
    for i in range(20):
        markers.fail(f"f{i}", f"f{i}.safetensors", "aborted", requests=["0" * 32])
        markers.clear(f"f{i}.safetensors")
    settled = threading.Event()
    markers.stored("k", "k.safetensors", after=settled.set)
    assert settled.wait(30)
    hanging.release()
    settle(markers)


@pytest.mark.parametrize("reading", [True, False])
def test_a_later_request_of_a_free_key_is_no_conflict_with_a_failed_request(store, reading):
    """The earlier request's change may wait, or read the object, when the later request's object is stored."""
    hanging = HangingStore(store, Strike({"head" if reading else "get"}, prefix="k.", times=1))
    markers = Markers(hanging)
    markers.fail("k", "k.safetensors", "aborted", requests=["0" * 32])
    assert hanging.hanging.wait(30)
    markers.clear("k.safetensors")
    put_of(store, "k", "1" * 32)
    markers.fail("k", "k.safetensors", "aborted", requests=["1" * 32])
    hanging.release()
    settle(markers)
    assert [info.name for info in store.list()] == ["k.safetensors"]


def test_names_that_the_store_refuses_do_not_release_locks_of_other_names(store, locks, monkeypatch):
    """For example a path below an object. A marker that was refused once is stored on its second try."""
    monkeypatch.setattr(module, "_MOST_KEPT", 3)
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    refusing = FailingStore(store, Denied("not allowed"), Strike(PUTS, prefix="a/"))
    markers = Markers(refusing, locks=locks)
    for i in range(3):
        markers.fail("a", f"a/{i}", "why", holder=f"{i}")
    until(lambda: min((entry.refused for entry in list(markers._names.values())), default=0) > 1)
    markers._store = FailingStore(refusing, Denied("disk full"), Strike(PUTS, prefix="k.", times=1))
    markers.conflict("k", "k.safetensors", "used before", holder="k")
    until(lambda: "k" in locks.released)
    assert list(store.objects) == ["k.safetensors.conflict.json"]
    markers.close()


def test_a_second_marker_of_a_name_that_waits_about_doubles_its_bytes(store):
    markers = Markers(store)
    act = module._Act({"c": markers._body("\U000e0001" * 1024, "why")}, {}, looks=False)
    failed = module._failed("\U000e0001" * 1024, "k.safetensors", ["1", "2"])
    later = module._Act({"f": markers._body("\U000e0001" * 1024, "why", until_stored=True)}, failed, looks=False)
    assert act.and_then(later).nbytes <= 2.1 * act.nbytes
