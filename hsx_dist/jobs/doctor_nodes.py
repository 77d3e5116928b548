"""Checks of every node of a Ray cluster. Each runs in a task on the node, with the driver's credentials."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

import hsx_dist
from hsx_dist.config import ExtractConfig
from hsx_dist.config.secrets import credential_environment
from hsx_dist.errors import ConfigError, HsxError
from hsx_dist.fleet.capacity import affordable_credit, check_capacity, check_output
from hsx_dist.fleet.placement import place
from hsx_dist.fleet.ray_errors import reason_of
from hsx_dist.jobs import preflight
from hsx_dist.jobs.connect import connect_ray
from hsx_dist.jobs.diagnosis import Diagnosis, machine_limits, probe_store
from hsx_dist.jobs.extract import engine_spec
from hsx_dist.ray_arguments import sendable
from hsx_dist.ray_calls import remote

#: Seconds for a node's answer. Its worker process must start, and import its modules.
NODE_SECONDS = 120.0


def check_cluster(config: ExtractConfig) -> list[Diagnosis]:
    """Check resources and budgets as the driver sees them, then each node.

    Raises:
        ConfigError: there is no cluster.
    """
    connect_ray()
    nodes = [n for n in ray.nodes() if n["Alive"]]
    found = [Diagnosis("cluster", "ok", f"{len(nodes)} nodes: {_total(nodes)}")]
    found += check_budgets(config, nodes)
    for node, checks in ask_nodes(config, nodes):
        found += [replace(check, name=f"{node}: {check.name}") for check in checks]
    return found


def check_budgets(config: ExtractConfig, nodes: Sequence[Mapping[str, Any]]) -> Iterator[Diagnosis]:
    """Check the output, the object store and the room for replicas against Ray's list of the nodes."""
    resources = [n["Resources"] for n in nodes]
    try:
        placement = place(config.replica, engine_spec(config, preflight.examine_model(config)), resources)
        if not config.store.shared:
            check_output(config.output, len(nodes))
        check_capacity(config, placement, resources)
        where = "spanning nodes, by Ray's executor" if placement.spans_nodes else "each on one node"
        yield Diagnosis("room", "ok", f"for {config.min_replicas} replicas, {where}, and their writers")
    except ConfigError as e:
        # With ``wait_seconds``, an autoscaler may still add the missing nodes.
        yield Diagnosis("room", "warn" if config.wait_seconds else "fail", str(e))
    try:
        credit, wanted = affordable_credit(config, nodes), int(config.writers.credit_bytes)
    except ConfigError as e:
        yield Diagnosis("object store", "fail", str(e))
        return
    smallest = min(int(r.get("object_store_memory", 0)) for r in resources) >> 20
    if credit < wanted:
        message = (
            f"the smallest has {smallest:,} MiB: each writer gets {credit >> 20:,} MiB of credit, not the "
            f"{wanted >> 20:,} of writers.credit_bytes; start Ray with a larger --object-store-memory"
        )
        yield Diagnosis("object store", "warn", message)
    else:
        yield Diagnosis(
            "object store", "ok", f"the smallest has {smallest:,} MiB; {credit >> 20:,} MiB for each writer"
        )


def ask_nodes(config: ExtractConfig, nodes: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Diagnosis]]]:
    """Yield (node's address, its checks). All nodes run their checks at once."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = {}
    for node in nodes:
        # No CPUs: it also runs on a node without free CPUs. Credentials are an argument, which Ray never shows.
        task = remote(examine_node).options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        )
        has_gpu = bool(node["Resources"].get("GPU"))
        asked[node["NodeManagerAddress"], node["NodeID"]] = task.remote(
            sendable(config), credential_environment(), has_gpu, versions()
        )
    for (address, node_id), ref in asked.items():
        name = address if len({a for a, _ in asked}) == len(asked) else f"{address} {node_id[:6]}"
        try:
            yield name, ray.get(ref, timeout=NODE_SECONDS)
        except GetTimeoutError:
            ray.cancel(ref, force=True)
            message = f"expected an answer within {NODE_SECONDS:.0f} s, got none. Look at the node's Ray logs"
            yield name, [Diagnosis("probe", "fail", message)]
        except RayError as e:
            message = (
                f"expected to run a task there, got: {reason_of(e)}. Install hsx-dist with the driver's versions on "
                "every node, or submit the job with a runtime environment that does"
            )
            yield name, [Diagnosis("probe", "fail", message)]


def examine_node(
    config: ExtractConfig, environment: Mapping[str, str], has_gpu: bool, expected_versions: str
) -> list[Diagnosis]:
    """Check the node on which this function runs. ``expected_versions``: the driver's versions."""
    os.environ.update(environment)
    found: list[Diagnosis] = []
    try:
        found.append(Diagnosis("store", "ok", probe_store(config)))
    except HsxError as e:
        found.append(Diagnosis("store", "fail", str(e)))
    found += machine_limits(int(config.in_flight_bytes), has_gpu=has_gpu)
    if (here := versions()) == expected_versions:
        found.append(Diagnosis("versions", "ok", here))
    else:
        message = (
            f"expected the driver's versions, {expected_versions}, got {here}. Use one image or environment for all"
        )
        found.append(Diagnosis("versions", "fail", message))
    return found


def versions() -> str:
    """The versions that must be the same on every node, in one line."""
    try:
        vllm = preflight.installed("vllm")
    except ConfigError:
        vllm = "none"
    python = ".".join(platform.python_version_tuple()[:2])
    return f"Python {python}, hsx {hsx_dist.__version__}, vllm {vllm}, ray {ray.__version__}"


def _total(nodes: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(
        f"{sum(n['Resources'].get(name, 0) for n in nodes):g} {name}"
        for name in ("CPU", "GPU")
        if any(n["Resources"].get(name) for n in nodes)
    )
