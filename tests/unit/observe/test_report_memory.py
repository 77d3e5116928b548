"""The report's memory for wide layers and for long manifests."""

from __future__ import annotations

import tracemalloc

import pytest

from hsx_dist.format.codecs import NoneCodec
from hsx_dist.format.manifest import Manifest
from hsx_dist.format.runs import load_manifest
from hsx_dist.observe.report import states
from hsx_dist.observe.report.facts import gather_facts
from hsx_dist.observe.report.states import gather_states
from hsx_dist.reading import Run
from hsx_dist.store import Store
from hsx_dist.testing.samples import random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import store_run


def test_the_sums_of_wide_layers_are_limited_with_all_that_is_computed_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of 64 KB may have hundreds of layers of 100,000 channels."""
    store = MemoryStore()
    store_run(store, [random_sample("a", 2, layer_ids=range(8), hidden_size=50_000, odd=False)], codec=NoneCodec())
    run = Run(store)
    most = 8 * 50_000 * 32
    monkeypatch.setattr(states, "HELD_BYTES", most)
    tracemalloc.start()
    try:
        assert gather_states(run, ["a"], []) is not None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most + (2 << 20)
    monkeypatch.setattr(states, "HELD_BYTES", most - 1)
    assert gather_states(run, ["a"], []) is None


def test_a_complete_runs_manifest_is_read_again_after_the_first_is_released(
    small_run: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []

    def load(store: Store) -> Manifest:
        held.append(run._reader.manifest)
        return load_manifest(store)

    monkeypatch.setattr("hsx_dist.reading.run.load_manifest", load)
    run = Run(small_run)
    assert run._reader.manifest is not None
    gather_facts(run)
    assert held == [None]
