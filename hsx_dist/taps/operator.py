"""The operator ``hsx_dist::tap``: write the rows of a step into a point's paged cache, and count them.

The operator mutates its counter, a buffer that is an input of the compiled graph. The compiler therefore keeps the
operator, also where nothing reads the tapped tensor later. The tap's number is in a buffer on the host, not in the
graph: layers that are equal otherwise share one compiled graph.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch

#: Entries of a counter: calls of the operator, and rows that it wrote.
CALLS, ROWS = 0, 1
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Target(Protocol):
    """Where a tap's rows go."""

    def rows(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The view ``[blocks, block_size, width]`` of the tap's layer, and the step's slots; None before there are
        any."""


#: Targets by the taps' numbers, for the operator, which gets tensors and integers only. They are their models' own: a
#: process may have one engine after the other, and each target has an engine's whole cache.
_targets: WeakValueDictionary[int, Target] = WeakValueDictionary()
_numbers = itertools.count()


def register(target: Target) -> int:
    """The number of a tap that writes to ``target``, for as long as somebody else holds that."""
    number = next(_numbers)
    _targets[number] = target
    return number


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
        ValueError: another width.
    """
    if x.shape[1] != cache.shape[2]:
        raise ValueError(f"expected rows of {cache.shape[2]}, got {x.shape[1]}")
    if x.dtype != cache.dtype and not _holds(cache.dtype, x.dtype):
        raise TypeError(f"expected rows of {cache.dtype}, got {x.dtype}. The cache would round them")
    if len(x) != len(slots):
        n = min(len(x), len(slots))
        x, slots = x[:n], slots[:n]
    if x.device.type == "cpu":
        _scatter_cpu(x, slots, cache, count)
    elif len(x):
        from hsx_dist.taps.triton_scatter import scatter_triton

        scatter_triton(x, slots, cache, count)


def _scatter_cpu(x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, count: torch.Tensor) -> None:
    # NumPy's assignment copies whole rows: 2048 rows of 4 KiB take a quarter of the time of torch's index_put, and its
    # operators on few numbers cost a fraction of torch's.
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
    """The memory of ``x`` as integers: NumPy has no bfloat16."""
    return x.view(_INTEGERS[x.element_size()]).numpy()


def _holds(cache: torch.dtype, value: torch.dtype) -> bool:
    if cache.is_floating_point:
        return value.is_floating_point and torch.promote_types(cache, value) == cache
    return not value.is_floating_point  # numbers of experts fit any integer


def tap(x: torch.Tensor, count: torch.Tensor, number: torch.Tensor, start: int, width: int) -> None:
    """Write the columns ``start`` to ``start + width`` of ``x`` into the cache of the tap ``number``.

    Args:
        x: ``[tokens, ...]``; the axes after the first make the row.
        count: int64 ``[2]``, on the device of ``x``: calls, and rows written.
        number: int64 ``[1]`` on the host.
    """
    cache, slots = _targets[int(number)].rows()
    if cache is None or slots is None:  # the profiling run, before there is a cache
        count[CALLS] += 1
        return
    if x.dim() != 2:
        x = x.reshape(x.shape[0], -1)
    if x.shape[1] != width:
        x = x[:, start : start + width]
    scatter(x if x.stride(1) == 1 else x.contiguous(), slots, cache, count)


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
