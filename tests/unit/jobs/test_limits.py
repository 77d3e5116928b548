from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from hsx_dist.config import load_config
from hsx_dist.errors import ConfigError
from hsx_dist.format.manifest import RowFate
from hsx_dist.format.names import part_name
from hsx_dist.format.runs import load_manifest
from hsx_dist.jobs.limits import HeldBytes, Limits, Verdict, removable, seconds_left
from hsx_dist.store.local import LocalStore
from hsx_dist.testing.samples import random_sample
from tests.harness.runs import RunWriter, store_run


def test_without_limits_rows_are_never_held_back():
    assert Limits().verdict(10, 1000, 5, 100.0) == Verdict()
    assert not Limits().past_deadline()


@pytest.mark.parametrize(
    ("rows", "under_way", "capacity", "ended"),
    [(0, 0, 10, False), (4, 3, 3, False), (4, 6, 0, False), (10, 0, 0, True)],
)
def test_rows_under_way_count_for_max_rows(rows, under_way, capacity, ended):
    verdict = Limits(max_rows=10).verdict(rows, 0, under_way, 0.0)
    assert (verdict.capacity, bool(verdict.ended)) == (capacity, ended)


@pytest.mark.parametrize(
    ("nbytes", "under_way", "capacity", "ended"),
    [(0, 0, None, False), (500, 4, None, False), (500, 5, 0, False), (1000, 0, 0, True)],
)
def test_rows_under_way_count_for_max_bytes_by_their_mean(nbytes, under_way, capacity, ended):
    verdict = Limits(max_bytes=1000).verdict(5, nbytes, under_way, 100.0)
    assert (verdict.capacity, bool(verdict.ended), verdict.paused) == (capacity, ended, "")


def test_a_full_store_pauses_the_run_and_does_not_end_it():
    held = [900]
    limits = Limits(held=lambda: held[0], max_held_bytes=1000)
    assert not limits.verdict(5, 900, 0, 100.0).paused
    verdict = limits.verdict(5, 900, 1, 100.0)
    assert (verdict.capacity, verdict.ended) == (0, "")
    assert "max_stored_bytes" in verdict.paused
    held[0] = 100
    assert limits.verdict(5, 900, 1, 100.0) == Verdict()


def test_held_bytes_are_listed_and_newer_receipts_are_added(tmp_path):
    store = LocalStore(tmp_path)
    proven = [30]
    store.put("data/a", [b"x" * 100])
    store.put("run.json", [b"x" * 1000])
    held = HeldBytes(store, lambda: proven[0], every=3600)
    try:
        assert held() == 100
        proven[0] = 50
        assert held() == 120
        store.delete("data/a")
        held._list()
        assert held() == 0
    finally:
        held.close()


def test_parts_that_no_consumer_can_remove_do_not_count_as_held(tmp_path):
    """Otherwise the run pauses without end. A replica may die after it sent the first segment of a row."""

    def segments(key, tokens=20):
        sample = random_sample(key, tokens)
        return [(sample, segment, None) for segment in sample.segments(10)]

    store_run(LocalStore(tmp_path), [])
    earlier, own = (RunWriter(LocalStore(tmp_path), name="w") for _ in range(2))
    unfinished = earlier.put([segments("open")[0], *segments("a")])
    removable_since = [earlier.put(segments("b"))]
    manifest = load_manifest(own.store)
    count = removable(manifest, own.attempt)
    added = [own.put(s) for s in ([*segments("c"), segments("poison")[0]], [segments("half")[0]], segments("d"))]
    own.store.put(part_name(own.attempt, "dead", 1), [b"no receipt"])
    own.store.put("data/of-another-program", [b"1234"])
    held = HeldBytes(own.store, lambda: manifest.stored_bytes, count, every=3600)
    try:
        for receipt in added:
            manifest.add(receipt)
        removable_since += added
        assert held() == sum(r.size for r in [*removable_since, *added]) + 4  # a new receipt counts twice
        held._list()
        assert held() == sum(r.size for r in removable_since) + 4
        manifest.add(own.put((), [RowFate("poison", 7, "poison", "killed its engine", 3)]))
        held._list()
        removable_since.remove(added[0])
        assert held() == sum(r.size for r in removable_since) + 4
        assert unfinished.part in manifest.parts
    finally:
        held.close()


@pytest.mark.parametrize(("given", "seconds"), [(None, None), (90, 90.0)])
def test_a_deadline_in_seconds(given, seconds):
    assert seconds_left(load_config(None, (), model="m", output="o", deadline=given)) == seconds


def test_a_deadline_as_a_time():
    when = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    config = load_config(None, (), model="m", output="o", deadline=when)
    assert 3500 < (seconds_left(config) or 0) <= 3600
    assert config.public()["deadline"] == when


@pytest.mark.parametrize("wrong", ["soon", 0, -5, True, "2026-01-31T18:00:00"])
def test_a_malformed_deadline_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"deadline.*seconds from the start"):
        load_config(None, (), model="m", output="o", deadline=wrong)
