"""The state machine of a replica, from the driver's side. Does not use Ray.

``after`` is a pure function. It returns the next state, the fleet's actions and the driver's events.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from hsx_dist.fleet.base import FleetEvent, ReplicaDied, ReplicaLeaving, ReplicaReady, ReplicaUnreached, TaskDone
from hsx_dist.fleet.tasks import Task, TaskResult


class ReplicaPhase(Enum):
    STARTING = auto()
    WAITING = auto()  #: the engine is up, but no writer is: its pages could not be stored
    READY = auto()
    LEAVING = auto()  #: its node drains: it finishes its tasks
    UNREACHABLE = auto()  #: its calls fail, and Ray has not reported yet whether it is dead
    GONE = auto()


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One replica. ``failures``: consecutive deaths before this replica. ``node``: empty until the engine is up.
    ``replaced``: another replica was started, because this one's node drains."""

    number: int
    failures: int = 0
    phase: ReplicaPhase = ReplicaPhase.STARTING
    node: str = ""
    tasks: tuple[Task, ...] = ()
    replaced: bool = False


# -- inputs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The engine is up, on ``node``."""

    node: str


@dataclass(frozen=True, slots=True)
class WritersReady:
    """A writer is up."""


@dataclass(frozen=True, slots=True)
class NodeDrains:
    """The replica's node drains."""


@dataclass(frozen=True, slots=True)
class TaskGiven:
    task: Task


@dataclass(frozen=True, slots=True)
class TaskAnswered:
    result: TaskResult


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A call failed, and Ray has not reported whether the replica is dead."""


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """The replica is dead, or treated as dead (``cut_off``: it may be alive). ``with_node``: it died with its node.
    ``hopeless``: no replica of this attempt was ever up. ``last``: it is the only replica."""

    reason: str
    with_node: bool = False
    cut_off: bool = False
    hopeless: bool = False
    last: bool = False


ReplicaInput = Started | WritersReady | NodeDrains | TaskGiven | TaskAnswered | CallFailed | ReplicaLost


# -- actions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartReplica:
    """Start another replica. ``failures``: consecutive deaths before this replica."""

    failures: int = 0


@dataclass(frozen=True, slots=True)
class EndReplica:
    """Kill the actor. ``flush``: after it has shipped its pages."""

    flush: bool


#: An event goes to the driver.
Action = StartReplica | EndReplica | FleetEvent


def after(state: ReplicaState, happened: ReplicaInput, *, max_failures: int) -> tuple[ReplicaState, list[Action]]:
    """Return the next state and the actions. After more than ``max_failures`` consecutive deaths, starts no replica."""
    phase, number = state.phase, state.number
    if phase is ReplicaPhase.GONE:
        return state, []
    match happened:
        case Started(node):
            return replace(state, phase=ReplicaPhase.WAITING, node=node), []
        case WritersReady() if phase is ReplicaPhase.WAITING:
            return replace(state, phase=ReplicaPhase.READY), [ReplicaReady(number)]
        case NodeDrains() if phase is not ReplicaPhase.STARTING and not state.replaced:
            if phase is not ReplicaPhase.UNREACHABLE:  # else it keeps its tasks until Ray reports if it is dead
                phase = ReplicaPhase.LEAVING
            left, done = _ended_if_idle(replace(state, phase=phase, replaced=True))
            return left, [ReplicaLeaving(number), StartReplica(), *done]
        case TaskGiven(task):
            return replace(state, tasks=(*state.tasks, task)), []
        case TaskAnswered(result):
            tasks = tuple(task for task in state.tasks if task.number != result.number)
            left, done = _ended_if_idle(replace(state, tasks=tasks, failures=0))
            return left, [TaskDone(number, result), *done]
        case CallFailed() if phase is not ReplicaPhase.UNREACHABLE:
            return replace(state, phase=ReplicaPhase.UNREACHABLE), [ReplicaUnreached(number)]
        case ReplicaLost():
            return replace(state, phase=ReplicaPhase.GONE, tasks=()), _lost(state, happened, max_failures)
    return state, []


def _ended_if_idle(state: ReplicaState) -> tuple[ReplicaState, list[Action]]:
    if state.phase is not ReplicaPhase.LEAVING or state.tasks:
        return state, []
    died = ReplicaDied(state.number, "its node drains", blameless=True, drained=True)
    return replace(state, phase=ReplicaPhase.GONE), [EndReplica(flush=True), died]


def _lost(state: ReplicaState, lost: ReplicaLost, max_failures: int) -> list[Action]:
    """Return the actions after a replica's death."""
    blameless = lost.with_node or lost.cut_off
    # If a task is alone on its engine, the task's row is the cause, and not the engine.
    alone = any(task.alone for task in state.tasks) and not lost.cut_off
    failures = state.failures + (not lost.with_node and not alone)
    hopeless = lost.hopeless and not state.node and not blameless
    again = not hopeless and failures <= max_failures and not state.replaced
    died = ReplicaDied(state.number, lost.reason, fatal=not again and lost.last, blameless=blameless)
    return [*([StartReplica(failures)] if again else []), EndReplica(flush=False), died]
