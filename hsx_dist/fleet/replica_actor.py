"""A replica on a Ray cluster."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hsx_dist.config.secrets import credential_environment
from hsx_dist.fleet.cpu_binding import prepare_cpu
from hsx_dist.fleet.placement import Placement
from hsx_dist.fleet.tasks import EngineSpec, Task, TaskResult
from hsx_dist.logger import get_logger
from hsx_dist.observe.logs import configure_logging
from hsx_dist.observe.metrics import Meter
from hsx_dist.observe.ray_metrics import RayExport
from hsx_dist.ray_arguments import sendable
from hsx_dist.ray_calls import remote
from hsx_dist.writers.events import Lost
from hsx_dist.writers.ray_pool import RaySender

log = get_logger(__name__)


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
        # In ps, top and py-spy the ranks' processes are then named `hsx replica 0::Worker_TP1`.
        os.environ.setdefault("VLLM_PROCESS_NAME_PREFIX", f"hsx replica {tags['replica']}")
        self._claim = prepare_cpu(spec.ranks, num_cpus)
        from hsx_dist.fleet.replica import Replica

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
        # The process's name in Ray's log lines and dashboard.
        return f"hsx replica {self._tags['replica']}"

    def _sender(self) -> RaySender:
        self._senders.append(
            RaySender(self._writers, self._on_lost, meter=self._meter, abroad_bytes=self._abroad_bytes)
        )
        return self._senders[-1]

    def ready(self) -> str:
        """Block until the engine is up. Returns the node's id."""
        return str(ray.get_runtime_context().get_node_id())

    def run(self, task: Task) -> TaskResult:
        return self._replica.submit(task).result()

    def flush(self) -> None:
        self._replica.flush()

    def set_writers(self, writers: list[tuple[str, Any]]) -> None:
        """Replace the list of writers, after nodes joined or died."""
        self._writers = writers
        for sender in self._senders:
            sender.update(writers)

    def stop(self) -> None:
        self._replica.close()
        self._export.close()

    def _on_lost(self, lost: Lost) -> None:
        # Only for the actor's log. The driver detects the loss by the missing receipts.
        log.warning("pages of %d segments were not taken by their writer: %s", len(lost.segments), lost.reason)


def start_replica(
    spec: EngineSpec,
    writers: list[tuple[str, Any]],
    number: int,
    *,
    placement: Placement,
    num_cpus: float,
    resources: Mapping[str, float],
    environment: Mapping[str, str],
    name: str,
    namespace: str,
) -> tuple[Any, Any]:
    """Start a replica's actor. Returns the actor and its placement group (None if it reserves no resources)."""
    group, scheduling = None, {}
    if placement.total:  # Ray refuses an empty group
        group = ray.util.placement_group(list(placement.bundles), strategy=placement.strategy, name=name)
        scheduling["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            group,
            placement_group_bundle_index=0,
            # The ranks of vLLM's Ray executor must be in the group too.
            placement_group_capture_child_tasks=len(placement.bundles) > 1,
        )
    actor = (
        remote(ReplicaActor)
        .options(
            name=name,
            namespace=namespace,
            num_cpus=num_cpus,
            num_gpus=placement.actor_gpus,
            resources=dict(resources) or None,
            max_concurrency=8,
            **scheduling,
        )
        .remote(
            sendable(spec),
            writers,
            # An argument, because Ray's dashboard shows a runtime_env.
            {**credential_environment(), **environment},
            num_cpus,
            {"run": spec.output, "replica": str(number)},
        )
    )
    return actor, group
