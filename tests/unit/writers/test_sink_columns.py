"""Samples of several columns: each column is collected separately, and an object without a receipt has all columns."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hsx_dist.errors import EngineError
from hsx_dist.format.container import Part
from hsx_dist.format.runs import load_manifest
from hsx_dist.page import CARRIER, Page
from hsx_dist.store.local import LocalStore
from hsx_dist.writers.events import Lost, Stored
from hsx_dist.writers.sink import PartSink
from tests.unit.writers.small_samples import options, pages

COLUMNS: tuple[dict[str, Any], ...] = (
    {"column": 0, "columns": 3, "point": "q", "shard": 0, "shards": 2, "head": 4},
    {"column": 1, "columns": 3, "point": "q", "shard": 1, "shards": 2, "head": 4},
    {"column": 2, "columns": 3, "point": "topk_ids"},
)


def column_pages(i: int, key: str = "k", n: int = 40, **changes: Any) -> list[Page]:
    facts = COLUMNS[i] | {"sample_hash": "0" * 16, "source": "s"} | changes
    found = [replace(page, segment=replace(page.segment, **facts)) for page in pages(key, n)]
    if i < 2:
        return found
    ids = [np.zeros_like(page.data, CARRIER["int32"]) for page in found]
    return [replace(page, dtype="int32", data=data) for page, data in zip(found, ids, strict=True)]


def add_all(sink: PartSink, found: list[Page], seed: int = 0) -> None:
    np.random.default_rng(seed).shuffle(found)  # type: ignore[arg-type]
    for page in found:
        sink.add(page)


def test_each_column_of_a_sample_gets_its_receipt(store):
    events = []
    sink = PartSink(store, options(), events.append)
    add_all(sink, [page for i in range(3) for page in column_pages(i, n=100)])
    sink.close()
    (receipt,) = events
    record = load_manifest(store).samples["k"]
    assert record.num_tokens == 100
    found = [(p.segment.column, p.segment.start, p.segment.stop) for p in record.segments]
    assert found == [(i, *span) for i in range(3) for span in ((0, 64), (64, 100))]
    part = Part.open(store, receipt.part)
    assert {info.segment.point for info in part.segments} == {"q", "topk_ids"}
    for proof in record.segments:
        assert part.segments[proof.slot].segment.id == proof.segment.id
        # No warning for ids that are all 0.
        assert part.segments[proof.slot].segment.meta == {}


def test_a_sample_without_one_of_its_columns_does_not_exist(store):
    sink = PartSink(store, options(), lambda _: None)
    add_all(sink, [*column_pages(0), *column_pages(2), *column_pages(1)[:-1]])
    sink.close()
    assert list(load_manifest(store).samples) == []


def test_a_column_without_the_hash_of_its_sample_is_lost(store):
    """Its receipt could not be read: it would not show which columns have the same tokens."""
    events = []
    sink = PartSink(store, options(), events.append)
    for page in column_pages(0, sample_hash="")[:1]:
        with pytest.raises(ValueError, match="hash of the sample"):
            sink.add(page)
    sink.close()
    assert [type(event) for event in events] == [Lost]


@pytest.mark.parametrize("seed", range(4))
def test_an_object_of_one_sample_has_all_columns(tmp_path, seed):
    store, events = LocalStore(tmp_path), []
    sink = PartSink(store, options(attempt=0, layout="sample"), events.append)
    found = {key: [page for i in range(3) for page in column_pages(i, key)] for key in ("a", "b")}
    add_all(sink, [*found["a"], *found["b"]], seed)
    sink.close()
    assert sink.held_bytes == 0
    assert {event.part for event in events} == {"a.safetensors", "b.safetensors"}
    for event in events:
        assert isinstance(event, Stored)
        assert [s.column for s in event.segments] == [0, 1, 2]
        part = Part.open(store, event.part)
        assert [info.segment.id for info in part.segments] == [(event.segments[0].key, i, 0) for i in range(3)]


@pytest.mark.parametrize("lost", range(3))
def test_an_object_with_a_failed_column_is_lost_and_reported_once(tmp_path, lost):
    store, events = LocalStore(tmp_path), []
    sink = PartSink(store, options(attempt=0, layout="sample"), events.append)
    for i in range(3):
        for page in column_pages(i):
            if i == lost:
                page = replace(page, error="the copy failed")
            with suppress(EngineError):
                sink.add(page)
    add_all(sink, [page for i in range(3) for page in column_pages(i, source="again")])
    sink.close()
    assert sink.held_bytes == 0
    told = [segment.column for event in events[:-1] for segment in event.segments]
    assert all(isinstance(event, Lost) for event in events[:-1])
    assert sorted(told) == [0, 1, 2]
    assert isinstance(events[-1], Stored)


def test_a_key_used_again_for_the_same_columns_is_the_same_sample(tmp_path):
    store, events = LocalStore(tmp_path), []
    for changes in ({}, {}, {"point": "z"}):
        sink = PartSink(store, options(attempt=0, layout="sample"), events.append)
        add_all(sink, [page for i in range(3) for page in column_pages(i, **(changes if i < 2 else {}))])
        sink.close()
    assert [type(event) for event in events] == [Stored, Stored, Lost]
    assert events[-1].conflict


def test_bad_rows_of_a_column_are_flagged_in_its_own_segment(store):
    sink = PartSink(store, options(), lambda _: None)
    add_all(sink, [page for i in (0, 2) for page in column_pages(i)])
    for page in column_pages(1):
        sink.add(replace(page, data=np.full_like(page.data, 0x7FC0)))
    sink.close()
    record = load_manifest(store).samples["k"]
    found = [Part.open(store, p.part).segments[p.slot].segment.meta for p in record.segments]
    assert found == [{}, {"bad": {"nonfinite_rows": {"2": 40, "5": 40}}}, {}]
