"""The operator ``hsx_dist::tap``: write the rows of a step into a point's paged cache, and count them.

The operator mutates its counter, a buffer that is an input of the compiled graph. So the compiler keeps the operator
even if nothing reads the tapped tensor later. The tap's number is in a buffer on the host, not in the graph, so that
otherwise equal layers share one compiled graph. The number selects a cache in vLLM's forward context, which belongs to
the running engine. This module has no state, so engines of one process share nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import get_forward_context

from hsx_dist.taps.scatter import CALLS, scatter

#: First layer number of the caches' names. vLLM sorts caches by the number, which must be unique.
_FIRST = 100_000
#: More layers than any model has. A tap's number is ``cache * _MAX_LAYERS + at``.
_MAX_LAYERS = 1 << 20


def layer_name(cache: int) -> str:
    """Return vLLM's name of an engine's ``cache``-th cache of points."""
    return f"hsx_taps.{_FIRST + cache}"


def number_of(cache: int, at: int) -> torch.Tensor:
    """Return the number of the tap for the ``at``-th layer in an engine's ``cache``-th cache."""
    return torch.tensor([cache * _MAX_LAYERS + at], dtype=torch.int64, device="cpu")


def tap(x: torch.Tensor, count: torch.Tensor, number: torch.Tensor, start: int, width: int) -> None:
    """Write the columns ``start`` to ``start + width`` of ``x`` into the cache of the tap ``number``.

    Args:
        x: ``[tokens, ...]``; the axes after the first form the row.
        count: int64 ``[2]``, on the device of ``x``: calls, and rows written.
        number: int64 ``[1]`` on the host, ``number_of``.

    Raises:
        RuntimeError: the step has several batches.
    """
    cache, at = divmod(int(number), _MAX_LAYERS)
    name, context = layer_name(cache), get_forward_context()
    if not isinstance(context.slot_mapping, dict):
        raise RuntimeError(f"{name}: expected one batch a step, got {len(context.slot_mapping)} (DBO). Turn it off")
    kv_cache, slots = context.no_compile_layers[name].kv_cache, context.slot_mapping.get(name)
    if slots is None or kv_cache.numel() == 0:  # vLLM profiles its memory before it allocates caches
        count[CALLS] += 1
        return
    if x.dim() != 2:
        x = x.reshape(x.shape[0], -1)
    if x.shape[1] != width:
        x = x[:, start : start + width]
    scatter(x if x.stride(1) == 1 else x.contiguous(), slots, kv_cache[:, at], count)


# ``torch.library.custom_op`` would add microseconds to each call.
_library = torch.library.Library("hsx_dist", "FRAGMENT")
_library.define("tap(Tensor x, Tensor(a!) count, Tensor number, int start, int width) -> ()")
for _key in ("CPU", "CUDA"):
    _library.impl("tap", tap, _key)
_library.impl("tap", lambda *_: None, "Meta")


def put(module: Any, name: str, x: torch.Tensor, start: int, width: int) -> None:
    """Call the operator with the buffers that ``install`` gave ``module`` for the tap ``name``."""
    count, number = getattr(module, f"hsx_count_{name}"), getattr(module, f"hsx_number_{name}")
    if torch.compiler.is_compiling():
        torch.ops.hsx_dist.tap(x, count, number, start, width)
    else:
        tap(x, count, number, start, width)
