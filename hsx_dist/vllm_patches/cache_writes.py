"""The V1 runner's writes into the hidden-state cache: captured layers are counted, and optionally written in one copy.

Versions: vLLM 0.31, 0.32 and 0.33 with the V1 runner. Upstream: no issue is open. The V2 runner counts the layers
itself, and has no option for direct writes here.

What vLLM does: ``ExtractHiddenStatesProposer.propose`` stacks the captured layers, copies the stack into a buffer, and
scatters the buffer into the cache. It does not compare the number of captured layers with the number requested. If the
model captures one layer instead of two, the copy broadcasts it to both.

The patch, for engines whose connector called ``watch``:

- ``propose`` raises if the model captured another number of layers than requested.
- With ``cache_writes: direct`` it writes the rows of each layer into the cache with one copy instead of three. The
  cache's content is the same, bit by bit.

How a change of vLLM is noticed: ``watch`` does not find the class, its method or the method's arguments. It logs a
warning; then captured layers are not counted, and ``cache_writes: direct`` is ignored.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hsx_dist.errors import ConfigError
from hsx_dist.logger import get_logger
from hsx_dist.vllm_patches.no_drafts import uses_v1_runner

log = get_logger(__name__)

_PROPOSER = "vllm.v1.spec_decode.extract_hidden_states"
_ARGUMENTS = {"sampled_token_ids", "target_hidden_states", "common_attn_metadata"}


def write_rows(cache: torch.Tensor, slots: torch.Tensor, layers: Sequence[torch.Tensor]) -> None:
    """Put the rows of every layer into the cache.

    Args:
        cache: ``[blocks, layers, block_size, hidden]``, in either memory order, as for ``flat_rows``.
        slots: ``[n]`` on the cache's device, ``block_id * block_size + position in the block``. Values below 0 are
            padding and go into block 0, which belongs to no request.
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
        ValueError: the rows' offsets are not multiples of their length.
    """
    hidden = cache.shape[3]
    if cache.stride(3) != 1 or any(stride % hidden for stride in cache.stride()[:3]):
        raise ValueError(f"expected strides that are multiples of the rows' length {hidden}, got {cache.stride()}")
    last = sum((n - 1) * s for n, s in zip(cache.shape[:3], cache.stride()[:3], strict=True))
    return cache.as_strided((last // hidden + 1, hidden), (hidden, 1))


@dataclass(frozen=True, slots=True)
class _Watch:
    model: str
    layer_ids: tuple[int, ...]
    cache: torch.Tensor | None  # written to directly; None: by vLLM


def watch(
    layer: Any,
    cache: torch.Tensor,
    layer_ids: tuple[int, ...],
    vllm_config: Any,
    *,
    direct: bool = False,
    others: Sequence[str] = (),
) -> None:
    """Count the captured layers of each step of an engine with the V1 runner, and write them directly if requested.

    Args:
        layer: the engine's ``CacheOnlyAttentionLayer``.
        cache: its cache, ``[blocks, layers, block_size, hidden]``.
        layer_ids: the requested layer ids.
        direct: the setting ``cache_writes: direct``. If it cannot be used, a warning says why.
        others: names of the engine's other connectors.
    """
    v1 = uses_v1_runner(vllm_config)
    # The V1 runner imports its proposer, and is built before the connector. No other process needs the import.
    patched = v1 and _patch(getattr(sys.modules.get(_PROPOSER), "ExtractHiddenStatesProposer", None))
    if v1 and not patched:
        log.warning(
            "captured layers are not counted: this vLLM's V1 runner has no proposer that hsx_dist knows. Install "
            "a tested vLLM release"
        )
    if direct:
        why = _why_not_direct(cache, vllm_config, v1, patched, others)
        if why is not None:
            log.warning("cache_writes='direct' is ignored: %s. States are written by vLLM; they are the same", why)
            direct = False
    layer.hsx_watch = _Watch(vllm_config.model_config.model, layer_ids, cache if direct else None)


def _why_not_direct(
    cache: torch.Tensor, vllm_config: Any, v1: bool, patched: bool, others: Sequence[str]
) -> str | None:
    if not v1:
        return "the engine uses the V2 model runner (VLLM_USE_V2_MODEL_RUNNER=0 selects V1)"
    if not patched:
        return "this vLLM's V1 runner has no proposer that hsx_dist knows"
    if vllm_config.parallel_config.data_parallel_size > 1:
        return "the engine is data parallel, and its ranks agree on their batches in the code that direct writes skip"
    if others:
        return f"{', '.join(others)} may save the cache layer by layer, in the code that direct writes skip"
    try:
        flat_rows(cache)
    except ValueError as e:
        return str(e)
    return None


def _patch(proposer: Any) -> bool:
    """Replace ``proposer.propose`` once. Returns False if it is not the method that this file was written for."""
    theirs = getattr(proposer, "propose", None)
    if theirs is None:
        return False
    if getattr(theirs, "hsx", False):
        return True
    signature = inspect.signature(theirs)
    if not signature.parameters.keys() >= _ARGUMENTS:
        return False

    @functools.wraps(theirs)
    def propose(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        layer = self.vllm_config.compilation_config.static_forward_context[self.attn_layer_names[0]]
        watched: _Watch | None = getattr(layer, "hsx_watch", None)
        if watched is None:  # another engine of this process
            return theirs(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        layers = given["target_hidden_states"]
        if len(layers) != len(watched.layer_ids):
            raise ConfigError(
                f"{watched.model}: expected {len(watched.layer_ids)} captured layers ({list(watched.layer_ids)}), got "
                f"{len(layers)}: vLLM's model does not capture some of these ids. Leave out layer 0 or the last layer"
            )
        if watched.cache is None:
            return theirs(self, *args, **kwargs)
        write_rows(watched.cache, given["common_attn_metadata"].slot_mapping[: len(layers[0])], layers)
        return given["sampled_token_ids"][:, :1]  # as vLLM's: the "draft" is the token that was just sampled

    propose.hsx = True  # type: ignore[attr-defined]
    proposer.propose = propose
    return True
