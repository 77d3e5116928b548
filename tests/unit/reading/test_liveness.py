"""Whether a process works on a run: every way in which an attempt runs, ends, or stops without notice."""

from __future__ import annotations

import pytest

from hsx_dist.errors import RunError
from hsx_dist.format.runs import beat, load_manifest, take_attempt, write_complete
from hsx_dist.reading.liveness import observe, require_dead
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import write_v1_run


@pytest.fixture
def store() -> MemoryStore:
    made = MemoryStore()
    write_v1_run(made, {})
    return made


def never(_: float) -> None:
    pytest.fail("nothing is to be waited for")


def test_new_stopped_and_complete_runs_are_known_without_waiting(store: MemoryStore) -> None:
    assert (observe(store, 9, sleep=never).state, require_dead(store, sleep=never)) == ("new", 0)
    take_attempt(store, {})
    beat(store, 1, 3, "stopped: signal")
    assert (observe(store, 9, sleep=never).state, require_dead(store, sleep=never)) == ("stopped: signal", 1)
    write_complete(store, 1, load_manifest(store), {"rows": 0})
    found = observe(store, 9, sleep=never)
    assert (found.state, found.complete is not None) == ("complete", True)


def test_a_driver_that_ends_while_it_is_watched_is_not_called_alive(store: MemoryStore) -> None:
    take_attempt(store, {})
    beat(store, 1, 1, "running")
    assert require_dead(store, sleep=lambda _: beat(store, 1, 2, "finished")) == 1


def test_a_new_heartbeat_or_attempt_shows_that_a_driver_is_alive(store: MemoryStore) -> None:
    take_attempt(store, {})
    assert observe(store, 9, sleep=lambda _: beat(store, 1, 1, "running")).state == "running"
    with pytest.raises(RunError, match="attempt 1, which is alive"):
        require_dead(store, sleep=lambda _: beat(store, 1, 2, "running"))
    with pytest.raises(RunError, match="attempt 2, which is alive"):
        require_dead(store, sleep=lambda _: take_attempt(store, {}))


def test_a_silent_driver_is_dead_after_the_given_time(store: MemoryStore) -> None:
    take_attempt(store, {})
    beat(store, 1, 1, "running")
    slept: list[float] = []
    assert require_dead(store, watch_seconds=3, sleep=slept.append) == 1
    assert sum(slept) == 3
    assert observe(store, 0, sleep=never).state == "silent"
