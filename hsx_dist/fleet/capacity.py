"""Checks of a cluster against a configuration: resources for the fleet, and an output that all nodes can reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hsx_dist.config import ExtractConfig
from hsx_dist.errors import ConfigError
from hsx_dist.fleet.placement import Placement
from hsx_dist.fleet.tasks import EngineSpec
from hsx_dist.logger import get_logger

log = get_logger(__name__)


def check_output(output: str, nodes: int) -> None:
    """Raise ``ConfigError`` for an output on a local disk if the cluster has several nodes."""
    local = "://" not in output or output.startswith(("file://", "local://", "memory://"))
    if local and nodes > 1:
        raise ConfigError(
            f"output: expected a place that all {nodes} nodes share, got {output!r}, which is a local disk on each "
            "node. Use an object store's URL (s3://…, gs://…), or set store.shared=true if it is a shared file system"
        )


def affordable_credit(config: ExtractConfig, nodes: Sequence[Mapping[str, Any]]) -> int:
    """Return one writer's credit in bytes: as configured, but at most its share of half the node's object store.

    A full object store spills to disk without an error.

    Raises:
        ConfigError: half of a node's object store does not hold two pages for each writer.
    """
    wanted = int(config.writers.credit_bytes)
    smallest = min(int(n["Resources"].get("object_store_memory", 0)) for n in nodes)
    most = smallest // 2 // config.writers.per_node
    if most < 2 * int(config.page_bytes):
        raise ConfigError(
            f"writers: expected an object store that holds four pages ({4 * int(config.page_bytes)} bytes) for each of "
            f"{config.writers.per_node} writers on every node, got one of {smallest} bytes. Start Ray with a larger "
            "--object-store-memory, or lower page_bytes or writers.per_node"
        )
    if most < wanted:
        log.warning(
            "writers.credit_bytes %d is lowered to %d: half of the smallest object store, %d bytes, is shared by %d "
            "writers", wanted, most, smallest, config.writers.per_node
        )  # fmt: skip
    return min(wanted, most)


def affordable_abroad(
    config: ExtractConfig, spec: EngineSpec, placement: Placement, nodes: Sequence[Mapping[str, Any]]
) -> int:
    """Return the default limit of unacknowledged bytes from one sender to writers on other nodes.

    These bytes occupy the object store of the sender's node. A quarter of that store is for all senders that fit on a
    node, and half is for the credits of the node's writers."""
    resources = [n["Resources"] for n in nodes]
    smallest = min(int(have.get("object_store_memory", 0)) for have in resources)
    most = config.max_replicas
    if placement.total and not placement.spans_nodes:
        most = min(most, max(fitting(have, placement.total) for have in resources))
    senders = spec.ranks if spec.owners is None else spec.owners
    return smallest // 4 // max(most * senders, 1)


def fitting(node: Mapping[str, float], wanted: Mapping[str, float]) -> int:
    """Return how many replicas fit on a node with these resources, if each takes ``wanted`` (not empty)."""
    return min(int(node.get(name, 0) / amount + 1e-9) for name, amount in wanted.items())


def fits_writers(node: Mapping[str, float], cpus: float) -> bool:
    """Whether writers are started on a node. A head node with ``--num-cpus=0`` gets none."""
    return node.get("CPU", 0) >= cpus


def check_capacity(config: ExtractConfig, placement: Placement, nodes: Sequence[Mapping[str, float]]) -> None:
    """Raise ``ConfigError`` if ``nodes`` (their Ray resources) cannot hold ``min_replicas`` and the writers.

    Without this check the replicas wait in Ray forever, and the job's log does not show why.
    """
    wanted = placement.total
    writers = config.writers.per_node * config.writers.num_cpus
    if not any(fits_writers(node, writers) for node in nodes):
        raise ConfigError(
            f"writers: expected a node with {writers:g} CPUs for its writers, got nodes with "
            f"{[node.get('CPU', 0) for node in nodes]}. Lower writers.per_node or writers.num_cpus"
        )
    if placement.spans_nodes:
        check_total_capacity(config, wanted, nodes, writers)
        return
    replicas = 0
    for node in nodes:
        taken = writers if fits_writers(node, writers) else 0
        free = {**node, "CPU": node.get("CPU", 0) - taken}
        replicas += fitting(free, wanted) if wanted else config.min_replicas
    if replicas < config.min_replicas:
        have = ", ".join(
            "{" + ", ".join(f"{name}: {node.get(name, 0):g}" for name in sorted(wanted)) + "}" for node in nodes
        )
        raise ConfigError(
            f"min_replicas: expected room for {config.min_replicas} replicas of "
            f"{', '.join(f'{amount:g} {name}' for name, amount in sorted(wanted.items()))} each, and for writers of "
            f"{writers:g} CPUs on each node, got nodes with {have}: room for {replicas}. Lower replica.num_cpus, "
            "writers.num_cpus or min_replicas, or add nodes"
        )


def check_total_capacity(
    config: ExtractConfig, wanted: Mapping[str, float], nodes: Sequence[Mapping[str, float]], writers: float
) -> None:
    """Do ``check_capacity`` for replicas that span nodes. Checks only the sums, because Ray places the bundles."""
    have = {name: sum(node.get(name, 0) for node in nodes) for name in wanted}
    have["CPU"] = have.get("CPU", 0) - writers * sum(fits_writers(node, writers) for node in nodes)
    short = [name for name, amount in wanted.items() if have[name] + 1e-9 < amount * config.min_replicas]
    if short:
        raise ConfigError(
            f"min_replicas: expected room for {config.min_replicas} replicas that span nodes, "
            f"{', '.join(f'{amount:g} {name}' for name, amount in sorted(wanted.items()))} each, got a cluster with "
            f"too little {', '.join(sorted(short))}. Lower min_replicas or tensor_parallel_size, or add nodes"
        )
