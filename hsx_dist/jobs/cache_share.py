"""What the hidden states take of vLLM's cache, read from a model's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Attributes by which configurations of hybrids name the kind of each layer.
_KINDS = ("layer_types", "layers_block_type", "block_types", "attn_type_list")


@dataclass(frozen=True, slots=True)
class CacheShare:
    """Bytes of cache a token takes on one rank: ``states`` (of hidden states every rank holds all, of queries its own),
    ``kv`` (its share of keys and values). ``kinds``: of the model's layers, where it has several."""

    states: int
    kv: int
    kinds: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """The part of the cache that the hidden states take, of tokens that are held whole."""
        return self.states / max(self.states + self.kv, 1)

    @property
    def warning(self) -> str | None:
        """What may go wrong with a hybrid."""
        if len(self.kinds) < 2:
            return None
        return (
            f"its layers are of several kinds ({', '.join(self.kinds)}): vLLM makes the cache's groups alike, and the "
            "hidden states' may get a block size of 1 and several times this memory (vllm issue 56774); look at the "
            "number of cache blocks in vLLM's log, and check the states with hsx doctor --engine"
        )


def cache_share(text: Any, *, states: int, tensor_parallel: int = 1, itemsize: int = 2) -> CacheShare:
    """Of a Hugging Face text configuration.

    ``states``: bytes of a token's rows on one rank; ``itemsize``: of one element of the key/value cache. Layers
    with windows are counted as if they held all tokens; layers without attention are not told apart: a lower bound of
    the share.
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
        # Fewer heads than ranks: each rank holds one, and some of them the same.
        kv = 2 * layers * max(-(-kv_heads // tensor_parallel), 1) * head_dim * itemsize
    return CacheShare(states, kv, layer_kinds(text))


def layer_kinds(text: Any) -> tuple[str, ...]:
    """The kinds of layers that a configuration names, sorted; a single one where it names none."""
    for name in _KINDS:
        kinds = getattr(text, name, None)
        if isinstance(kinds, (list, tuple)) and kinds:
            return tuple(sorted({str(kind) for kind in kinds}))
    if getattr(text, "hybrid_override_pattern", None) or getattr(text, "attn_layer_period", None):
        return ("attention", "other")
    return ("attention",)
