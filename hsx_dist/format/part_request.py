"""What a caller requests of a part: tokens and layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

from hsx_dist.errors import ConfigError
from hsx_dist.format.description import SegmentInfo


def span(tokens: Any) -> tuple[int, int]:
    """``tokens`` as two whole numbers, or ``ConfigError``."""
    try:
        start, stop = map(index, tokens)
    except (TypeError, ValueError) as e:
        raise ConfigError(f"tokens: expected (start, stop), two whole numbers, got {tokens!r}") from e
    return start, stop


def positions(info: SegmentInfo, layers: Sequence[int] | None) -> list[int]:
    """The places of these layer ids in stored order; ``None``: all. ``ConfigError``: one is not stored."""
    if layers is None:
        return list(range(info.num_layers))
    if not isinstance(layers, Iterable) or isinstance(layers, str | bytes):
        raise ConfigError(f"layers: expected a sequence of layer ids, got {layers!r}. Pass [{layers!r}]")
    layers = list(layers)
    places = {layer: k for k, layer in enumerate(info.layer_ids)}
    unknown = [layer for layer in layers if layer not in places]
    if unknown:
        stored = f"layers among {list(info.layer_ids)}" if info.layer_ids else "layers=None, since no layer has an id"
        raise ConfigError(f"layers: expected {stored}, got {unknown}. Request stored layers only")
    return [places[layer] for layer in layers]
