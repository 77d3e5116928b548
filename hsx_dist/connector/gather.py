"""Gather cache blocks into one contiguous page. Needs torch but no vLLM, so it can be measured without an engine.

The cache view is ``[blocks, layers, block_size, hidden]`` in any memory order; the strides show the order. A gather is
one ``index_select(out=)`` into a reused buffer. It reads an overlapping view of the cache with a row for each possible
start of a contiguous run. ``benchmarks/gather.py`` compares it with memcpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def gather(cache: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor, order: Order) -> None:
    """Copy whole blocks into ``out`` (of ``page_shape``, contiguous, same dtype).

    Rows after the last token are copied too, with undefined values. ``block_ids``: int64 ``[n]`` on the cache's device.
    For a CUDA cache the work is queued on the current stream. ``out`` may then be pinned host memory, for which a
    staging tensor of the page's size is allocated on the device.
    """
    runs, step, scale, outer, inner = _block_runs(
        cache.shape, cache.stride(), order, cache.device, _stream_id(cache.device)
    )
    index = outer[:, None, None] + block_ids[None, :, None] * scale + inner
    _select(cache, runs, step, index, out)


def gather_rows(cache: torch.Tensor, slots: torch.Tensor, layers: Sequence[int], out: torch.Tensor) -> None:
    """Copy the rows of any tokens and of some layers into ``out``.

    Args:
        cache: ``[blocks, layers, block_size, hidden]``, in either order.
        slots: int64 ``[n]`` on the cache's device: ``block_id * block_size + position in the block``, in any order,
            also repeated. The caller must check them: a check here would synchronise the device.
        layers: positions on the cache's layer axis (not layer ids), in the order of the output.
        out: ``[len(layers), n, hidden]``, contiguous, of the cache's dtype; on the cache's device, or pinned host
            memory as with ``gather``.

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
    _select(cache, hidden, step, steps[:, None] + start, out)


def mean_rows(cache: torch.Tensor, slots: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
    """Return the mean of the rows of some tokens, float32 ``[len(layers), 1, hidden]`` on the cache's device.

    Arguments as for ``gather_rows``. ``MEAN_ROWS`` rows at a time are summed in float32, and these sums in float64. So
    the mean of a long request is as exact as that of a short one. Allocates ``MEAN_ROWS`` rows of the layers.
    """
    hidden = cache.shape[3]
    total = torch.zeros(len(layers), hidden, dtype=torch.float64, device=cache.device)
    for start in range(0, len(slots), MEAN_ROWS):
        some = slots[start : start + MEAN_ROWS]
        rows = torch.empty(len(layers), len(some), hidden, dtype=cache.dtype, device=cache.device)
        gather_rows(cache, some, layers, rows)
        total += rows.sum(dim=1, dtype=torch.float32)
    return (total / len(slots)).float()[:, None]


def _select(cache: torch.Tensor, length: int, step: int, index: torch.Tensor, out: torch.Tensor) -> None:
    """Copy into ``out``, for each ``index``, the ``length`` elements from ``index * step`` of the cache."""
    if index.numel() == 0:
        return
    span = sum((n - 1) * s for n, s in zip(cache.shape, cache.stride(), strict=True)) + 1
    runs = cache.as_strided(((span - length) // step + 1, length), (step, 1))
    target = out if out.device == cache.device else torch.empty_like(out, device=cache.device)
    torch.index_select(runs, 0, index.reshape(-1), out=target.view(-1, length))
    if target is not out:
        out.copy_(target, non_blocking=True)


def _stream_id(device: torch.device) -> int:
    """Return the stream's id, a key of the caches below.

    A tensor that one stream still fills is not ready for another stream. The streams of two connectors in a process are
    not synchronised.
    """
    return torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0


@lru_cache(maxsize=64)
def _block_runs(
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
