"""Placement of a replica's processes: on one node if they fit, else on several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hsx_dist.config import ReplicaConfig
from hsx_dist.errors import ConfigError
from hsx_dist.fleet.tasks import EngineSpec

Resources = dict[str, float]


@dataclass(frozen=True, slots=True)
class Placement:
    """A Ray placement group for one replica. The replica's actor takes the first of ``bundles``.

    If vLLM starts the ranks as children of the actor, one bundle has all GPUs. If vLLM's Ray executor starts them, each
    rank has a bundle with one GPU, as the executor requires, and rank 0 is on the actor's node.
    """

    bundles: tuple[Resources, ...]
    strategy: Literal["STRICT_PACK", "PACK"]
    #: GPUs of the actor. 0 with the Ray executor, because the ranks take them.
    actor_gpus: float

    @property
    def total(self) -> Resources:
        """Sum of all bundles' resources, without zeros."""
        names = {name for bundle in self.bundles for name in bundle}
        sums = {name: sum(bundle.get(name, 0.0) for bundle in self.bundles) for name in sorted(names)}
        return {name: amount for name, amount in sums.items() if amount}

    @property
    def spans_nodes(self) -> bool:
        return self.strategy == "PACK"


def place(replica: ReplicaConfig, spec: EngineSpec, nodes: Sequence[Mapping[str, float]]) -> Placement:
    """Return the placement of replicas of ``spec`` on nodes with these Ray resources.

    An autoscaler's future nodes are unknown: a replica that fits on no present node spans nodes.

    Raises:
        ConfigError: ranks must span nodes, and there are no GPUs: vLLM's Ray executor does not run on CPUs.
    """
    gpus = replica.num_gpus
    if gpus is None:
        gpus = float(spec.ranks) if any(node.get("GPU", 0) for node in nodes) else 0.0
    base = {**replica.resources, "CPU": replica.num_cpus}
    chosen = spec.engine_kwargs.get("distributed_executor_backend")
    fits = any(node.get("GPU", 0) + 1e-9 >= gpus for node in nodes)
    if chosen == "ray" or (gpus > 1 and spec.ranks > 1 and chosen is None and not fits):
        if not gpus:
            raise ConfigError(
                "engine_kwargs.distributed_executor_backend: expected GPUs for 'ray', got a cluster without GPUs; "
                "vLLM's Ray executor does not run on CPUs. Remove the setting: a replica's ranks then start on one node"
            )
        bundles = ({**base, "GPU": 1.0}, *({"GPU": 1.0} for _ in range(spec.ranks - 1)))
        return Placement(bundles, "STRICT_PACK" if fits else "PACK", actor_gpus=0.0)
    return Placement(({**base, **({"GPU": gpus} if gpus else {})},), "STRICT_PACK", actor_gpus=gpus)


def placed_spec(spec: EngineSpec, placement: Placement) -> EngineSpec:
    """Return ``spec`` for this placement: with the Ray executor if each rank has a bundle, else with child processes.

    vLLM's default in a placement group is always the Ray executor. With it only rank 0 ships, because vLLM places it
    on the actor's node, where the socket for pages is.
    """
    kwargs: dict[str, Any] = dict(spec.engine_kwargs)
    if len(placement.bundles) > 1:
        return replace(spec, engine_kwargs={**kwargs, "distributed_executor_backend": "ray"}, owners=1)
    if spec.ranks > 1:
        kwargs.setdefault("distributed_executor_backend", "mp")
    return replace(spec, engine_kwargs=kwargs)
