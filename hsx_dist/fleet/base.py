"""What the driver works with: replicas to give tasks to, and writers that tell what is durable."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hsx_dist.fleet.replica import Replica
from hsx_dist.fleet.tasks import EngineSpec, Task, TaskResult
from hsx_dist.observe.metrics import Increments
from hsx_dist.store import Store
from hsx_dist.writers.events import Counted, Event
from hsx_dist.writers.sink import PartSink, SinkOptions
from hsx_dist.writers.threads import ThreadSender


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
        ``hurry`` says so, what is not durable yet is left to its fate, which nothing is told of."""
        ...

    def close(self, *, quickly: bool = False) -> None:
        """End everything. ``quickly``: kill engines instead of letting them end themselves."""
        ...


class LocalFleet:
    """One replica and one sink in this process: no Ray."""

    def __init__(self, spec: EngineSpec, store: Store, options: SinkOptions, threads: int):
        self._spec = spec
        self._events: queue.SimpleQueue[FleetEvent] = queue.SimpleQueue()
        self._sink = PartSink(store, options, self._events.put)
        self._increments = Increments(self._sink.meter)
        self._threads = threads
        self._replica: Replica | None = None

    def start(self) -> None:
        threading.Thread(target=self._start_replica, name="hsx-start", daemon=True).start()

    def _start_replica(self) -> None:
        try:
            self._replica = Replica(self._spec, lambda: ThreadSender(self._sink, self._threads))
        except Exception as e:  # noqa: BLE001 - told to the driver, which raises it
            self._events.put(ReplicaDied(0, str(e), fatal=True))
        else:
            self._events.put(ReplicaReady(0))

    def submit(self, replica: int, task: Task) -> None:
        assert replica == 0
        assert self._replica is not None
        self._replica.submit(task).add_done_callback(
            lambda f: self._events.put(
                ReplicaDied(0, str(e), fatal=True) if (e := f.exception()) else TaskDone(0, f.result())
            )
        )

    def poll(self, timeout: float) -> list[FleetEvent]:
        events = drain(self._events.get, timeout)
        numbers = self._increments.counters()
        return [*events, Counted(numbers)] if numbers else events

    def flush(
        self,
        timeout: float | None = None,  # noqa: ARG002 - whoever stops us ends it
        *,
        hurry: Callable[[], bool] | None = None,  # noqa: ARG002
    ) -> list[FleetEvent]:
        if self._replica is not None:
            self._replica.flush()
        self._sink.flush()
        return self.poll(0)

    def close(self, *, quickly: bool = False) -> None:  # noqa: ARG002 - the engine ends with the process
        if self._replica is not None:
            self._replica.close()
        self._sink.close()


def drain(get: Callable[..., FleetEvent], timeout: float) -> list[FleetEvent]:
    """Everything in a queue, after waiting up to ``timeout`` seconds for the first of it."""
    events: list[FleetEvent] = []
    try:
        events.append(get(timeout=timeout) if timeout > 0 else get(block=False))
        while True:
            events.append(get(block=False))
    except queue.Empty:
        return events
