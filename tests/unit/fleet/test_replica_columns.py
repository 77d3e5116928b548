"""A replica answers for a row when all columns of its sample are shipped, by whichever rank."""

from __future__ import annotations

import queue
from concurrent.futures import Future
from itertools import permutations

import pytest

from hsx_dist.fleet.replica import Replica, _Running
from hsx_dist.fleet.tasks import Task, TaskResult
from hsx_dist.observe.metrics import Increments, Meter
from hsx_dist.transport.shipping import Shipped


def told(*shipped: Shipped) -> tuple[Future[TaskResult], Replica]:
    """A replica without an engine that runs one task of row ``k``, after it was told ``shipped``."""
    replica = Replica.__new__(Replica)
    running = _Running(Task(7, ()), TaskResult(7), Future(), {"k"})
    replica._running, replica._unanswered = {"k": running}, {7: running}
    replica._shipped, replica._increments = queue.SimpleQueue(), Increments(Meter())
    for one in shipped:
        replica._shipped.put(one)
    replica._take_shipped()
    return running.future, replica


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_row_is_answered_with_its_last_column(order: tuple[int, ...]) -> None:
    columns = [Shipped("k", None, column, 3) for column in order]
    future, replica = told(*columns[:2], columns[0])  # one is told twice
    assert not future.done()
    replica._shipped.put(columns[2])
    replica._take_shipped()
    assert future.result(timeout=0).shipped == ["k"]
    assert replica._running == {}


def test_a_column_that_failed_fails_its_row_once_all_are_told() -> None:
    future, replica = told(Shipped("k", "no memory", 1, 2))
    assert not future.done()
    replica._shipped.put(Shipped("k", None, 0, 2))
    replica._shipped.put(Shipped("k", None, 0, 2))
    replica._take_shipped()
    result = future.result(timeout=0)
    assert (result.shipped, result.skipped) == ([], [("k", "no memory")])


def test_a_row_of_which_nothing_is_shipped_is_answered_at_once() -> None:
    future, _ = told(Shipped("k", "too short"))
    assert future.result(timeout=0).skipped == [("k", "too short")]
