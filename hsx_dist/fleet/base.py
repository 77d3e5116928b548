"""What the driver works with: replicas to give tasks to, and writers that tell what is durable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hsx_dist.fleet.tasks import Task, TaskResult
from hsx_dist.writers.events import Counted, Event


@dataclass(frozen=True, slots=True)
class ReplicaReady:
    replica: int


@dataclass(frozen=True, slots=True)
class ReplicaLeaving:
    """The replica's node drains: it goes on with the tasks it has, and gets no more."""

    replica: int


@dataclass(frozen=True, slots=True)
class ReplicaUnreached:
    """The replica cannot be reached, and will be told as dead once it is known of what, if it is: it gets no more
    tasks."""

    replica: int


@dataclass(frozen=True, slots=True)
class ReplicaDied:
    """The replica is gone (or never came up), and with it whatever of its tasks has no receipt. ``fatal``: the engine
    refused to start, and so would the next one. ``blameless``: it went with its node, or its connection broke."""

    replica: int
    reason: str
    fatal: bool = False
    blameless: bool = False


@dataclass(frozen=True, slots=True)
class NodeGone:
    """A node with writers is gone, and with it what they had not stored."""

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
    """Replicas and writers of one attempt. Replicas have numbers that are never used again."""

    def start(self) -> None:
        """Begin to start replicas; each is announced by ``ReplicaReady``."""
        ...

    def submit(self, replica: int, task: Task) -> None: ...

    def poll(self, timeout: float) -> list[FleetEvent]:
        """What happened since the last call; waits up to ``timeout`` seconds for something."""
        ...

    def flush(self, timeout: float | None = None, *, hurry: Callable[[], bool] | None = None) -> list[FleetEvent]:
        """Make durable all that replicas have shipped; what happened by then. After ``timeout`` seconds, or when
        ``hurry`` says so, the call returns before everything is durable, and reports nothing of the rest."""
        ...

    def close(self, *, quickly: bool = False) -> None:
        """End everything. ``quickly``: kill engines instead of letting them end themselves."""
        ...
