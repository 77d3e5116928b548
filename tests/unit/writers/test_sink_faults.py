"""The sink on stores that fail, hang, misreport and truncate: readers find exactly the reported samples."""

from __future__ import annotations

import gc
import queue
import threading
import time
import tracemalloc
import weakref
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from hsx_dist.errors import Denied, NotFound, Unavailable
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.format.container import Part, SegmentEncoder
from hsx_dist.format.manifest import Receipt
from hsx_dist.format.runs import load_manifest
from hsx_dist.reading.verify import verify_run
from hsx_dist.store.local import LocalStore
from hsx_dist.store.retry import RetryPolicy, RetryStore
from hsx_dist.testing.faulty_stores import FailingStore, HangingStore, LyingStore, Strike, TearingStore, WrappedStore
from hsx_dist.testing.samples import random_sample
from hsx_dist.writers.events import Lost, Stored
from hsx_dist.writers.sink import PartSink
from hsx_dist.writers.threads import ThreadSender
from tests.harness.traced_memory import trace_memory
from tests.unit.writers.small_samples import check_readable, options, pages


def make(store, keys, **changes):
    """Store a sample of each key, in a separate part each. Returns the events."""
    events = []
    sink = PartSink(store, options(**changes), events.append)
    for key in keys:
        for page in pages(key, 5):
            sink.add(page)
        sink.flush()
    assert sink.held_bytes == 0
    sink.close()
    return events


def test_a_time_out_costs_one_part_and_a_refusal_ends_the_sink(store):
    parts = {"verbs": {"put"}, "prefix": "data/"}
    slow = FailingStore(store, Unavailable("slow"), Strike(**parts, times=1))
    refusing = FailingStore(slow, Denied("no"), Strike(**parts, after=1))
    events = []
    sink = PartSink(refusing, options(), events.append)
    for key in ("a", "b"):
        for page in pages(key, 5):
            sink.add(page)
        sink.flush()
    assert [(e.segments[0].key, e.fatal) for e in events] == [("a", False), ("b", True)]
    assert sink.held_bytes == 0
    with pytest.raises(Denied):
        sink.add(pages("c", 5)[0])
    sink.close()


def test_a_lost_answer_to_a_receipts_put_is_no_conflict(store):
    lost = FailingStore(store, Unavailable("lost"), Strike(prefix="manifest/", times=1), done=True)
    events = make(RetryStore(lost, RetryPolicy(first_pause=0.001)), ["k"])
    assert [type(e) for e in events] == [Receipt]


def test_a_receipt_that_was_stored_though_its_put_failed_keeps_its_number(store):
    lost = FailingStore(store, Unavailable("lost"), Strike({"put_if_absent"}, prefix="manifest/", times=1), done=True)
    events = make(lost, ["a", "b"])
    assert [type(e) for e in events] == [Lost, Receipt]
    assert events[1].seq == 2
    assert set(load_manifest(store).samples) == {"a", "b"}


def test_a_torn_part_is_put_again_and_whole(store):
    torn = TearingStore(store, 100, Strike({"put"}, times=2))
    events = make(RetryStore(torn, RetryPolicy(first_pause=0.001)), ["k"])
    assert [type(e) for e in events] == [Receipt]
    check_readable(store, load_manifest(store), "k", 5)


def test_a_part_that_stays_torn_gets_no_receipt(store):
    (lost,) = make(TearingStore(store, 100, Strike({"put"})), ["k"])
    assert isinstance(lost, Lost)
    assert load_manifest(store).samples == {}


@pytest.mark.parametrize("liar", [LyingStore, lambda s, at: TearingStore(s, 100, at, silent=True)])
def test_verify_finds_a_part_that_the_store_did_not_keep(store, liar):
    receipts = make(liar(store, Strike({"put"}, prefix="data/", after=1, times=1)), ["a", "b", "c"])
    assert [type(e) for e in receipts] == [Receipt] * 3
    report = verify_run(store)
    assert {p.part for p in report.problems} == {receipts[1].part}


