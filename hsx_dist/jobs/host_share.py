"""The host memory that states take between vLLM's cache and the store, from a configuration."""

from __future__ import annotations

from dataclasses import dataclass

from hsx_dist.config import ExtractConfig


@dataclass(frozen=True, slots=True)
class HostShare:
    """Upper limits in bytes. The memory of vLLM and of the processes comes in addition.

    ``ring``: the rings of one replica, one for each tensor-parallel rank. ``writer``: pages that one writer encodes,
    and encoded bytes that it has not stored. ``writers``: number of writers on each node.
    """

    ring: int
    writer: int
    writers: int


def host_share(config: ExtractConfig) -> HostShare:
    """The share for the writers and replicas of a configuration. The pool ``threads`` has one writer."""
    ranks = int(config.engine_kwargs.get("tensor_parallel_size", 1))
    writers = config.writers.per_node if config.pool == "ray" else 1
    return HostShare(ranks * int(config.in_flight_bytes), writer_bytes(config), writers)


def writer_bytes(config: ExtractConfig) -> int:
    """Limit of pages that a writer encodes and of encoded bytes that it has not stored, with their metadata."""
    return int(config.writers.credit_bytes) + int(config.part_bytes)
