"""Copy rows to their slots in a paged cache. CUDA's kernel is in ``triton_scatter``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

#: Indices in a counter: calls of the operator, and rows that it wrote.
CALLS, ROWS = 0, 1
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def scatter(x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, count: torch.Tensor) -> None:
    """Copy ``x[i]`` to the cache's slot ``slots[i]``.

    Adds 1 to ``count[CALLS]``, and the number of copied rows to ``count[ROWS]``.

    Args:
        x: ``[n, width]``; the last axis is contiguous. It may have more rows than ``slots``: padding.
        slots: ``[m]``, ``block * block_size + position``. Rows of slots below 0 are skipped.
        cache: ``[blocks, block_size, width]``, any strides whose last is 1.
        count: int64 ``[2]``, on the same device.

    Raises:
        TypeError: the cache cannot hold the values of ``x``.
        ValueError: another width, or fewer rows than slots.
    """
    if x.shape[1] != cache.shape[2]:
        raise ValueError(f"expected rows of {cache.shape[2]} numbers, got {x.shape[1]}")
    if x.dtype != cache.dtype and not _holds(cache.dtype, x.dtype):
        raise TypeError(f"expected rows of {cache.dtype}, got {x.dtype}. The cache would round them")
    n = len(slots)
    if len(x) < n:  # with fewer rows than slots, rows would be written for wrong tokens
        raise ValueError(
            f"expected a row for each of {n} tokens, got {len(x)}. This rank has only some tokens. Use source: cache"
        )
    if len(x) > n:
        x = x[:n]
    if x.device.type == "cpu":
        _scatter_cpu(x, slots, cache, count)
    elif n:
        from hsx_dist.taps.triton_scatter import scatter_triton

        scatter_triton(x, slots, cache, count)


def _scatter_cpu(x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, count: torch.Tensor) -> None:
    # NumPy's assignment copies whole rows: 2048 rows of 4 KiB take a quarter of the time of torch's index_put. Its
    # operators on small arrays also cost a fraction of torch's.
    to, numbers = slots.numpy(), count.numpy()
    rows = _bits(x if x.dtype == cache.dtype else x.to(cache.dtype))
    if to.size and to.min() < 0:
        written = to >= 0
        rows, to = rows[written], to[written]
    block, position = np.divmod(to, cache.shape[1])
    _bits(cache)[block, position] = rows
    numbers[CALLS] += 1
    numbers[ROWS] += len(to)


def _bits(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the memory of ``x`` as integers: NumPy has no bfloat16."""
    return x.view(_INTEGERS[x.element_size()]).numpy()


def _holds(cache: torch.dtype, value: torch.dtype) -> bool:
    if cache.is_floating_point:
        return value.is_floating_point and torch.promote_types(cache, value) == cache
    return not value.is_floating_point  # ids of experts fit into any integer dtype
