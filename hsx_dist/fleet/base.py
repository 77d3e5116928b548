"""The driver's interface to a fleet: replicas that run tasks, and writers that report durable parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hsx_dist.fleet.tasks import Task, TaskResult
from hsx_dist.writers.events import Counted, Event

#: Replicas that die one after the other without a finished task, and are replaced.
MAX_FAILURES = 3


@dataclass(frozen=True, slots=True)
class ReplicaReady:
    replica: int


@dataclass(frozen=True, slots=True)
class ReplicaLeaving:
    """The replica's node drains. It finishes its tasks and gets no new ones."""

    replica: int


@dataclass(frozen=True, slots=True)
class ReplicaUnreached:
    """The replica cannot be reached and gets no new tasks. If it is dead, ``ReplicaDied`` follows with the cause."""

    replica: int


@dataclass(frozen=True, slots=True)
class ReplicaDied:
    """The replica is dead, or did not start. Rows of its tasks without a receipt are lost.

    ``fatal``: no replica replaces it, and no other is left. ``blameless``: its node died or drains, or its connection
    broke. ``drained``: it was ended because its node drains, and had no task left."""

    replica: int
    reason: str
    fatal: bool = False
    blameless: bool = False
    drained: bool = False


@dataclass(frozen=True, slots=True)
class NodeGone:
    """A node with writers died. Pages that its writers had not stored are lost."""

    node: str


@dataclass(frozen=True, slots=True)
class Draining:
    """The driver's own node drains."""


@dataclass(frozen=True, slots=True)
class TaskDone:
    replica: int
    result: TaskResult


FleetEvent = (
    ReplicaReady | ReplicaLeaving | ReplicaUnreached | ReplicaDied | NodeGone | Draining | TaskDone | Event | Counted
)


class Fleet(Protocol):
    """Replicas and writers of one attempt. A replica's number is never used again."""

    def start(self) -> None:
        """Start replicas in the background. ``ReplicaReady`` reports each replica that is up."""
        ...

    def submit(self, replica: int, task: Task) -> None: ...

    def poll(self, timeout: float) -> list[FleetEvent]:
        """Return the events since the last call. Waits up to ``timeout`` seconds for the first one."""
        ...

    def waits_for(self) -> str:
        """Return why no replica is ready, for the user."""
        ...

    def flush(self, timeout: float | None = None, *, hurry: Callable[[], bool] | None = None) -> list[FleetEvent]:
        """Block until everything that replicas have shipped is durable. Returns the events until then.

        Returns early after ``timeout`` seconds, or when ``hurry`` returns true. Later events are then missing."""
        ...

    def close(self, *, quickly: bool = False) -> None:
        """End all replicas and writers. ``quickly``: kill engines instead of shutting them down."""
        ...
