"""What a caller requests of a part or a sample: tokens, layers, points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral
from operator import index
from typing import Any

from hsx_dist.errors import ConfigError
from hsx_dist.format.segment_info import SegmentInfo


def span(tokens: Any) -> tuple[int, int]:
    """``tokens`` as two whole numbers, or ``ConfigError``."""
    try:
        start, stop = map(index, _pair(tokens))
    except (TypeError, ValueError) as e:
        raise ConfigError(f"tokens: expected (start, stop), two whole numbers, got {tokens!r:.100}. Correct it") from e
    return start, stop


def _pair(tokens: Any) -> Any:
    """``tokens``, or ``TypeError`` for no pair. A ``range`` of two tokens has two items, and neither is its stop."""
    if isinstance(tokens, range | Set | Mapping) or len(tokens) != 2:
        raise TypeError
    return tokens


def token_range(tokens: Any, num_tokens: int) -> tuple[int, int]:
    """The range ``[start, stop)`` of ``tokens``: a slice or ``(start, stop)``, as in Python. ``None``: all tokens.

    Raises:
        ConfigError: it is no such range, or has a step other than 1.
    """
    try:
        wanted = slice(None) if tokens is None else tokens if isinstance(tokens, slice) else slice(*_pair(tokens))
        start, stop, step = wanted.indices(num_tokens)
    except (TypeError, ValueError):
        raise ConfigError(
            f"tokens: expected a slice or (start, stop) of whole numbers, got {tokens!r:.100}. Correct it"
        ) from None
    if step != 1:
        raise ConfigError(f"tokens: expected consecutive tokens, got a step of {step}. Use step 1")
    return start, max(start, stop)


def layer_list(layers: Any, name: str = "layers") -> tuple[int, ...]:
    """``layers`` as a tuple of layer ids. ``ConfigError``: it is no list of integers. ``name``: of the argument."""
    if hasattr(layers, "tolist"):  # numpy or torch
        layers = layers.tolist()
    is_list = isinstance(layers, Iterable) and not isinstance(layers, str | bytes)
    ids = tuple(layers) if is_list else (layers,)
    if wrong := [layer for layer in ids if not isinstance(layer, Integral)]:
        raise ConfigError(
            f"{name}: expected layer ids such as [15, 30], got {wrong!s:.100}. Use the numbers of Run.layer_ids: "
            "words such as 'last' are only for extraction"
        )
    if not is_list:
        raise ConfigError(f"{name}: expected a list of layer ids such as [15], got {layers!r}. Put it into a list")
    return ids


def checked_layers(layers: Any) -> Any:
    """``layers`` with tuples of ids, for all points or by point. ``None``: all. ``ConfigError``: as ``layer_list``."""
    if isinstance(layers, Mapping):
        return {name: layer_list(ids) for name, ids in layers.items()}
    return None if layers is None else layer_list(layers)


def point_list(points: Any) -> tuple[str, ...]:
    """``points`` as a tuple of names. ``ConfigError``: it is no list of at least one name."""
    names = () if isinstance(points, str) or not isinstance(points, Iterable) else tuple(points)
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"points: expected a list of names such as ['q'], got {points!r:.100}. Name at least one")
    return names


def positions(info: SegmentInfo, layers: Sequence[int] | None) -> list[int]:
    """The places of these layer ids in stored order; ``None``: all. ``ConfigError``: one is not stored."""
    if layers is None:
        return list(range(info.num_layers))
    layers = layer_list(layers)
    places = {layer: k for k, layer in enumerate(info.layer_ids)}
    unknown = [layer for layer in layers if layer not in places]
    if unknown:
        stored = f"layers among {list(info.layer_ids)}" if info.layer_ids else "layers=None, since no layer has an id"
        raise ConfigError(f"layers: expected {stored}, got {unknown}. Request stored layers only")
    return [places[layer] for layer in layers]
