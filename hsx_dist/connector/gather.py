"""Gather cache blocks into one contiguous page. Needs torch but no vLLM, so it can be measured without an engine.

The cache view is ``[blocks, layers, block_size, hidden]`` in any memory order; the strides show the order. ``Runs`` are
the places of a request's contiguous runs, computed once. A gather is then one ``index_select`` for a page, or on a
device for several. It reads an overlapping view of the cache with a row for each possible start of a run.
``benchmarks/gather.py`` compares it with memcpy, ``benchmarks/gpu/copies.py`` with a device's copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

Order = Literal["LTH", "TLH"]

#: On a CPU, index_select copies rows below ATen's grain size with memcpy, and longer ones with a slower loop.
_MAX_RUN = 32767
#: Rows that ``mean_rows`` gathers at once.
MEAN_ROWS = 1024


def cache_order(cache: torch.Tensor) -> Order:
    """Return ``"LTH"`` if a block is stored layer by layer, ``"TLH"`` if it is stored token by token.

    Raises:
        ValueError: a layout in which neither a layer's nor a block's rows are contiguous.
    """
    _, layers, block, hidden = cache.shape
    _, s_layer, s_token, s_hidden = cache.stride()
    if s_hidden == 1 and (s_token == hidden or block == 1) and (s_layer >= block * hidden or layers == 1):
        return "LTH"
    if s_hidden == 1 and (s_layer == hidden or layers == 1) and s_token >= layers * hidden:
        return "TLH"
    raise ValueError(
        "hidden-state cache: expected layer-major or token-major blocks with contiguous rows, got shape "
        f"{tuple(cache.shape)} with strides {cache.stride()}. Install a tested vLLM release"
    )


def page_shape(cache: torch.Tensor, num_blocks: int, order: Order) -> tuple[int, int, int]:
    """Return the shape of the page of ``num_blocks`` blocks: ``[L, rows, H]`` or ``[rows, L, H]``."""
    _, layers, block, hidden = cache.shape
    rows = num_blocks * block
    return (layers, rows, hidden) if order == "LTH" else (rows, layers, hidden)


@dataclass(frozen=True, slots=True)
class Runs:
    """Contiguous runs of a cache, in units: blocks, or tokens if only some tokens or layers are copied.

    ``view``: ``[starts, length]``, an overlapping view of the cache with a row for each possible start of a run.
    ``units``: int64 ``[n, runs]`` on the cache's device, rows of ``view`` for each unit. ``outer``: int64
    ``[1, layers, 1, 1]``, to be added for each layer; None: the units hold all layers.
    """

    view: torch.Tensor
    units: torch.Tensor
    outer: torch.Tensor | None

    @classmethod
    def of(cls, cache: torch.Tensor, length: int, step: int, units: torch.Tensor, outer: torch.Tensor) -> Runs:
        """``length``: elements of a run. ``step``: elements that ``units`` and ``outer`` (``[layers]``) count."""
        span = sum((n - 1) * s for n, s in zip(cache.shape, cache.stride(), strict=True)) + 1
        view = cache.as_strided(((span - length) // step + 1, length), (step, 1))
        if len(outer) == 1:
            return cls(view, units + outer, None)
        return cls(view, units, outer[None, :, None, None])

    def copy_to(self, *outs: torch.Tensor, start: int = 0, stop: int | None = None) -> None:
        """Copy units ``[start, stop)`` into ``outs``: contiguous tensors of the cache's dtype, with equal shares.

        For a CUDA cache the work is queued on the current stream. ``outs`` may then be pinned host memory, for which
        staging memory of their size is allocated on the device.

        Raises:
            ValueError: the units do not fill ``outs``.
        """
        if outs[0].numel() == 0:
            return
        units = self.units[start:stop]
        index = units.view(len(outs), 1, -1, units.shape[1])
        if self.outer is not None:
            index = index + self.outer
        index = index.reshape(len(outs), -1)
        found, wanted = index.numel() * self.view.shape[1], sum(out.numel() for out in outs)
        if found != wanted:  # torch would resize the views, and leave earlier bytes in the memory below
            raise ValueError(f"expected blocks with {wanted} values, got {found} values. Report this as a bug")
        if outs[0].device == self.view.device:
            for out, one in zip(outs, index, strict=True):
                torch.index_select(self.view, 0, one, out=out.view(-1, self.view.shape[1]))
            return
        staged = torch.index_select(self.view, 0, index.view(-1)).view(len(outs), -1)
        for out, one in zip(outs, staged.unbind(), strict=True):
            out.view(-1).copy_(one, non_blocking=True)


def block_runs(cache: torch.Tensor, block_ids: torch.Tensor, order: Order) -> Runs:
    """Return the runs of whole blocks, which fill outputs of ``page_shape``. Units are blocks.

    Rows after the last token are copied too, with undefined values. ``block_ids``: int64 ``[n]`` on the cache's device.
    """
    length, step, scale, outer, inner = _runs_of_a_block(
        cache.shape, cache.stride(), order, cache.device, _stream_id(cache.device)
    )
    return Runs.of(cache, length, step, block_ids[:, None] * scale + inner, outer)


def row_runs(cache: torch.Tensor, slots: torch.Tensor, layers: Sequence[int]) -> Runs:
    """Return the runs of any tokens of some layers, for outputs ``[len(layers), tokens, hidden]``. Units are tokens.

    Args:
        cache: ``[blocks, layers, block_size, hidden]``, in either order.
        slots: int64 ``[n]`` on the cache's device: ``block_id * block_size + position in the block``, in any order,
            also repeated. The caller must check them: a check here would synchronise the device.
        layers: positions on the cache's layer axis (not layer ids), in the order of the output.

    Raises:
        ValueError: the last axis is not contiguous, or there is no such layer.
    """
    _, available, block, hidden = cache.shape
    s_block, s_layer, s_token, s_hidden = cache.stride()
    if s_hidden != 1 and hidden > 1:
        raise ValueError(
            f"expected a cache whose rows are contiguous, got strides {cache.stride()}. Install a tested vLLM release"
        )
    wrong = [layer for layer in layers if not 0 <= layer < available]
    if wrong:
        raise ValueError(f"expected layer positions from 0 to {available - 1}, got {wrong}")
    step = math.gcd(s_block, s_layer, s_token) or 1
    start = (slots // block) * (s_block // step) + (slots % block) * (s_token // step)
    steps = _layer_steps(tuple(layers), s_layer // step, cache.device, _stream_id(cache.device))
    return Runs.of(cache, hidden, step, start[:, None], steps)


def mean_rows(cache: torch.Tensor, slots: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
    """Return the mean of the rows of some tokens, float32 ``[len(layers), 1, hidden]`` on the cache's device.

    Arguments as for ``row_runs``. ``MEAN_ROWS`` rows at a time are summed in float32, and these sums in float64. So
    the mean of a long request is as exact as that of a short one. Allocates ``MEAN_ROWS`` rows of the layers.
    """
    hidden = cache.shape[3]
    runs = row_runs(cache, slots, layers)
    total = torch.zeros(len(layers), hidden, dtype=torch.float64, device=cache.device)
    for start in range(0, len(slots), MEAN_ROWS):
        stop = min(start + MEAN_ROWS, len(slots))
        rows = torch.empty(len(layers), stop - start, hidden, dtype=cache.dtype, device=cache.device)
        runs.copy_to(rows, start=start, stop=stop)
        total += rows.sum(dim=1, dtype=torch.float32)
    return (total / len(slots)).float()[:, None]


def _stream_id(device: torch.device) -> int:
    """Return the stream's id, a key of the caches below.

    A tensor that one stream still fills is not ready for another stream. The streams of two connectors in a process are
    not synchronised.
    """
    return torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0


@lru_cache(maxsize=64)
def _runs_of_a_block(
    shape: tuple[int, ...], strides: tuple[int, ...], order: Order, device: torch.device, _stream: int
) -> tuple[int, int, int, torch.Tensor, torch.Tensor]:
    """Return how to read a block: (run, step, steps per block, outer offsets, inner offsets).

    ``run``: elements of a contiguous run. ``step``: elements between the rows of the view; offsets count such steps.
    Outer offsets are those of the layers if the page is layer-major, else one zero. Inner offsets are those of the
    runs.
    """
    _, layers, block, hidden = shape
    s_block, s_layer, s_token, _ = strides
    if order == "LTH":
        outer, rows = [layer * s_layer for layer in range(layers)], [0]
        length = block * hidden
    else:
        outer, rows = [0], [0]
        length = block * layers * hidden
        if s_token != layers * hidden and block > 1:  # padding after each token
            rows, length = [token * s_token for token in range(block)], layers * hidden
    parts = _parts(length // hidden, hidden)
    run = length // parts
    inner = [row + i * run for row in rows for i in range(parts)]
    step = math.gcd(s_block, *outer, *inner) or 1

    def steps(offsets: list[int]) -> torch.Tensor:
        return to_device(torch.tensor([offset // step for offset in offsets], dtype=torch.int64), device)

    return run, step, s_block // step, steps(outer), steps(inner)


@lru_cache(maxsize=64)
def _layer_steps(layers: tuple[int, ...], step: int, device: torch.device, _stream: int) -> torch.Tensor:
    return to_device(torch.tensor([layer * step for layer in layers], dtype=torch.int64), device)


def to_device(indices: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy host ``indices`` to ``device``.

    For CUDA, the copy is queued on the current stream and reads pinned memory. A copy from pageable memory would block
    the host until all work queued on the stream ends.
    """
    return indices.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else indices.to(device)


def _parts(rows: int, hidden: int) -> int:
    """Return the number of equal runs that divide ``rows`` contiguous rows, each short enough for memcpy."""
    return next((n for n in range(1, rows + 1) if rows % n == 0 and rows // n * hidden <= _MAX_RUN), rows)
