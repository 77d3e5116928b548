"""Reports to Ray that a node will shut down, so that a run stores the node's pages and continues on other nodes."""

from __future__ import annotations

import os
import time

from hsx_dist.errors import ConfigError


def drain_node(seconds: float, *, address: str | None = None, node: str | None = None) -> str:
    """Mark a node as draining. Its machine is expected to stop in ``seconds``. Returns the node's id.

    Args:
        seconds: time until the machine stops.
        address: the cluster's address, ``HOST:PORT``. Default: ``RAY_ADDRESS``, else the cluster of this machine.
        node: the node's id or IP address. Default: this machine's node.

    Raises:
        ConfigError: there is no such cluster or node, or Ray refuses to drain it.
    """
    import ray
    from ray._private.services import canonicalize_bootstrap_address
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # Cython's
    from ray.core.generated import autoscaler_pb2, gcs_pb2

    found = canonicalize_bootstrap_address(address or os.environ.get("RAY_ADDRESS"))
    if found is None:
        raise ConfigError(
            "expected a running Ray cluster on this machine, got none. Give its address, or set RAY_ADDRESS"
        )
    gcs = GcsClient(address=found)
    wanted = node or ray.util.get_node_ip_address()
    alive = {
        info.node_id.hex(): info.node_manager_address
        for info in gcs.get_all_node_info().values()
        if info.state == gcs_pb2.GcsNodeInfo.GcsNodeState.ALIVE
    }
    ids = [node_id for node_id, ip in alive.items() if wanted in (node_id, ip)]
    if len(ids) != 1:
        raise ConfigError(
            f"expected one living node at {wanted}, got {len(ids)} in a cluster of {len(alive)}. Give a node's id "
            "(ray list nodes)"
        )
    deadline = time.time_ns() // 10**6 + int(seconds * 1000)
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why = gcs.drain_node(ids[0], reason, "its machine will stop (hsx drain)", deadline)
    if not accepted:
        raise ConfigError(
            f"expected Ray to drain node {ids[0]}, got a refusal: {why}. Check the node's state with `ray list nodes`"
        )
    return ids[0]
