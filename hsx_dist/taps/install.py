"""Hooks on a loaded model that write the chosen points into cache-only layers, and the check that each one runs.

The hooks are installed before the model is compiled, so that the compiler traces them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hsx_dist.errors import ConfigError, EngineError
from hsx_dist.taps import operator
from hsx_dist.taps.capture_config import capture_of, check_engine, embeds_first
from hsx_dist.taps.point_cache import PointCache
from hsx_dist.taps.points import POINTS, Plan, plan_capture
from hsx_dist.taps.structure import Read, Structure, find_structure, modules_of


@dataclass(frozen=True, slots=True)
class Installed:
    """The taps of one model.

    Attributes:
        caches: the cache of each point.
        counts: for each tap, ``(point, layer)``, its counter.
        numbers: for each tap, the buffer with the number that selects the operator's cache.
    """

    plan: Plan
    caches: dict[str, PointCache]
    counts: dict[tuple[str, int], torch.Tensor]
    numbers: dict[tuple[str, int], torch.Tensor]

    def calls_and_rows(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Return the number of runs and of written rows of each tap. Blocks until the device's work is done."""
        values = torch.stack(list(self.counts.values())).tolist()
        return {tap: (calls, rows) for tap, (calls, rows) in zip(self.counts, values, strict=True)}

    def check_alive(self, rows: int | None = None) -> int:
        """Check that every tap ran, and that all wrote the same number of rows.

        A tap that the compiler removed, or that a cached graph lacks, leaves old rows in its blocks. These are wrong
        numbers, but not zeros.

        Args:
            rows: the expected number of rows; None: that of the other taps.

        Returns:
            The rows that each tap has written.

        Raises:
            EngineError: some taps differ; the message names them.
        """
        found = self.calls_and_rows()
        expected = max(n for _, n in found.values()) if rows is None else rows
        ran = any(calls for calls, _ in found.values())  # an eager engine on CPU does not run its model at start
        bad = [
            f"{point} of layer {layer} ({n} rows)"
            for (point, layer), (calls, n) in found.items()
            if n != expected or (not calls and ran)
        ]
        if bad:
            raise EngineError(
                f"taps: expected {expected} rows from each, got another number from {', '.join(bad)}. The model does "
                "not run these modules, or a compiled graph lacks them. Set VLLM_DISABLE_COMPILE_CACHE=1, or omit "
                "these points"
            )
        return expected


def tap_model(model: nn.Module, vllm_config: Any) -> Installed | None:
    """Install the taps that ``vllm_config`` asks for on a model that was just loaded; None if it asks for none.

    Raises:
        ConfigError: the engine, the model or the choice of points is refused.
    """
    capture = capture_of(vllm_config)
    if capture is None:
        return None
    if (found := getattr(model, "hsx_taps", None)) is not None:
        return found  # type: ignore[no-any-return]  # by another loader: a second set of hooks would count all rows twice
    check_engine(vllm_config)
    config = vllm_config.model_config
    ranks = vllm_config.parallel_config.tensor_parallel_size
    structure = find_structure(model, config.get_hidden_size(), ranks, embeds_first=embeds_first(config))
    points = capture.get("points") or {}
    if isinstance(points, dict):
        for point in points.keys() & structure.refused.keys():
            raise ConfigError(f"capture.points.{point}: {structure.refused[point]}. Omit this point")
    plan = plan_capture(capture, structure.num_layers, structure.has)
    installed = install(model, structure, plan, vllm_config)
    model.hsx_taps = installed
    return installed


def install(model: nn.Module, structure: Structure, plan: Plan, vllm_config: Any) -> Installed:
    """Install the hooks and caches of ``plan``."""
    device = next(model.parameters()).device
    caches: dict[str, PointCache] = {}
    counts: dict[tuple[str, int], torch.Tensor] = {}
    numbers: dict[tuple[str, int], torch.Tensor] = {}
    for point, at, layer, read in modules_of(structure, plan.points):
        if point not in caches:
            dtype = _dtype(point, read, vllm_config.model_config.dtype)
            name = operator.layer_name(len(caches))
            caches[point] = PointCache(vllm_config, name, point, plan.points[point], read.width, dtype, read.head)
        # Reads are grouped by point, so this point's cache is the last one.
        number = numbers[point, layer] = operator.number_of(len(caches) - 1, at)
        counts[point, layer] = _tap(read, point, number, device)
    installed = Installed(plan, caches, counts, numbers)
    for cache in caches.values():
        cache.taps = installed
    return installed


def _dtype(point: str, read: Read, model: torch.dtype) -> torch.dtype:
    if fixed := POINTS[point].dtype:
        return getattr(torch, fixed)  # type: ignore[no-any-return]
    if point == "router_logits":
        return getattr(read.module, "out_dtype", None) or getattr(read.module, "params_dtype", None) or model
    return model


def _tap(read: Read, point: str, number: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Put one tap on its module, and return its counter."""
    count = torch.zeros(2, dtype=torch.int64, device=device)
    module = read.module
    if read.source in ("ids", "weights"):
        _tap_router(module, 0 if read.source == "weights" else 1, count, number, read.width)
        return count
    module.register_buffer(f"hsx_count_{point}", count, persistent=False)
    module.register_buffer(f"hsx_number_{point}", number, persistent=False)
    put = functools.partial(operator.put, name=point, start=read.start, width=read.width)
    if read.source == "input":
        module.register_forward_pre_hook(_input_hook(put))
    elif read.source == "output":
        module.register_forward_hook(_output_hook(put))
    else:
        # Without a residual yet, the stream is the norm's input. It is read before the norm may overwrite it.
        module.register_forward_pre_hook(_first_stream_hook(put), with_kwargs=True)
        module.register_forward_hook(_stream_hook(put))
    return count


Put = Callable[..., None]


def _input_hook(put: Put) -> Callable[..., None]:
    def hook(module: Any, args: tuple[Any, ...]) -> None:
        put(module, x=args[0])

    return hook


def _output_hook(put: Put) -> Callable[..., None]:
    def hook(module: Any, _: Any, out: Any) -> None:
        put(module, x=out[0] if isinstance(out, tuple) else out)

    return hook


def _first_stream_hook(put: Put) -> Callable[..., None]:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (args[1] if len(args) > 1 else kwargs.get("residual")) is None:
            put(module, x=args[0])

    return hook


def _stream_hook(put: Put) -> Callable[..., None]:
    def hook(module: Any, _: Any, out: Any) -> None:
        if isinstance(out, tuple):
            put(module, x=out[1])

    return hook


def _tap_router(router: Any, which: int, count: torch.Tensor, number: torch.Tensor, width: int) -> None:
    """Write the router's weights (0) or ids (1). The router is not a module, so it has no hooks."""
    theirs = router.select_experts

    @functools.wraps(theirs)
    def select_experts(*args: Any, **kwargs: Any) -> Any:
        found = theirs(*args, **kwargs)
        if torch.compiler.is_compiling():
            torch.ops.hsx_dist.tap(found[which], count, number, 0, width)
        else:
            operator.tap(found[which], count, number, 0, width)
        return found

    router.select_experts = select_experts
