"""A replica reports a row when all columns of its sample are shipped, by any ranks, or when it cannot be encoded."""

from __future__ import annotations

from concurrent.futures import Future
from itertools import permutations

import pytest

from hsx_dist.errors import InputError
from hsx_dist.fleet.replica import RunningTask, fate_of
from hsx_dist.fleet.tasks import Task, TaskResult
from hsx_dist.format.manifest import RowFate
from hsx_dist.inputs.encode import OutOfMemory, TooLong
from hsx_dist.inputs.rows import Row
from hsx_dist.transport.shipping import Shipped


@pytest.fixture
def running() -> RunningTask:
    """A task with the row ``k``."""
    return RunningTask(Task(7, ()), TaskResult(7), Future(), {"k"})


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_row_is_answered_with_its_last_column(running: RunningTask, order: tuple[int, ...]) -> None:
    columns = [Shipped("k", None, column, 3) for column in order]
    assert not any(running.ship(one) for one in (*columns[:2], columns[0]))  # one is reported twice
    assert (running.open, running.result.shipped) == ({"k"}, [])
    assert running.ship(columns[2])
    assert (running.open, running.columns, running.result.shipped) == (set(), {}, ["k"])


def test_a_column_that_failed_fails_its_row_once_all_are_reported(running: RunningTask) -> None:
    assert not running.ship(Shipped("k", "no memory", 1, 2))
    assert running.ship(Shipped("k", None, 0, 2))
    assert (running.open, running.result.shipped, running.result.skipped) == (set(), [], [("k", "no memory")])


def test_a_row_of_which_nothing_is_shipped_is_answered_at_once(running: RunningTask) -> None:
    assert running.ship(Shipped("k", "too short"))
    assert (running.open, running.result.skipped) == (set(), [("k", "too short")])


def test_a_row_that_itself_is_the_reason_is_refused_and_not_tried_again() -> None:
    row = Row("k", 3, token_ids=[1])
    running = RunningTask(Task(7, (row,), tries=1), TaskResult(7), Future(), {"k"})
    assert running.ship(Shipped("k", "its mask selects none", final=True))
    assert (running.open, running.result.skipped) == (set(), [])
    assert running.result.refused == [RowFate("k", 3, "refused", "its mask selects none", 1, row.content)]


def test_a_row_without_memory_fails_and_is_not_refused() -> None:
    errors = [OutOfMemory("none"), TooLong("9 tokens"), InputError("none")]
    assert [fate_of(error, "skip") for error in errors] == ["failed", "refused", "refused"]
    assert [fate_of(error, "fail") for error in errors] == ["failed", "failed", "refused"]
