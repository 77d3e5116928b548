"""The nodes of a Ray cluster: alive, or draining."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Nodes:
    """A snapshot of the cluster.

    ``resources``: resources of the nodes that are alive and do not drain. ``draining``: ids of nodes that are alive and
    drain (a spot machine's notice, an autoscaler, ``ray drain-node``)."""

    resources: dict[str, dict[str, Any]] = field(default_factory=dict)
    draining: frozenset[str] = frozenset()

    def is_alive(self, node: str) -> bool:
        return node in self.resources or node in self.draining


def look() -> Nodes:
    import ray  # here: the state machines use Nodes, and need no Ray
    from ray._private.state import state  # Ray has no public call for it; Serve and Train read the same table

    draining = frozenset(str(node) for node in state.get_draining_nodes())
    alive = {n["NodeID"]: dict(n["Resources"]) for n in ray.nodes() if n["Alive"]}
    staying = {node: resources for node, resources in alive.items() if node not in draining}
    return Nodes(staying, draining & alive.keys())
