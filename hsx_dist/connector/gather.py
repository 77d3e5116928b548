"""Cache blocks → one contiguous page. torch only, no vLLM: it runs (and is measured) on any machine with torch.

The cache view is ``[blocks, layers, block_size, hidden]`` whatever its memory order; which order it has is read from
the strides. Whole blocks are copied with ``index_select(out=)`` into a reused buffer: rows past the last token are
copied too, and mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

Order = Literal["LTH", "TLH"]


def cache_order(cache: torch.Tensor) -> Order:
    """``"LTH"`` when a block holds layer after layer, ``"TLH"`` when it holds token after token.

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
        f"hidden-state cache of shape {tuple(cache.shape)} has strides {cache.stride()}: expected layer-major or "
        "token-major blocks with contiguous rows; this vLLM lays its cache out in a way that this version does not know"
    )


def page_shape(cache: torch.Tensor, num_blocks: int, order: Order) -> tuple[int, int, int]:
    """Shape of the page that ``num_blocks`` blocks gather into: ``[L, rows, H]`` or ``[rows, L, H]``."""
    _, layers, block, hidden = cache.shape
    rows = num_blocks * block
    return (layers, rows, hidden) if order == "LTH" else (rows, layers, hidden)


def gather(cache: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor, order: Order) -> None:
    """Copy blocks into ``out`` (of ``page_shape``, contiguous, same dtype); ``block_ids``: int64 ``[n]`` on the cache's
    device.

    On a CUDA cache the work is queued on the current stream; ``out`` may be pinned host memory, then a staging
    tensor of the page's size is used on the device.
    """
    num_blocks = block_ids.shape[0]
    blocks, layers, block, hidden = cache.shape
    target = out if out.device == cache.device else torch.empty_like(out, device=cache.device)
    if order == "LTH":
        for layer in range(layers):
            rows = cache[:, layer].as_strided((blocks, block * hidden), (cache.stride(0), 1))
            torch.index_select(rows, 0, block_ids, out=target[layer].view(num_blocks, block * hidden))
    else:
        whole = cache.as_strided((blocks, block, layers * hidden), (cache.stride(0), cache.stride(2), 1))
        if cache.stride(2) == layers * hidden:
            whole = cache.as_strided((blocks, block * layers * hidden), (cache.stride(0), 1))
        torch.index_select(whole, 0, block_ids, out=target.view(num_blocks, *whole.shape[1:]))
    if target is not out:
        out.copy_(target, non_blocking=True)


def gather_rows(cache: torch.Tensor, slots: torch.Tensor, layers: Sequence[int], out: torch.Tensor) -> None:
    """Copy single tokens of some layers into ``out``, contiguous ``[len(layers), n, H]``, same dtype.

    ``slots``: int64 ``[n]`` on the cache's device, ``block * block_size + place in the block``; ``layers``: entries of
    the cache's layer axis. Queued as in ``gather``.
    """
    _, _, block, _ = cache.shape
    blocks, places = slots // block, slots % block
    target = out if out.device == cache.device else torch.empty_like(out, device=cache.device)
    for i, layer in enumerate(layers):
        target[i] = cache[blocks, layer, places]
    if target is not out:
        out.copy_(target, non_blocking=True)
