"""Rotary positions by a model's configuration, for heads that rotate dimension ``i`` with ``i + dim / 2``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hsx_dist.errors import ConfigError
from hsx_dist.model_parts.config_numbers import positive


def rotation(model: str, config: Mapping[str, Any], dim: int, tokens: int, theta: float) -> np.ndarray[Any, Any]:
    """Return the rotation of each position and frequency: complex64 ``[tokens, r / 2]``.

    ``r`` of a head's ``dim`` numbers are rotated. The magnitude is the factor of queries and keys in some scalings.

    Args:
        config: the model's configuration, with ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``.
        theta: the default base.

    Raises:
        ConfigError: the scaling is none of ``default``, ``linear``, ``llama3`` and ``yarn``, or the configuration lacks
            a number that the scaling needs.
    """
    scaling = {
        "rope_theta": config.get("rope_theta"),
        "partial_rotary_factor": config.get("partial_rotary_factor"),
        "original_max_position_embeddings": config.get("max_position_embeddings"),
    }
    for name in ("rope_scaling", "rope_parameters"):
        scaling |= {key: value for key, value in (config.get(name) or {}).items() if value is not None}
    numbers = _Numbers(model, scaling)
    turning = int(dim * min(numbers.get("partial_rotary_factor", 1.0), 1.0)) // 2
    base = numbers.get("rope_theta", theta)
    frequencies = base ** -(np.arange(turning) / max(turning, 1))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    factor = 1.0
    if kind == "linear":
        frequencies = frequencies / numbers.get("factor")
    elif kind == "llama3":
        frequencies = _llama3(frequencies, numbers)
    elif kind == "yarn":
        frequencies, factor = _yarn(frequencies, base, numbers)
    elif kind != "default":
        raise ConfigError(
            f"{model}: expected rotary positions of the type default, linear, llama3 or yarn, got {kind!r:.100}. "
            "Compute its attention with the model's own code"
        )
    found: np.ndarray[Any, Any] = factor * np.exp(1j * np.arange(tokens)[:, None] * frequencies)
    return found.astype(np.complex64)


def rotate(rows: np.ndarray[Any, Any], turns: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rotate ``rows`` float32 ``[tokens, heads, dim]`` by ``turns``, the result of ``rotation``."""
    half = turns.shape[1]
    turned = (rows[..., :half] + 1j * rows[..., half : 2 * half]) * turns[:, None]
    return np.concatenate([turned.real, turned.imag, rows[..., 2 * half :]], -1, dtype=np.float32)


class _Numbers:
    """Positive numbers of a configuration. ``get`` raises ``ConfigError`` for other values."""

    def __init__(self, model: str, values: Mapping[str, Any]) -> None:
        self._model, self._values = model, values

    def get(self, name: str, default: float | None = None) -> float:
        value = self._values.get(name)
        if value is None:
            value = default
        if wrong := positive(value):
            raise ConfigError(f"{self._model}: {name}: expected {wrong}, got {value!r:.100}. Correct its config.json")
        return float(value or 0)

    def find(self, name: str) -> float | None:
        return None if self._values.get(name) is None else self.get(name)

    def is_off(self, name: str) -> bool:
        return self._values.get(name) is False


def _llama3(frequencies: np.ndarray[Any, Any], numbers: _Numbers) -> np.ndarray[Any, Any]:
    """Divide low frequencies by the factor, keep high ones, and interpolate those in between."""
    low, high = numbers.get("low_freq_factor"), numbers.get("high_freq_factor")
    if low >= high:
        raise ConfigError(f"expected low_freq_factor below high_freq_factor, got {low} and {high}. Correct config.json")
    turns = numbers.get("original_max_position_embeddings") * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    mixed: np.ndarray[Any, Any] = frequencies * (kept + (1 - kept) / numbers.get("factor"))
    return mixed


def _yarn(frequencies: np.ndarray[Any, Any], base: float, numbers: _Numbers) -> tuple[np.ndarray[Any, Any], float]:
    """Return the frequencies, and the factor of queries and keys.

    Interpolates as llama3, but linearly by the frequencies' indices. The limits are the frequencies that turn
    ``beta_fast`` and ``beta_slow`` times in the original context.
    """
    factor, half = numbers.get("factor"), len(frequencies)
    context = numbers.get("original_max_position_embeddings")

    def number_of(turns: float) -> float:
        return half * math.log(context / (2 * math.pi * turns)) / max(math.log(base), 1e-30)

    first, last = number_of(numbers.get("beta_fast", 32.0)), number_of(numbers.get("beta_slow", 1.0))
    if not numbers.is_off("truncate"):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    divided = np.clip((np.arange(half) - first) / (last - first or 1e-3), 0, 1)
    attention = numbers.find("attention_factor")
    if attention is None:
        attention = _magnitude(factor, 1.0)
        if (scale := numbers.find("mscale")) and (of_all := numbers.find("mscale_all_dim")):
            attention = _magnitude(factor, scale) / _magnitude(factor, of_all)
    return frequencies * (1 - divided + divided / factor), attention


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0
