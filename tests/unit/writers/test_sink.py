"""The sink on a real folder: each reported sample is stored, and its receipt is stored last."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from hsx_dist.errors import Fenced
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.format.manifest import Receipt
from hsx_dist.format.runs import load_manifest, take_attempt
from hsx_dist.page import Page, Segment
from hsx_dist.reading import Run
from hsx_dist.store.local import LocalStore
from hsx_dist.writers import sink as sink_module
from hsx_dist.writers.events import Lost, Stored
from hsx_dist.writers.sink import PartSink, SinkOptions
from hsx_dist.writers.threads import ThreadSender
from tests.harness.runs import write_v1_run
from tests.unit.writers.small_samples import check_readable, options, pages


def test_metadata_of_pages_is_stored_in_parts_and_not_in_receipts(store):
    """Metadata and masks are in the part. A driver holds millions of receipts, so receipts have neither."""
    events = []
    sink = PartSink(store, options(), events.append)
    mask = np.arange(100, dtype=np.uint8) % 2
    for page in pages("a", 100):
        extra = {"attached": {"loss_mask": mask}} if page.segment.index == 0 else {}
        sink.add(replace(page, segment=replace(page.segment, metadata='{"source": "web"}', **extra)))
    sink.flush()
    assert sink.held_bytes == 0
    sink.close()
    (receipt,) = events
    kept = [(proof.segment.meta, proof.segment.metadata, proof.segment.attached) for proof in receipt.segments]
    assert not any(any(what) for what in kept)
    sample = Run(written(store))["a"]
    assert sample.metadata == {"source": "web"}
    assert sample.load(tokens=(60, 70), framework="numpy")["loss_mask"].tolist() == mask[60:70].tolist()
    assert sample.load(framework="numpy")["loss_mask"].dtype == np.int64


def written(store: LocalStore) -> LocalStore:
    write_v1_run(store, {})
    return store


def test_added_pages_get_receipts_and_are_readable(store):
    events = []
    sink = PartSink(store, options(), events.append)
    for page in [*pages("a", 1), *pages("b", 100), *pages("c", 200)]:
        sink.add(page)
    assert events == []  # before a part is sealed no sample is durable, and none is reported
    sink.close()
    assert sink.held_bytes == 0
    (receipt,) = events
    manifest = load_manifest(store)
    assert set(manifest.samples) == {"a", "b", "c"}
    assert receipt == next(iter(manifest.parts.values()))
    assert store.head(receipt.part).size == receipt.size
    for key, n in (("a", 1), ("b", 100), ("c", 200)):
        check_readable(store, manifest, key, n)


def test_pages_of_a_segment_can_be_added_in_any_order(store):
    sink = PartSink(store, options(), lambda _: None)
    shuffled = pages("k", 300)
    np.random.default_rng(1).shuffle(shuffled)
    for page in shuffled:
        sink.add(page)
    sink.close()
    check_readable(store, load_manifest(store), "k", 300)


def test_parts_are_sealed_by_size_and_receipts_have_no_gaps(store):
    events = []
    sink = PartSink(store, options(part_bytes=4000), events.append)
    for i in range(50):
        for page in pages(f"k{i}", 40):
            sink.add(page)
    sink.close()
    assert len(events) > 5
    assert sorted(e.seq for e in events) == list(range(1, len(events) + 1))
    assert len(load_manifest(store).samples) == 50


def test_one_sample_an_object(tmp_path):
    store = LocalStore(tmp_path)
    events = []
    sink = PartSink(store, options(attempt=0, layout="sample"), events.append)
    for page in pages("../a b", 40):
        sink.add(page)
    sink.close()
    assert [o.name for o in store.list()] == ["%2E.%2Fa%20b.safetensors"]
    (stored,) = events  # without a run there are no receipts
    assert (type(stored), stored.part) == (Stored, "%2E.%2Fa%20b.safetensors")
    assert [s.key for s in stored.segments] == ["../a b"]


def test_a_segment_without_its_last_page_is_never_stored(store):
    events = []
    sink = PartSink(store, options(), events.append)
    for page in pages("k", 40)[:-1]:
        sink.add(page)
    sink.close()
    assert events == []
    assert load_manifest(store).samples == {}


def test_a_row_that_is_computed_again_is_not_mixed_with_what_its_dead_engine_left(store):
    sink = PartSink(store, options(), lambda _: None)

    def copied(source, seed):
        return [replace(p, segment=replace(p.segment, source=source)) for p in pages("k", 100, seed=seed)]

    first, second = copied("first", seed=500), copied("second", seed=0)
    for page in (first[0], second[0], first[1], *second[1:]):  # a late page of the dead engine is no newer copy
        sink.add(page)
    assert sink.held_bytes > 0
    sink.close()
    assert sink.held_bytes == 0
    check_readable(store, load_manifest(store), "k", 100)


def test_a_newer_attempt_fences_the_sink(store):
    events = []
    sink = PartSink(store, options(), events.append)
    for page in pages("k", 40):
        sink.add(page)
    assert take_attempt(store, {}) == 2
    sink.flush()
    (lost,) = events
    assert isinstance(lost, Lost)
    assert lost.fenced
    assert lost.fatal
    with pytest.raises(Fenced):
        sink.add(pages("l", 1)[0])
    sink.close()
    assert load_manifest(store).samples == {}  # the part exists, but no receipt names it


def test_a_sink_without_free_memory_seals_whole_samples_before_a_part_is_full(store):
    """There is room for one page, and a part would need hundreds. The sink must seal early to accept more pages."""
    sink = PartSink(store, options(max_bytes=pages("k", 16)[0].nbytes), lambda _: None)
    for i in range(20):
        for page in pages(f"k{i}", 100):
            sink.add(page)
    sink.close()
    assert len(load_manifest(store).samples) == 20


def with_metadata(key: str, n: int, metadata: str, label: np.ndarray) -> list[Page]:
    found = pages(key, n)
    extra = [{"attached": {"label": label}} if page.segment.index == 0 else {} for page in found]
    return [replace(p, segment=replace(p.segment, metadata=metadata, **e)) for p, e in zip(found, extra, strict=True)]


def test_metadata_and_attached_arrays_count_as_held_until_their_part_is_stored(store):
    """The store is slow, and states are small: without the count, any number of metadata would wait for the store."""
    most = 4 << 20
    sink = PartSink(store, options(max_bytes=most), lambda _: None)
    metadata = json.dumps({"text": "x" * 64_000})
    first, *rest = with_metadata("a", 100, metadata, np.zeros(100_000, np.uint8))
    sink.add(first)
    assert sink.held_bytes > len(metadata) + 100_000
    for page in rest:
        sink.add(page)
    kept = []
    for i in range(40):
        (page,) = with_metadata(f"k{i}", 1, metadata, np.zeros(1, np.uint8))
        sink.add(page)
        kept.append(sink.held_bytes)
    assert max(kept) <= most
    sink.flush()
    assert sink.held_bytes == 0
    sink.close()
    assert len(load_manifest(store).samples) == 41
    assert len(load_manifest(store).parts) > 1


@pytest.mark.parametrize("on_bad_rows", ["flag", "fail"])
def test_a_segment_with_more_metadata_than_the_sink_may_hold_is_stored_alone(store, on_bad_rows):
    sink = PartSink(store, options(max_bytes=1, on_bad_rows=on_bad_rows), lambda _: None)
    for i in range(4):
        for page in with_metadata(f"k{i}", 100, json.dumps({"i": i}), np.zeros(100, np.uint8)):
            sink.add(replace(page, data=np.zeros_like(page.data)) if i == 2 else page)
    sink.flush()
    assert sink.held_bytes == 0
    sink.close()
    assert len(load_manifest(store).samples) == (4 if on_bad_rows == "flag" else 3)


def test_threads_release_every_page_once_and_flush_waits_for_them(store):
    sink = PartSink(store, options(), lambda _: None)
    sender = ThreadSender(sink, threads=3)
    released = []
    lock = threading.Lock()

    def release(page):
        with lock:
            released.append((page.segment.key, page.start))

    sent = [p for i in range(40) for p in pages(f"k{i}", 70)]
    sender.send(sent, release)
    sender.flush()
    assert sorted(released) == sorted((p.segment.key, p.start) for p in sent)
    sender.close()
    sink.close()
    assert len(load_manifest(store).samples) == 40


def test_a_row_that_is_computed_again_before_its_part_is_sealed_is_stored_apart(store):
    """The engine died after it had shipped everything. One writer receives the same whole segment twice."""
    events = []
    sink = PartSink(store, options(), events.append)
    for _ in range(2):
        for page in pages("k", 40):
            sink.add(page)
    sink.close()
    assert [type(e) for e in events] == [Receipt, Receipt]
    check_readable(store, load_manifest(store), "k", 40)


@pytest.mark.parametrize("other", [{"sample_hash": "b" * 16}, {"stop": 48}, {}])
def test_an_unfinished_copy_is_dropped_only_if_the_complete_one_has_the_same_tokens(store, other):
    """A node that was declared dead may go on, while its row got other tokens on another node."""
    made = [page for page in pages("k", 64) if page.start < other.get("stop", 64)]
    copies = [pages("k", 64), made]
    for copy, facts in zip(copies, ({"source": "a"}, {"source": "b", **other}), strict=True):
        copy[:] = [replace(p, segment=replace(p.segment, **{"sample_hash": "a" * 16, **facts})) for p in copy]
    events = []
    sink = PartSink(store, options(), events.append)
    for page in [copies[1][0], *copies[0], *(copies[1][1:] if other else ())]:
        sink.add(page)
    sink.close()
    proofs = sorted((p.segment.stop, p.sample_hash[0]) for receipt in events for p in receipt.segments)
    assert proofs == sorted(
        [(64, "a"), *([(other.get("stop", 64), other.get("sample_hash", "a")[0])] if other else [])]
    )
    assert sink.held_bytes == 0


def test_stale_unfinished_segments_are_dropped(store):
    sink = PartSink(store, options(part_seconds=0.04, stale_seconds=0.05), lambda _: None)
    sink.add(pages("k", 40)[0])
    while sink.held_bytes:
        threading.Event().wait(0.01)
    sink.close()
    assert load_manifest(store).samples == {}


def test_an_unfinished_segment_survives_an_outage_of_the_store(store, monkeypatch):
    """The outage is longer than ``stale_seconds``, and the segment's other pages wait for it to end."""
    up = threading.Event()
    put = store.put

    def slow(name, buffers):
        up.wait()
        put(name, buffers)

    monkeypatch.setattr(store, "put", slow)
    told = []
    sink = PartSink(store, options(part_bytes=1, part_seconds=0.04, stale_seconds=0.5), told.append)
    first, *rest = pages("long", 40)
    sink.add(first)
    for page in pages("other", 4):
        sink.add(page)  # a part that waits for the store
    threading.Event().wait(1.2)
    up.set()
    for page in rest:
        sink.add(page)
    sink.close()
    assert sorted(load_manifest(store).samples) == ["long", "other"]
    assert not [t for t in told if isinstance(t, Lost)]
    assert sink.held_bytes == 0


