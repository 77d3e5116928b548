"""Attention patterns of one prompt of a run, from its queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hsx_dist.errors import ConfigError
from hsx_dist.model_parts.attention import AttentionPatterns, stored_layers
from hsx_dist.model_parts.model_files import is_builtin, require_own_configuration
from hsx_dist.observe.report.states import spread
from hsx_dist.reading import Run, Sample
from hsx_dist.reading.stored import read_stored

#: Limits of a drawing. Of more layers and heads, the report draws evenly spaced ones; of more tokens, the first ones.
LAYERS_DRAWN, HEADS_DRAWN, TOKENS_DRAWN = 4, 16, 48


@dataclass(frozen=True, slots=True)
class LayerPatterns:
    """Patterns of one layer. ``patterns``: float32 ``[len(heads), n, n]``. ``last``: attention of the last token, the
    mean of all ``num_heads`` heads, float32 ``[n]``."""

    layer: int
    heads: tuple[int, ...]
    num_heads: int
    patterns: np.ndarray[Any, Any]
    last: np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class PromptAttention:
    """Patterns of the first tokens of a sample. ``missing``: why there are none. ``token_ids``: int64 ``[n]``.
    ``stored``: the layers whose queries and keys the sample has."""

    key: str
    num_tokens: int
    stored: tuple[int, ...]
    model: str = ""
    token_ids: Any = ()
    layers: tuple[LayerPatterns, ...] = ()
    missing: str = ""


def gather_attention(run: Run, keys: Sequence[str], model: str | None) -> PromptAttention | None:
    """Return the patterns of the first of the samples ``keys`` that has queries and keys. None if no sample has them.

    Args:
        model: the reader's choice, a folder or an id. Without it only the built-in model is used: a run must not choose
            what its reader loads.

    Raises:
        ConfigError: ``model`` cannot be loaded, or its attention is not known.
        StoreError, FormatError: something cannot be read.
    """

    def read(sample: Sample) -> PromptAttention | None:
        stored = stored_layers(sample)
        if not stored:
            return None
        about = PromptAttention(sample.key, sample.num_tokens, stored)
        named = AttentionPatterns(model) if model is not None else None
        try:
            require_own_configuration(run)
            if named is None and is_builtin(run):
                named = AttentionPatterns(run)
            return about if named is None else _drawn(about, sample, named)
        except ConfigError as e:
            return replace(about, missing=str(e))

    return next(filter(None, read_stored((run[key] for key in keys), read)), None)


def _drawn(about: PromptAttention, sample: Sample, patterns: AttentionPatterns) -> PromptAttention:
    layers = patterns.layers(sample)
    if not layers:
        raise ConfigError(
            f"{patterns.model}: expected the points q and k of a layer, got only q_norm and k_norm. Capture q and k"
        )
    tokens = min(sample.num_tokens, TOKENS_DRAWN)
    return replace(
        about,
        stored=layers,
        model=patterns.model,
        token_ids=sample.token_ids("numpy")[:tokens],
        layers=tuple(
            drawn_layer(layer, patterns.pattern(sample, layer, tokens)) for layer in spread(layers, LAYERS_DRAWN)
        ),
    )


def drawn_layer(layer: int, patterns: np.ndarray[Any, Any]) -> LayerPatterns:
    """Select the heads to draw from a layer's ``patterns``, ``[heads, n, n]``."""
    heads = tuple(spread(range(len(patterns)), HEADS_DRAWN))
    return LayerPatterns(layer, heads, len(patterns), patterns[list(heads)], patterns[:, -1].mean(0))
