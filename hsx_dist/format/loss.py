"""The loss of a lossy codec, measured on the stored bytes when they are written. Independent of the codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hsx_dist.format.codecs.values import to_float32


@dataclass(frozen=True, slots=True)
class Loss:
    """Relative errors of one layer, in Euclidean norms. Elements that are not finite in the original do not count.

    ``rms``: ``|decoded - original| / |original|`` over all tokens. ``worst_token``: the same for the worst token.
    ``inf`` when zeros were decoded to other values, or finite elements to infinity or NaN.

    Example:
        >>> {layer: loss.rms for layer, loss in sample.loss.items()}  # a lossless codec
        {}
    """

    rms: float
    worst_token: float


@dataclass(frozen=True, slots=True)
class Squares:
    """For one chunk of one layer: the sum of squared errors, the sum of squares, and the worst token's ratio."""

    error: float
    original: float
    worst: float


def measure(original: np.ndarray[Any, Any], decoded: np.ndarray[Any, Any], dtype: str) -> Squares:
    """Compare two carrier arrays ``[n, H]``."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        before, after = (to_float32(x, dtype).astype(np.float64) for x in (original, decoded))
    counted = np.isfinite(before)
    after[~counted] = before[~counted] = 0
    after[~np.isfinite(after)] = np.inf
    after -= before
    error, squares = np.einsum("ij,ij->i", after, after), np.einsum("ij,ij->i", before, before)
    return Squares(float(error.sum()), float(squares.sum()), float(_ratios(error, squares).max()))


def combine(chunks: Sequence[Squares]) -> Loss:
    """The loss of a segment's layer, from its chunks in order. Rounded to 4 digits, to be equal on all machines."""
    error, original = sum(c.error for c in chunks), sum(c.original for c in chunks)
    rms = _ratios(np.array([error]), np.array([original]))[0]
    rms, worst = (float(f"{np.sqrt(x):.4g}") for x in (rms, max(c.worst for c in chunks)))
    return Loss(rms, worst)


def _ratios(error: np.ndarray[Any, Any], squares: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(error == 0, 0.0, error / squares)
