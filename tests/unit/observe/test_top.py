"""The state of a run, from its store alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hsx_dist.cli.app import app
from hsx_dist.errors import RunError
from hsx_dist.format.runs import beat, take_attempt
from hsx_dist.observe.top import follow, look
from hsx_dist.store import Store, open_store
from tests.harness.runs import write_v1_run


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "r"))


def progress(done: int, tokens: int, seconds: float, *, wait: float = 0.0, before: int = 0) -> dict:
    return {
        "rows": 100,
        "fates": {"before": before, "stored": done, "refused": 0, "failed": 0, "retried": 0},
        "tokens": tokens,
        "stored_bytes": 2 * tokens,
        "seconds": seconds,
        "counted": {"engine_seconds": seconds, "store_wait_seconds": wait},
    }


def test_where_nothing_was_begun_it_says_so(store: Store):
    with pytest.raises(RunError, match="no run"):
        look(store)
    write_v1_run(store, {"meaning": {"model": "m"}})
    assert look(store).state == "not started"
    attempt = take_attempt(store, {})
    assert look(store).state == "starting"
    beat(store, attempt, 1, "running")  # an older version's heartbeat has no progress
    standing = look(store)
    assert (standing.state, standing.done, standing.eta_seconds, standing.stale) == ("running", 0, None, False)


def test_rates_are_those_since_the_last_look(store: Store):
    write_v1_run(store, {"meaning": {"model": "m"}})
    attempt = take_attempt(store, {})
    beat(store, attempt, 1, "running", progress(10, 1000, 10.0, before=30))
    first = look(store)
    assert (first.done, first.rows_per_second, first.tokens_per_second) == (40, 1.0, 100.0)
    assert first.eta_seconds == 60.0
    beat(store, attempt, 2, "running", progress(20, 4000, 20.0, wait=5.0, before=30))
    second = look(store, first)
    assert (second.tokens_per_second, second.bytes_per_second, second.waiting) == (300.0, 600.0, 0.5)
    assert "300 tokens/s" in second.line()
    assert "waiting on the store 50%" in second.line()
    assert "ETA 0:50" in second.line()


def test_following_ends_with_the_attempt(store: Store):
    write_v1_run(store, {"meaning": {"model": "m"}})
    attempt = take_attempt(store, {})
    beat(store, attempt, 1, "running", progress(1, 10, 1.0))
    states = []
    for standing in follow(store, 0.0):
        states.append((standing.state, standing.tokens_per_second))
        if len(states) == 2:
            beat(store, attempt, 2, "stopped: signal", progress(2, 30, 2.0))
    # The second poll reads the same heartbeat: the rate stays.
    assert states == [("running", 10.0), ("running", 10.0), ("stopped: signal", 20.0)]


def test_the_command_prints_lines_and_json(small_run: Store):
    done = CliRunner().invoke(app, ["top", small_run.url])
    assert done.exit_code == 0, done.output
    assert "complete · rows 12/12" in done.output
    facts = json.loads(CliRunner().invoke(app, ["top", small_run.url, "--json"]).output)
    assert (facts["state"], facts["done"], facts["waiting"]) == ("complete", 12, 0.25)
