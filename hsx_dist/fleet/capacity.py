"""Whether a cluster has room for what a configuration asks of it, and whether all its nodes can reach the output."""

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
    """Raises ConfigError for an output on a node's own disk when there are several nodes."""
    local = "://" not in output or output.startswith(("file://", "local://", "memory://"))
    if local and nodes > 1:
        raise ConfigError(
            f"output: expected a place that all {nodes} nodes share, came {output!r}, which each node would take for a "
            "disk of its own; use an object store's URL (s3://…, gs://…), or set store.shared=true if it is a shared "
            "file system"
        )


def affordable_credit(config: ExtractConfig, nodes: Sequence[Mapping[str, Any]]) -> int:
    """Bytes of credit of one writer: as configured, or what keeps all of a node's below half of its object store, which
    spills to disk when it is full rather than say so.

    Raises:
        ConfigError: that half has no room for two pages a writer.
    """
    wanted = int(config.writers.credit_bytes)
    smallest = min(int(n["Resources"].get("object_store_memory", 0)) for n in nodes)
    most = smallest // 2 // config.writers.per_node
    if most < 2 * int(config.page_bytes):
        raise ConfigError(
            f"writers: expected an object store that holds four pages ({4 * int(config.page_bytes)} bytes) for each of "
            f"{config.writers.per_node} writers on every node, came one of {smallest} bytes; start Ray with a larger "
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
    """Bytes that one sender may have at other nodes' writers: they lie in its own node's object store as well, of which
    a quarter is for all senders that fit on a node. The credits of that node's writers have a half."""
    resources = [n["Resources"] for n in nodes]
    smallest = min(int(have.get("object_store_memory", 0)) for have in resources)
    most = config.max_replicas
    if placement.total and not placement.spans_nodes:
        most = min(most, max(fitting(have, placement.total) for have in resources))
    senders = spec.ranks if spec.owners is None else spec.owners
    return smallest // 4 // max(most * senders, 1)


def fitting(node: Mapping[str, float], wanted: Mapping[str, float]) -> int:
    """How many replicas, of which each takes ``wanted`` (not empty), a node of these resources holds."""
    return min(int(node.get(name, 0) / amount + 1e-9) for name, amount in wanted.items())


def fits_writers(node: Mapping[str, float], cpus: float) -> bool:
    """Whether writers are made on a node. A head that gives its CPUs to nobody (``--num-cpus=0``) gets none."""
    return node.get("CPU", 0) >= cpus


def check_capacity(config: ExtractConfig, placement: Placement, nodes: Sequence[Mapping[str, float]]) -> None:
    """Raises ConfigError when the nodes (their Ray resources) have no room for ``min_replicas``, with their writers.

    Ray would let the replicas wait for ever, and say so to nobody who looks at the job.
    """
    wanted = placement.total
    writers = config.writers.per_node * config.writers.num_cpus
    if not any(fits_writers(node, writers) for node in nodes):
        raise ConfigError(
            f"writers: expected a node with {writers:g} CPUs for its writers, came nodes with "
            f"{[node.get('CPU', 0) for node in nodes]}; lower writers.per_node or writers.num_cpus"
        )
    if placement.spans_nodes:
        check_total_capacity(config, wanted, nodes, writers)
        return
    room = 0
    for node in nodes:
        taken = writers if fits_writers(node, writers) else 0
        free = {**node, "CPU": node.get("CPU", 0) - taken}
        room += fitting(free, wanted) if wanted else config.min_replicas
    if room < config.min_replicas:
        have = ", ".join(
            "{" + ", ".join(f"{name}: {node.get(name, 0):g}" for name in sorted(wanted)) + "}" for node in nodes
        )
        raise ConfigError(
            f"min_replicas: expected room for {config.min_replicas} replicas of "
            f"{', '.join(f'{amount:g} {name}' for name, amount in sorted(wanted.items()))} each, beside writers of "
            f"{writers:g} CPUs on each node, came nodes with {have}: room for {room}; lower replica.num_cpus, "
            "writers.num_cpus or min_replicas, or add nodes"
        )


def check_total_capacity(
    config: ExtractConfig, wanted: Mapping[str, float], nodes: Sequence[Mapping[str, float]], writers: float
) -> None:
    """``check_capacity`` for replicas that span nodes: the sums have to do, as Ray packs the rest."""
    have = {name: sum(node.get(name, 0) for node in nodes) for name in wanted}
    have["CPU"] = have.get("CPU", 0) - writers * sum(fits_writers(node, writers) for node in nodes)
    short = [name for name, amount in wanted.items() if have[name] + 1e-9 < amount * config.min_replicas]
    if short:
        raise ConfigError(
            f"min_replicas: expected room for {config.min_replicas} replicas that span nodes, "
            f"{', '.join(f'{amount:g} {name}' for name, amount in sorted(wanted.items()))} each, came a cluster that "
            f"has too little of {', '.join(sorted(short))}; lower min_replicas or tensor_parallel_size, or add nodes"
        )
