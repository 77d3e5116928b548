"""Creates the fleet on a Ray cluster from a configuration and the cluster's resources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ray

from hsx_dist.config import ExtractConfig
from hsx_dist.config.secrets import credential_environment
from hsx_dist.fleet.capacity import affordable_abroad, affordable_credit, check_capacity, check_output
from hsx_dist.fleet.placement import place, placed_spec
from hsx_dist.fleet.ray_fleet import ClusterShape, RayFleet
from hsx_dist.fleet.tasks import EngineSpec
from hsx_dist.writers.ray_pool import PoolWriterSpec
from hsx_dist.writers.sink import SinkOptions


def ray_fleet(
    config: ExtractConfig,
    spec: EngineSpec,
    options: Callable[[str], SinkOptions],
    *,
    name: str,
    folder: str,
    token: str,
) -> RayFleet:
    """Return the fleet of a configuration, on the cluster to which this driver is connected.

    Its writers store below ``folder`` of the output, which has an attempt with ``token``.

    Raises:
        ConfigError: the output is one node's local disk, or no node can hold a replica.
    """
    nodes = [n for n in ray.nodes() if n["Alive"]]
    resources = [n["Resources"] for n in nodes]
    if not config.store.shared:
        check_output(config.output, len(nodes))
    placement = place(config.replica, spec, resources)
    if not config.wait_seconds:
        check_capacity(config, placement, resources)
    shape = ClusterShape(
        replicas=config.max_replicas,
        placement=placement,
        replica_cpus=config.replica.num_cpus,
        replica_resources=config.replica.resources,
        replica_env=config.replica.env,
        writers_per_node=config.writers.per_node,
        writer_cpus=config.writers.num_cpus,
        writer_threads=config.writers.threads,
    )
    credit = affordable_credit(config, nodes)
    environment = credential_environment()

    def writer(writer_name: str) -> PoolWriterSpec:
        return PoolWriterSpec(
            output=config.output,
            folder=folder,
            token=token,
            storage_options=config.store.storage_options,
            backend=config.store.backend,
            retry_seconds=config.store.retry_seconds,
            environment=environment,
            options=options(writer_name),
            credit_bytes=credit,
            tags={"run": spec.output, "writer": writer_name},
        )

    placed = placed_spec(spec, placement)
    placed = replace(placed, abroad_bytes=affordable_abroad(config, placed, placement, nodes))
    return RayFleet(placed, writer, shape, name=name)