def test_without_a_run_two_copies_of_a_sample_are_both_stored_and_reported(tmp_path):
    """Their pages alternate. In a run the first copy would be a dead engine's."""
    told = []
    store = LocalStore(tmp_path)
    options = SinkOptions(resolve_codec("none"), {"model": "m"}, "w", layout="sample", stale_seconds=0.0)
    sink = PartSink(store, options, told.append)
    data = np.arange(2 * 8 * 4, dtype=np.uint32).reshape(2, 8, 4)
    for start in (0, 4):
        for source in ("a", "b"):
            segment = Segment("k", 0, 0, 8, 8, source=source)
            ids = np.arange(start, start + 4, dtype=np.int64)
            rows = np.ascontiguousarray(data[:, start : start + 4])
            sink.add(Page(segment, start, start + 4, 4, (1, 2), "float32", rows.shape, "LTH", ids, rows))
    sink.close()
    assert [type(t) for t in told] == [Stored, Stored]
    assert sorted(s.source for t in told for s in t.segments) == ["a", "b"]
    assert sink.held_bytes == 0


def test_a_segment_larger_than_a_part_fails_alone(store, monkeypatch):
    """Its part's other segments are stored after any error of the bad one."""
    whole = sink_module.build_part

    def build_part(segments, *args):
        if any(s.segment.key.startswith("bad") for s in segments):
            raise TypeError("no")
        return whole(segments, *args)

    monkeypatch.setattr(sink_module, "build_part", build_part)
    events = []
    sink = PartSink(store, options(), events.append)
    for key in ("a", "bad", "b", "bad too"):
        for page in pages(key, 4):
            sink.add(page)
    sink.flush()
    for page in pages("bad alone", 4):
        sink.add(page)
    sink.flush()
    for key in ("bad 1", "bad 2"):
        for page in pages(key, 4):
            sink.add(page)
    sink.close()
    assert sink.held_bytes == 0
    lost = [s.key for e in events if isinstance(e, Lost) for s in e.segments]
    assert lost == ["bad", "bad too", "bad alone", "bad 1", "bad 2"]
    assert set(load_manifest(store).samples) == {"a", "b"}


@pytest.mark.parametrize("meta", [{"a": float("nan")}, {"a": object()}, {1: 1, "b": 2}], ids=["nan", "object", "keys"])
def test_metadata_that_is_not_json_fails_its_sample_alone(store, meta):
    events = []
    sink = PartSink(store, options(), events.append)
    for key in ("a", "bad", "b"):
        for page in pages(key, 4):
            segment = replace(page.segment, meta=meta if key == "bad" else {})
            with suppress(TypeError, ValueError):
                sink.add(replace(page, segment=segment))
    sink.close()
    assert [s.key for e in events if isinstance(e, Lost) for s in e.segments] == ["bad"]
    assert set(load_manifest(store).samples) == {"a", "b"}
