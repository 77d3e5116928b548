"""A replica on a Ray cluster."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import ray

from hsx_dist.jobs.cores import prepare_cpu
from hsx_dist.jobs.tasks import EngineSpec, Task, TaskResult
from hsx_dist.observe.logs import configure_logging
from hsx_dist.observe.metrics import Meter
from hsx_dist.observe.ray_metrics import RayExport
from hsx_dist.writers.events import Lost
from hsx_dist.writers.ray_pool import RaySender

log = logging.getLogger(__name__)


class ReplicaActor:
    """A ``Replica`` in a Ray actor. Its constructor starts the engine."""

    def __init__(
        self,
        spec: EngineSpec,
        writers: list[tuple[str, Any]],
        environment: Mapping[str, str],
        num_cpus: float,
        tags: Mapping[str, str],
    ):
        os.environ.update(environment)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        # Ranks that vLLM starts as processes are then `hsx replica 0::Worker_TP1` to ps, top and py-spy.
        os.environ.setdefault("VLLM_PROCESS_NAME_PREFIX", f"hsx replica {tags['replica']}")
        self._claim = prepare_cpu(spec.ranks, num_cpus)
        from hsx_dist.jobs.replica import Replica

        self._tags = dict(tags)
        configure_logging(logging.INFO, **tags)
        self._writers = writers
        self._abroad_bytes = spec.abroad_bytes
        self._senders: list[RaySender] = []
        self._meter = Meter()
        self._export = RayExport(self._meter, "replica", tags)
        before = time.monotonic()
        self._replica = Replica(spec, self._sender, self._meter, name=tags["replica"])
        log.info("the engine is ready after %.1f s, ranks: %d", time.monotonic() - before, spec.ranks)

    def __repr__(self) -> str:
        # What Ray's log lines and its dashboard call this process.
        return f"hsx replica {self._tags['replica']}"

    def _sender(self) -> RaySender:
        self._senders.append(
            RaySender(self._writers, self._on_lost, meter=self._meter, abroad_bytes=self._abroad_bytes)
        )
        return self._senders[-1]

    def ready(self) -> str:
        """The node's id, once the engine is up."""
        return str(ray.get_runtime_context().get_node_id())

    def run(self, task: Task) -> TaskResult:
        return self._replica.submit(task).result()

    def flush(self) -> None:
        self._replica.flush()

    def set_writers(self, writers: list[tuple[str, Any]]) -> None:
        """The pool has changed: nodes came, or went."""
        self._writers = writers
        for sender in self._senders:
            sender.update(writers)

    def stop(self) -> None:
        self._replica.close()
        self._export.close()

    def _on_lost(self, lost: Lost) -> None:
        # The driver learns it from the receipts that are missing; this line is for whoever reads the actor's log.
        log.warning("pages of %d segments were not taken by their writer: %s", len(lost.segments), lost.reason)
