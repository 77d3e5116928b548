"""States straight into vLLM's cache: one copy instead of its three (``cache_writes="direct"``).

vLLM (0.31, 0.32; the V1 runner) stacks the captured layers, copies the stack into a buffer, and scatters that into the
cache. The rows of each layer can go to their places at once; what then lies in the cache is the same, bit by bit. Taken
where the proposer's method is called, since vLLM has no switch: other engines of the process are left alone, and so is
data parallelism, whose ranks agree on their batches in what is left out here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from hsx_dist.logger import get_logger

log = get_logger(__name__)


def write_rows(cache: torch.Tensor, slots: torch.Tensor, layers: Sequence[torch.Tensor]) -> None:
    """Put the rows of every layer into the cache.

    Args:
        cache: ``[blocks, layers, block_size, hidden]``, in either memory order, see ``flat_rows``.
        slots: ``[n]`` on the cache's device, ``block_id * block_size + position in the block``; what is below 0 is
            padding and goes into block 0, which belongs to no request.
        layers: a tensor ``[n, hidden]`` of the cache's dtype for every layer.
    """
    hidden, block = cache.shape[3], cache.shape[2]
    s_block, s_layer, s_token = (stride // hidden for stride in cache.stride()[:3])
    rows = flat_rows(cache)
    slots = slots.clamp_min(0).long()
    first = (slots // block) * s_block + (slots % block) * s_token
    for position, states in enumerate(layers):
        rows.index_copy_(0, first + position * s_layer if position else first, states)


def flat_rows(cache: torch.Tensor) -> torch.Tensor:
    """The cache's memory as rows ``[n, hidden]``: a view.

    Raises:
        ValueError: its rows do not lie where a multiple of their length does.
    """
    hidden = cache.shape[3]
    if cache.stride(3) != 1 or any(stride % hidden for stride in cache.stride()[:3]):
        raise ValueError(f"expected strides that are multiples of the rows' length {hidden}, came {cache.stride()}")
    last = sum((n - 1) * s for n, s in zip(cache.shape[:3], cache.stride()[:3], strict=True))
    return cache.as_strided((last // hidden + 1, hidden), (hidden, 1))


def take_over(layer: Any) -> None:
    """Have states written directly into the cache of ``layer``, an engine's ``CacheOnlyAttentionLayer``."""
    layer.hsx_direct_writes = True
    from vllm.v1.spec_decode.extract_hidden_states import ExtractHiddenStatesProposer

    if getattr(ExtractHiddenStatesProposer.propose, "hsx", False):
        return
    theirs = ExtractHiddenStatesProposer.propose
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def propose(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not hasattr(self, "hsx_cache"):
            self.hsx_cache = _cache_of(self)
        if self.hsx_cache is None:
            return theirs(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        layers = given["target_hidden_states"]
        write_rows(self.hsx_cache, given["common_attn_metadata"].slot_mapping[: len(layers[0])], layers)
        return given["sampled_token_ids"][:, :1]  # as vLLM's: the "draft" is what was just sampled

    propose.hsx = True  # type: ignore[attr-defined]
    ExtractHiddenStatesProposer.propose = propose


def _cache_of(proposer: Any) -> torch.Tensor | None:
    """The cache that a proposer's engine wants to be written to directly; None where vLLM's own way is taken."""
    config = proposer.vllm_config
    layer = config.compilation_config.static_forward_context[proposer.attn_layer_names[0]]
    if not getattr(layer, "hsx_direct_writes", False):
        return None
    if config.parallel_config.data_parallel_size > 1:
        log.warning("cache_writes='direct' is ignored: the engine is data parallel")
        return None
    try:
        flat_rows(layer.kv_cache)
    except ValueError as e:
        log.warning("cache_writes='direct' is ignored: %s", e)
        return None
    return layer.kv_cache  # type: ignore[no-any-return]
