"""The state machine of a replica, as tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hsx_dist.fleet.base import ReplicaDied, ReplicaLeaving, ReplicaReady, ReplicaUnreached, TaskDone
from hsx_dist.fleet.replica_states import (
    CallFailed,
    EndReplica,
    NodeDrains,
    ReplicaLost,
    ReplicaPhase,
    ReplicaState,
    Started,
    StartReplica,
    TaskAnswered,
    TaskGiven,
    WritersReady,
    after,
)
from hsx_dist.fleet.tasks import Task, TaskResult

STARTING, WAITING, READY, LEAVING, UNREACHABLE, GONE = ReplicaPhase
FIRST, SECOND, ALONE = Task(1, ()), Task(2, ()), Task(3, (), alone=True)
ANSWER = TaskResult(1)


def state(phase, **more):
    known = {"node": "" if phase is STARTING else "a", "replaced": phase is LEAVING, **more}
    return ReplicaState(7, phase=phase, **known)


def died(reason="killed", **more):
    return ReplicaDied(7, reason, **more)


def step(before, happened):
    return after(before, happened, max_failures=3)


BUSY = {"tasks": (FIRST,)}
DRAINED = [EndReplica(flush=True), died("its node drains", blameless=True, drained=True)]


@pytest.mark.parametrize(
    ("before", "happened", "left", "actions"),
    [
        (state(STARTING), Started("a"), state(WAITING), []),
        (state(STARTING), WritersReady(), state(STARTING), []),
        (state(STARTING), NodeDrains(), state(STARTING), []),
        (state(STARTING), CallFailed(), state(UNREACHABLE, node=""), [ReplicaUnreached(7)]),
        (state(WAITING), WritersReady(), state(READY), [ReplicaReady(7)]),
        (state(WAITING), NodeDrains(), state(GONE, replaced=True), [ReplicaLeaving(7), StartReplica(0), *DRAINED]),
        (state(READY), WritersReady(), state(READY), []),
        (state(READY), TaskGiven(FIRST), state(READY, **BUSY), []),
        (state(READY, failures=2, **BUSY), TaskAnswered(ANSWER), state(READY), [TaskDone(7, ANSWER)]),
        (state(READY, **BUSY), NodeDrains(), state(LEAVING, **BUSY), [ReplicaLeaving(7), StartReplica(0)]),
        (state(READY, **BUSY), CallFailed(), state(UNREACHABLE, **BUSY), [ReplicaUnreached(7)]),
        (state(LEAVING, **BUSY), NodeDrains(), state(LEAVING, **BUSY), []),
        (state(LEAVING, tasks=(FIRST, SECOND)), TaskAnswered(ANSWER), state(LEAVING, tasks=(SECOND,)),
         [TaskDone(7, ANSWER)]),
        (state(LEAVING, **BUSY), TaskAnswered(ANSWER), state(GONE, replaced=True), [TaskDone(7, ANSWER), *DRAINED]),
        (state(UNREACHABLE, **BUSY), CallFailed(), state(UNREACHABLE, **BUSY), []),
        (state(UNREACHABLE), NodeDrains(), state(UNREACHABLE, replaced=True), [ReplicaLeaving(7), StartReplica(0)]),
        (state(UNREACHABLE, **BUSY), TaskAnswered(ANSWER), state(UNREACHABLE), [TaskDone(7, ANSWER)]),
        (state(GONE), Started("a"), state(GONE), []),
        (state(GONE), ReplicaLost("killed"), state(GONE), []),
    ],
)  # fmt: skip
def test_each_state_after_what_happened(before, happened, left, actions):
    assert step(before, happened) == (left, actions)


@pytest.mark.parametrize(
    ("before", "lost", "again", "fatal", "blameless"),
    [
        # a death counts, up to max_failures in a row; a death with its node does not
        (state(READY), {}, 1, False, False),
        (state(READY, failures=2), {}, 3, False, False),
        (state(READY, failures=3), {}, None, False, False),
        (state(READY, failures=3), {"last": True}, None, True, False),
        (state(READY, failures=3), {"with_node": True}, 3, False, True),
        # stopped without an answer: it may be alive, so its rows are not blamed; its kind is
        (state(UNREACHABLE, failures=1), {"cut_off": True}, 2, False, True),
        (state(UNREACHABLE, failures=3), {"cut_off": True, "last": True}, None, True, True),
        # a row that is alone in its engine is blamed, unless the engine may be alive
        (state(READY, failures=3, tasks=(ALONE,)), {}, 3, False, False),
        (state(UNREACHABLE, failures=1, tasks=(ALONE,)), {"cut_off": True}, 2, False, True),
        # no engine of this run ever started, nor did this one
        (state(STARTING), {"hopeless": True, "last": True}, None, True, False),
        (state(STARTING), {"hopeless": True}, None, False, False),
        (state(STARTING), {"hopeless": True, "with_node": True}, 0, False, True),
        (state(STARTING), {}, 1, False, False),
        # its replacement was started when its node began to drain
        (state(LEAVING), {"with_node": True}, None, False, True),
        (state(UNREACHABLE, replaced=True), {}, None, False, False),
    ],
)
def test_a_replica_that_is_lost(before, lost, again, fatal, blameless):
    left, actions = step(before, ReplicaLost("killed", **lost))
    started = [] if again is None else [StartReplica(again)]
    assert actions == [*started, EndReplica(flush=False), died(fatal=fatal, blameless=blameless)]
    assert left == replace(before, phase=GONE, tasks=())
