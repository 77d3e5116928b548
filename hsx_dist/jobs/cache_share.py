"""The share of vLLM's cache that captured states take, from a model's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Attributes by which configurations of hybrids name the kind of each layer.
_KINDS = ("layer_types", "layers_block_type", "block_types", "attn_type_list")


@dataclass(frozen=True, slots=True)
class CacheShare:
    """Bytes of cache that one token takes on one rank.

    ``states``: bytes of captured points (whole hidden states, but only this rank's heads of queries). ``kv``: bytes of
    this rank's keys and values. ``kinds``: the kinds of the model's layers, if it has several."""

    states: int
    kv: int
    kinds: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Fraction of the cache for states, if all layers hold a token completely."""
        return self.states / max(self.states + self.kv, 1)

    @property
    def warning(self) -> str | None:
        """A warning for hybrid models, else None."""
        if len(self.kinds) < 2:
            return None
        return (
            f"the model has layers of several kinds ({', '.join(self.kinds)}): vLLM makes its cache groups alike, so "
            "hidden states may get a block size of 1 and several times this memory (vllm issue 56774). Look at the "
            "number of cache blocks in vLLM's log, and check the states with hsx doctor --engine"
        )


def cache_share(text: Any, *, states: int, tensor_parallel: int = 1, itemsize: int = 2) -> CacheShare:
    """The share for a Hugging Face text configuration.

    ``states``: bytes of a token's rows on one rank. ``itemsize``: bytes of one element of the key/value cache. The
    result is a lower bound: layers with windows count as if they held all tokens, and so do layers without attention.
    """
    layers = int(text.num_hidden_layers)
    rank = getattr(text, "kv_lora_rank", None)
    if rank:  # multi-head latent attention: one compressed row, the same on every rank
        row = int(rank) + int(getattr(text, "qk_rope_head_dim", 0) or 0)
        kv = layers * row * itemsize
    else:
        heads = int(getattr(text, "num_attention_heads", 0) or 1)
        kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
        head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
        # With fewer heads than ranks, each rank holds one head, and some ranks hold the same head.
        kv = 2 * layers * max(-(-kv_heads // tensor_parallel), 1) * head_dim * itemsize
    return CacheShare(states, kv, layer_kinds(text))


def layer_kinds(text: Any) -> tuple[str, ...]:
    """The kinds of layers that a configuration names, sorted. One kind if it names none."""
    for name in _KINDS:
        kinds = getattr(text, name, None)
        if isinstance(kinds, (list, tuple)) and kinds:
            return tuple(sorted({str(kind) for kind in kinds}))
    if getattr(text, "hybrid_override_pattern", None) or getattr(text, "attn_layer_period", None):
        return ("attention", "other")
    return ("attention",)
