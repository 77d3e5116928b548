"""The points that a run captures, from its settings and its model's configuration, before an engine starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hsx_dist.config import ExtractConfig
from hsx_dist.errors import ConfigError
from hsx_dist.jobs.reference import layer_modules
from hsx_dist.layers import resolve_layers
from hsx_dist.taps.points import HIDDEN_STATES, POINTS, Point, plan_capture


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """A point's layers, and the bytes of a token's row in one of them."""

    layers: tuple[int, ...]
    row_bytes: int


def captured_rows(config: ExtractConfig, text: Any, dtype: str) -> dict[str, CapturedRows]:
    """The captured layers of each point, for ``config`` and a model.

    A preset selects the points of transformers' model of this configuration. The engine may have fewer: no router
    points if its kernel routes inside, no ``mlp_post`` if ``down_proj`` is quantised.

    Args:
        text: the Hugging Face configuration of the decoder.
        dtype: dtype of the states.

    Raises:
        ConfigError: an unknown point, layer or preset; layout ``sample`` with other points than hidden states.
    """
    if config.capture is None:
        points = {HIDDEN_STATES: resolve_layers(config.layers, text.num_hidden_layers)}
    else:
        points = plan_capture(config.capture, text.num_hidden_layers, _possible(text)).points
    others = [name for name in points if name != HIDDEN_STATES]
    if others and config.layout == "sample":
        raise ConfigError(
            f"layout: expected part with points other than hidden_states, got sample with {', '.join(others)}. Use part"
        )
    itemsize = 4 if dtype == "float32" else 2
    return {
        name: CapturedRows(layers, _width(POINTS[name], text) * (4 if POINTS[name].dtype else itemsize))
        for name, layers in points.items()
    }


def capture_of_run(config: ExtractConfig, rows: Mapping[str, CapturedRows]) -> dict[str, Any] | None:
    """The ``capture`` of an engine with taps. None for vLLM's extraction.

    Layers become numbers, so that two spellings of the same choice are one run. A preset keeps its name.
    """
    if config.source == "cache":
        return None
    if config.capture is not None and "preset" in config.capture:
        return dict(config.capture)
    return {
        "points": {name: list(r.layers) if POINTS[name].per_layer else "all" for name, r in rows.items()},
    }


def _possible(text: Any) -> dict[str, set[int]]:
    """For each point, the model's layers that have it."""
    layers = set(range(text.num_hidden_layers))
    possible = {name: layers if p.per_layer else {0} for name, p in POINTS.items()}
    modules = layer_modules(text)
    for point, module in (("q_norm", "self_attn.q_norm"), ("k_norm", "self_attn.k_norm")):
        possible[point] = modules[module] if modules else layers
    experts = (modules["mlp.experts"] if modules else layers) if _experts(text) else set()
    return {
        **possible,
        **dict.fromkeys(("router_logits", "topk_ids", "topk_weights"), experts),
        "mlp_post": layers - experts if modules else layers,
        HIDDEN_STATES: {*layers, text.num_hidden_layers},
    }


def _experts(text: Any) -> int:
    found = (getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return next((int(n) for n in found if n), 0)


def _width(point: Point, text: Any) -> int:
    heads = int(text.num_attention_heads)
    dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    widths = {
        "hidden": text.hidden_size,
        "q": heads * dim,
        "kv": int(getattr(text, "num_key_value_heads", None) or heads) * dim,
        "mlp": getattr(text, "intermediate_size", 0),
        "experts": _experts(text),
        "top_k": getattr(text, "num_experts_per_tok", 0),
    }
    return int(widths[point.width])


def token_bytes(rows: Mapping[str, CapturedRows]) -> int:
    """Raw bytes of one token's captured rows."""
    return sum(len(r.layers) * r.row_bytes for r in rows.values())


def mean_bytes(rows: Mapping[str, CapturedRows], itemsize: int) -> int:
    """Raw bytes of the mean over a sample's tokens, in float32. Ids have no mean. ``itemsize``: of the states."""
    return sum(
        len(r.layers) * (r.row_bytes if POINTS[name].dtype else r.row_bytes * 4 // itemsize)
        for name, r in rows.items()
        if POINTS[name].dtype != "int32"
    )


def rank_bytes(rows: Mapping[str, CapturedRows], ranks: int, kv_heads: int) -> int:
    """Bytes of one token in the cache of one tensor-parallel rank. If there are more ranks than ``kv_heads``, several
    ranks hold the same heads."""
    shards = {name: min(ranks, kv_heads) if POINTS[name].width == "kv" else ranks for name in rows}
    return sum(len(r.layers) * r.row_bytes // (shards[name] if POINTS[name].sharded else 1) for name, r in rows.items())


def column_bytes(rows: Mapping[str, CapturedRows], ranks: int) -> int:
    """Raw bytes of one token in the largest column: a page and a segment belong to one column. A sharded point is
    divided among the ``ranks``."""
    return max(
        math.ceil(len(r.layers) * r.row_bytes / (ranks if POINTS[name].sharded else 1)) for name, r in rows.items()
    )
