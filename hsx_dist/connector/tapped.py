"""The points that the worker ranks of an engine with taps cache, and the check that the taps run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hsx_dist.connector.columns import CapturedPoint
from hsx_dist.connector.connector_config import ConnectorConfig
from hsx_dist.errors import ConfigError, EngineError
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.taps.points import POINTS, shard_of

#: Seconds between two reads of the taps' counters. On a GPU a read waits for the device.
CHECK_S = 10.0


def captured_points(
    caches: Sequence[Any], tensors: Mapping[str, torch.Tensor], *, rank: int, ranks: int, kv_heads: int
) -> list[tuple[CapturedPoint, torch.Tensor]]:
    """Return each captured point and its cache ``[blocks, layers, block_size, width]``, in the order of columns.

    Args:
        caches: ``taps.point_cache.PointCache`` layers.
        tensors: their caches, by layer name.
        rank, ranks: of tensor parallelism.
        kv_heads: key-value heads of the whole model.
    """
    found = {}
    for cache in caches:
        shards = sum(shard_of(cache.point, other, ranks, kv_heads) is not None for other in range(ranks))
        point = CapturedPoint(
            cache.point,
            cache.layers,
            cache.head_size,
            str(cache.kv_cache_torch_dtype).removeprefix("torch."),
            cache.head or 0,
            shard_of(cache.point, rank, ranks, kv_heads),
            shards,
        )
        found[cache.point] = (point, tensors[cache.layer_name])
    return [found[name] for name in POINTS if name in found]


def check_layout(points: Sequence[CapturedPoint], settings: ConnectorConfig) -> None:
    """Refuse points that need several ranks for a sample, if each sample is one object.

    Raises:
        ConfigError: with these points.
    """
    if settings.layout != "sample":
        return
    if settings.one_object:
        bad, why = [p.name for p in points if p.shards > 1], "points whose whole row is on one tensor-parallel rank"
    else:
        bad, why = [p.name for p in points if p.name != HIDDEN_STATES], "hidden_states alone"
    if bad:
        raise ConfigError(
            f"capture: expected {why} with layout 'sample' (one object a sample), got {', '.join(bad)} too. Omit them, "
            "or run a job with layout part"
        )


class TapWatch:
    """Calls ``check`` before the first samples are copied, and every ``CHECK_S`` seconds from then on."""

    def __init__(self, check: Callable[[], int], clock: Callable[[], float] = time.monotonic):
        """``check``: returns the rows that each tap has written, or raises if they differ
        (``taps.install.Installed.check_alive``)."""
        self._check, self._clock = check, clock
        self._next: float | None = None

    def step(self, saves: bool) -> None:
        """Run the check if it is due. Called once a step. ``saves``: samples are about to be copied."""
        due = saves if self._next is None else self._clock() >= self._next
        if due:
            self._look()
            self._next = self._clock() + CHECK_S

    def end(self) -> None:
        """Check once more. Raises ``EngineError``: samples since the previous check may have other rows."""
        if self._next is not None:
            self._look()

    def _look(self) -> None:
        try:
            if self._check() == 0:
                raise EngineError(
                    "taps: expected rows of each step, got none from any tap: a compiled graph without taps runs. Set "
                    "VLLM_DISABLE_COMPILE_CACHE=1"
                )
        except EngineError as e:
            if self._next is None:  # nothing was copied yet
                raise
            raise EngineError(f"{e}. Samples of the last {CHECK_S:g} s may have older rows: compute them again") from e
