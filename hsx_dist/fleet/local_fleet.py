"""The fleet without Ray: one replica and one sink in this process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from hsx_dist.fleet.base import FleetEvent, ReplicaDied, ReplicaReady, TaskDone
from hsx_dist.fleet.replica import Replica
from hsx_dist.fleet.tasks import EngineSpec, Task
from hsx_dist.observe.metrics import Increments
from hsx_dist.store import Store
from hsx_dist.writers.events import Counted
from hsx_dist.writers.sink import PartSink, SinkOptions
from hsx_dist.writers.threads import ThreadSender


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
        except Exception as e:  # noqa: BLE001 - sent to the driver, which raises it
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
        events = drain_queue(self._events.get, timeout)
        numbers = self._increments.counters()
        return [*events, Counted(numbers)] if numbers else events

    def waits_for(self) -> str:
        return "the engine loads"

    def flush(
        self,
        timeout: float | None = None,  # noqa: ARG002 - a flush in this process has no limit
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


def drain_queue(get: Callable[..., FleetEvent], timeout: float) -> list[FleetEvent]:
    """Return all items of a queue. Waits up to ``timeout`` seconds for the first one."""
    events: list[FleetEvent] = []
    try:
        events.append(get(timeout=timeout) if timeout > 0 else get(block=False))
        while True:
            events.append(get(block=False))
    except queue.Empty:
        return events
