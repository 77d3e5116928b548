"""The report's memory for wide layers and for long manifests."""

from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hsx_dist.format.codecs import NoneCodec
from hsx_dist.format.manifest import RowFate
from hsx_dist.format.place import Place
from hsx_dist.observe.report import document, states, write_report
from hsx_dist.observe.report.facts import REASONS_SHOWN, gather_facts
from hsx_dist.observe.report.states import gather_states
from hsx_dist.reading import Run
from hsx_dist.reading.statistics import LayerStatistics, compute_statistics, store_statistics
from hsx_dist.testing.samples import random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import RunWriter, store_run, whole
from tests.harness.traced_memory import trace_memory


@pytest.mark.traced
def test_the_sums_of_wide_layers_are_limited_with_all_that_is_computed_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of 64 KB may have hundreds of layers of 100,000 channels."""
    store = MemoryStore()
    store_run(store, [random_sample("a", 2, layer_ids=range(8), hidden_size=50_000, odd=False)], codec=NoneCodec())
    run = Run(store)
    most = 8 * 50_000 * 32
    monkeypatch.setattr(states, "HELD_BYTES", most)
    trace_memory()
    assert gather_states(run, ["a"], []) is not None
    peak = tracemalloc.get_traced_memory()[1]
    assert peak < most + (2 << 20)
    monkeypatch.setattr(states, "HELD_BYTES", most - 1)
    assert gather_states(run, ["a"], []) is None


def test_the_page_of_many_statistics_holds_the_arrays_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a layer has 24 bytes a channel, and a run may have any number."""
    run = store_run(MemoryStore(), [random_sample("a", 9, layer_ids=range(6))]).place.root
    store_statistics(Run(run), compute_statistics(Run(run)))
    alive: list[weakref.ref[LayerStatistics]] = []
    stored = document.stored_statistics

    def watched(of: Run) -> Iterator[LayerStatistics]:
        for own in stored(of):
            alive.append(weakref.ref(own))
            assert sum(ref() is not None for ref in alive) <= 2
            yield own

    monkeypatch.setattr(document, "stored_statistics", watched)
    assert write_report(run).count("<td>hidden_states</td>") == len(alive) == 6


def test_the_fates_of_rows_are_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compacted manifest of 1 MiB may have a hundred thousand rows that failed, each with its own reason."""
    writer = RunWriter(store_run(MemoryStore(), [random_sample("a", 2)]).place.root)
    writer.put([], [RowFate(f"k{i}", None, "failed", chr(97 + i % 26) * (1 + i // 26), 1) for i in range(100)])
    writer.complete()
    run = Run(writer.place.root)
    monkeypatch.delattr("hsx_dist.reading.run.load_manifest")
    facts = gather_facts(run)
    assert (facts.counts["failed"], len(facts.failed)) == (100, REASONS_SHOWN)
    assert run.index.failed["k7"] is run.manifest.failed["k7"]


def test_a_manifest_that_a_caller_has_does_not_change() -> None:
    writer = store_run(MemoryStore(), [random_sample("a", 2)])
    later = RunWriter(writer.place.root)
    later.put([whole(random_sample("b", 2))])
    run = Run(writer.place.root)
    before = run.manifest
    run.refresh()
    assert run.manifest is before
    later.put([whole(random_sample("c", 2))])
    run.refresh()
    assert (sorted(before.samples), sorted(run.manifest.samples), len(run)) == (["a", "b"], ["a", "b", "c"], 3)


def test_a_refresh_in_another_thread_replaces_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = store_run(MemoryStore(), [random_sample("a", 2)])
    later = RunWriter(writer.place.root)
    run, reading = Run(writer.place.root), Place.reading

    @contextmanager
    def slow(place: Place) -> Iterator[None]:
        with reading(place):
            yield
            monkeypatch.setattr(Place, "reading", reading)
            later.put([whole(random_sample("b", 2))])
            run.refresh()  # as another thread does, before the property returns

    monkeypatch.setattr(Place, "reading", slow)
    run.manifest  # noqa: B018
    assert sorted(run.manifest.samples) == ["a", "b"]
