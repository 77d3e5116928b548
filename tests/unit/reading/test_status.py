"""The status of a run from its store, by receipts and heartbeats alone."""

from __future__ import annotations

import json

import pytest

from hsx_dist.cli.status import print_status
from hsx_dist.errors import RunError
from hsx_dist.format.manifest import Manifest, RowFate
from hsx_dist.format.runs import beat, load_manifest, take_attempt, write_complete
from hsx_dist.jobs.ledger import RowLedger
from hsx_dist.observe.progress import Progress
from hsx_dist.reading import status as reading_status
from hsx_dist.reading.status import run_status
from hsx_dist.store.local import LocalStore
from hsx_dist.testing.samples import random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import store_run, write_v1_run


@pytest.fixture
def store(tmp_path):
    store = LocalStore(tmp_path)
    write_v1_run(store, {})
    take_attempt(store, {})
    ledger = RowLedger(store, 1, Manifest())
    for i in range(30):
        ledger.add(RowFate(f"r{i}", i, "refused", f"expected at most 255 tokens, got {1000 + i}", 0))
    ledger.add(RowFate("f", 40, "failed", "no writer", 3))
    ledger.add(RowFate("p", 41, "poison", "its engine died", 3))
    ledger.flush()
    return store


def test_every_row_is_accounted_for_while_a_driver_lives(store, capsys, monkeypatch):
    told = {**Progress(100).snapshot(), "replicas": 2, "under_way": 64, "paused": "max_x"}  # in the form of a driver
    beat(store, 1, 1, "running", told)
    status = run_status(store, sleep=lambda _: beat(store, 1, 2, "running", told))
    assert status.state == "running"
    assert status.rows == {"total": 100, "stored": 0, "refused": 30, "failed": 1, "poison": 1, "open": 68}
    assert status.reasons["refused"] == {"expected at most ### tokens, got ####": 30}
    assert status.progress["replicas"] == 2
    assert not status.ok
    monkeypatch.setattr("hsx_dist.cli.status.run_status", lambda _: status)
    assert print_status(store.url, (), as_json=False) == 1
    assert "2 replicas ready, 64 rows under way, 0 tokens/s, paused by max_x" in capsys.readouterr().out


def test_a_driver_without_new_heartbeats_is_silent_and_a_stopped_one_is_stopped(store):
    beat(store, 1, 7, "running")
    assert run_status(store, sleep=lambda _: None).state == "silent"
    assert run_status(store, sleep=lambda _: beat(store, 1, 8, "stopped: signal")).state == "stopped: signal"


def test_before_a_driver_has_counted_its_rows_no_total_is_shown(store):
    status = run_status(store, sleep=lambda _: None)
    assert (status.state, status.rows["total"], status.rows["open"]) == ("silent", None, None)


def test_a_complete_run_is_complete_with_any_heartbeat(store, capsys):
    beat(store, 1, 7, "running")
    write_complete(store, 1, load_manifest(store), {"rows": 32})
    status = run_status(store, sleep=lambda _: pytest.fail("nothing is to be waited for"))
    assert (status.state, status.rows["open"]) == ("complete", 0)
    assert print_status(store.url, (), as_json=True) == 1  # some rows failed
    assert json.loads(capsys.readouterr().out)["rows"]["poison"] == 1
    assert print_status(store.url, (), as_json=False) == 1
    assert "expected at most ### tokens" in capsys.readouterr().out


def test_a_complete_run_has_the_rows_of_its_completion(monkeypatch):
    """The next attempt declares a part lost after the state was found."""
    root = MemoryStore()
    writer = store_run(root, [random_sample(f"s{i}", 4, seed=i) for i in range(4)], per_part=2)
    real = reading_status.observe

    def observe(own, *args, **kwargs):
        found = real(own, *args, **kwargs)
        lost = next(own.list("data/")).name
        own.delete(lost)
        RowLedger(own, take_attempt(own, {}), load_manifest(own)).declare_lost([lost])
        return found

    monkeypatch.setattr(reading_status, "observe", observe)
    found = run_status(writer.place.root)
    assert (found.state, found.rows["stored"], found.missing_parts) == ("complete", 4, 1)
    assert not found.ok


def test_missing_parts_are_printed(tmp_path, capsys):
    store = LocalStore(tmp_path)
    writer = store_run(store, [random_sample("a", 4)])
    writer.place.store.delete(next(writer.place.store.list("data/")).name)
    assert print_status(store.url, (), as_json=False) == 1
    assert "1 parts; the same extraction computes their samples again" in " ".join(capsys.readouterr().out.split())


def test_the_status_of_a_missing_run_raises(tmp_path):
    with pytest.raises(RunError):
        run_status(LocalStore(tmp_path))