def test_a_hanging_store_blocks_the_sender_and_loses_no_sample(store):
    hanging = HangingStore(store, Strike({"put"}))
    held = options(part_bytes=1, max_bytes=64 << 10)
    events = []
    sink = PartSink(hanging, held, events.append)

    def send():
        for i in range(12):
            for page in pages(f"k{i}", 5):
                sink.add(page)

    thread = threading.Thread(target=send)
    thread.start()
    assert hanging.hanging.wait(30)
    thread.join(0.3)
    assert thread.is_alive()
    assert sink.held_bytes <= held.max_bytes
    assert events == []
    hanging.release()
    thread.join(30)
    sink.close()
    assert len(events) == len(load_manifest(store).samples) == 12


def test_a_page_that_cannot_be_encoded_fails_its_sample_alone_and_frees_its_memory(store, monkeypatch):
    """The bad page may be any page of its sample, and the sample's other pages still follow."""
    told = []
    sink = PartSink(store, options(attempt=0, layout="sample"), told.append)
    real = SegmentEncoder.add

    def add(self, page, look):
        if page.segment.key.startswith("bad") and page.chunk == int(page.segment.key[-1]):
            raise MemoryError("no room")
        return real(self, page, look)

    monkeypatch.setattr(SegmentEncoder, "add", add)
    for key in ("bad0", "good0", "bad1", "bad2", "good1"):
        for page in pages(key, 40):
            with suppress(MemoryError):
                sink.add(page)
    sink.flush()
    assert sink.held_bytes == 0
    assert sink._filling == {}
    sink.close()
    assert sorted((type(t).__name__, s.key) for t in told if isinstance(t, Lost) for s in t.segments) == [
        ("Lost", f"bad{i}") for i in range(3)
    ]
    assert sorted(o.name for o in store.list() if o.name.startswith("good")) == [
        "good0.safetensors",
        "good1.safetensors",
    ]


def named(key, n, *, seed):
    return [replace(p, segment=replace(p.segment, name="p.bin", source=key)) for p in pages(key, n, seed=seed)]


def test_the_later_of_two_samples_under_one_path_is_kept(store):
    """Also if the earlier one's put takes longer, or begins later."""
    slow = HangingStore(store, Strike({"put"}, times=1))
    told = []
    sink = PartSink(slow, options(attempt=0, layout="sample", codec=resolve_codec("none")), told.append)
    *most, last = named("a", 60, seed=1)
    for page in most:
        sink.add(page)
    for page in named("b", 20, seed=2):
        sink.add(page)  # its put hangs
    assert slow.hanging.wait(30)
    sink.add(last)
    for page in named("c", 10, seed=3):
        sink.add(page)
    slow.release()
    sink.close()
    assert [type(t) for t in told] == [Stored] * 3
    assert sorted(t.segments[0].source for t in told) == ["a", "b", "c"]  # each event is for its own request
    assert Part.open(store, "p.bin").token_ids(0).tolist() == list(range(3, 13))


@pytest.mark.traced
@pytest.mark.slow
def test_a_sample_alone_is_held_once_while_it_is_stored(store):
    """It is held once while its store hangs: not as encoded layers and rows, nor as an additional byte string."""
    sample = random_sample("k", 4096, hidden_size=512, layer_ids=range(8), chunk_tokens=256)  # 32 MiB
    whole = list(sample.pages())
    hanging = HangingStore(store, Strike({"put_if_absent"}))
    sink = PartSink(hanging, options(attempt=0, layout="sample", codec=resolve_codec("none")), lambda _: None)
    trace_memory()
    try:
        for page in whole:
            sink.add(page)
        assert hanging.hanging.wait(30)
        traced, _ = tracemalloc.get_traced_memory()
    finally:
        hanging.release()
    held = sink._blocks.nbytes + traced  # blocks are mapped, and not traced
    sink.close()
    assert held < 1.1 * sample.states.nbytes
    np.testing.assert_array_equal(Part.open(store, "k.safetensors").read(0), sample.states)


class ClingingStore(WrappedStore):
    """Its errors refer to themselves through their tracebacks' frames, as some libraries' errors do."""

    def head(self, name):
        try:
            return super().head(name)
        except NotFound as e:
            kept = e
            raise kept from None


def test_a_second_long_sample_waits_while_the_last_page_of_the_first_is_encoded(store, monkeypatch):
    *most, last = pages("a", 60)
    sink = PartSink(store, options(max_bytes=last.nbytes), lambda _: None)
    for page in most:
        sink.add(page)
    encoding, encode = threading.Event(), threading.Event()
    real = SegmentEncoder.add

    def add(self, page, look):
        if page is last:
            encoding.set()
            encode.wait(30)
        return real(self, page, look)

    monkeypatch.setattr(SegmentEncoder, "add", add)
    adds = [threading.Thread(target=sink.add, args=[page]) for page in (last, pages("b", 60)[0])]
    adds[0].start()
    assert encoding.wait(30)
    held = sink.held_bytes
    adds[1].start()
    adds[1].join(0.2)
    assert adds[1].is_alive()
    assert sink.held_bytes == held
    encode.set()
    for thread in adds:
        thread.join(30)
    sink.close()
    assert list(load_manifest(store).samples) == ["a"]


def test_pages_wait_in_line_for_room(store):
    """A small page waits behind a large page that waits, so that the later sample under a path is stored last."""
    (fills,), (large,), (small,) = pages("x", 16), named("a", 16, seed=1), named("b", 1, seed=2)
    data = small.data[:, :1].copy()
    small = replace(small, data=data, shape=data.shape)
    hanging = HangingStore(store, Strike({"put_if_absent"}))
    told = queue.SimpleQueue()
    most = fills.nbytes + large.nbytes - 1
    sink = PartSink(hanging, options(attempt=0, layout="sample", codec=resolve_codec("none"), max_bytes=most), told.put)
    sender = ThreadSender(sink, 2)
    sender.send([fills], lambda _: None)
    assert hanging.hanging.wait(30)
    sender.send([large], lambda _: None)
    while not sink._line:  # its thread may be late, and then nothing waits
        time.sleep(0.001)
    sender.send([small], lambda _: None)
    with pytest.raises(queue.Empty):
        told.get(timeout=0.2)  # enough time to pass
    hanging.release()
    sender.close()
    sink.close()
    assert {told.get(timeout=30).segments[0].source for _ in range(3)} == {fills.segment.source, "a", "b"}
    assert Part.open(store, "p.bin").segments[0].segment.total == 1


def test_puts_of_one_name_occupy_one_thread(store):
    """A client that repeats a key must not make the samples of others wait."""
    hanging = HangingStore(store, Strike({"put_if_absent"}))
    told = queue.SimpleQueue()
    sink = PartSink(hanging, options(attempt=0, layout="sample", codec=resolve_codec("none"), uploads=2), told.put)
    for i in range(5):
        (page,) = pages("k", 1)
        sink.add(replace(page, segment=replace(page.segment, source=f"k{i}")))
    (page,) = named("b", 1, seed=2)
    sink.add(page)
    assert told.get(timeout=30).segments[0].source == "b"
    hanging.release()
    sink.close()
    assert {told.get(timeout=30).segments[0].source for _ in range(5)} == {f"k{i}" for i in range(5)}


def test_a_stored_parts_memory_is_free_at_once(store):
    """Memory is freed without Python's garbage collector, although the store's errors refer to buffers. Each part
    checks for a newer attempt, and finding none is such an error.
    """
    limit = 4 << 20
    sink = PartSink(ClingingStore(store), options(part_bytes=1 << 20, max_bytes=limit), lambda _: None)
    gc.disable()
    try:
        for i in range(16):
            sample = random_sample(f"k{i}", 1024, hidden_size=512, layer_ids=range(2), chunk_tokens=256)
            for page in sample.pages():
                sink.add(page)
        sink.flush()
        assert sink._blocks.nbytes <= limit  # of 21 MiB in total
    finally:
        gc.enable()
        sink.close()


def test_a_sample_larger_than_the_budget_is_held_alone(store):
    """The next sample's pages wait from the moment its last page is accepted, before its upload begins."""
    first, second = (pages(key, 160, segment_tokens=160) for key in "ab")
    hanging = HangingStore(store, Strike({"put_if_absent"}))
    sink = PartSink(hanging, options(0, codec=resolve_codec("none"), layout="sample", max_bytes=1), lambda _: None)
    next_page = threading.Thread(target=sink.add, args=second[:1], daemon=True)
    held = []
    finish = sink._finish

    def finish_late(filling):
        next_page.start()
        next_page.join(0.3)
        held.append(sink.held_bytes)
        return finish(filling)

    sink._finish = finish_late
    for page in first:
        sink.add(page)
    sink._finish = finish
    assert hanging.hanging.wait(30)
    whole = sum(page.nbytes + page.token_ids.nbytes for page in first)
    assert next_page.is_alive()
    assert held[0] <= whole
    assert sink.held_bytes == whole
    hanging.release()
    next_page.join(30)
    for page in second[1:]:
        sink.add(page)
    sink.close()
    assert sink.held_bytes == 0
    assert sink._blocks.nbytes <= 1


def test_the_check_for_old_segments_keeps_no_reference(store):
    sink = PartSink(store, options(part_seconds=0.04), lambda _: None)
    first, *rest = pages("k", 20)
    sink.add(first)
    (filling,) = sink._filling.values()
    kept = weakref.ref(filling.encoder)
    del filling
    looked = threading.Event()
    look = sink._seal_or_drop_old_segments
    sink._seal_or_drop_old_segments = lambda: (look(), looked.set())
    assert looked.wait(30)
    sink._seal_or_drop_old_segments = lambda: None  # no further check, which would hide a kept reference
    for page in rest:
        sink.add(page)
    sink.flush()
    assert kept() is None
    sink.close()


def test_the_same_sample_again_lives_as_long_as_its_last_answer_says(store):
    for expires in (100, 200, 200):
        sink = PartSink(store, options(attempt=0, layout="sample"), lambda _: None)
        for page in pages("k", 5):
            sink.add(replace(page, segment=replace(page.segment, meta={"expires": expires})))
        sink.close()
        assert Part.open(store, "k.safetensors").segments[0].segment.meta["expires"] == expires


def test_a_sample_that_is_to_live_longer_replaces_no_other_that_was_stored_meanwhile(store):
    """Between check and put, the key's object is deleted and the key is used for another sample."""

    def add(sink: PartSink, expires: int, seed: int) -> None:
        for page in pages("k", 5, seed=seed):
            sink.add(replace(page, segment=replace(page.segment, meta={"expires": expires}, source=str(expires))))

    hanging = HangingStore(store, Strike({"put"}))
    events: queue.Queue = queue.Queue()
    sink = PartSink(hanging, options(attempt=0, layout="sample"), events.put)
    add(sink, 100, seed=0)
    assert isinstance(events.get(timeout=30), Stored)
    add(sink, 200, seed=0)
    assert hanging.hanging.wait(30)  # it has checked, and is about to put
    store.delete("k.safetensors")
    add(sink, 300, seed=1)
    with suppress(queue.Empty):
        events.get(timeout=0.2)  # enough time to overtake
    hanging.release()
    sink.close()
    told = {e.segments[0].source: type(e) for e in list(events.queue)}
    there = Part.open(store, "k.safetensors").segments[0].segment
    assert told.get("300", Stored) is (Stored if there.meta["expires"] == 300 else Lost)


@pytest.mark.parametrize("kind", ["folder", "broken link"])
def test_a_name_that_no_put_accepts_fails_its_sample_alone(tmp_path, kind):
    """Another user can make such a name. The writers must not retry it for ever."""
    if kind == "folder":
        (tmp_path / "k.safetensors").mkdir()
    else:
        (tmp_path / "k.safetensors").symlink_to("nowhere")
    events: queue.Queue = queue.Queue()
    sink = PartSink(LocalStore(tmp_path), options(attempt=0, layout="sample"), events.put)
    for key in ("k", "other"):
        for page in pages(key, 5, seed=0):
            sink.add(page)
    sink.close()
    assert {e.segments[0].key: type(e) for e in list(events.queue)} == {"k": Lost, "other": Stored}
