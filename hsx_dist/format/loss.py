"""What a lossy codec lost: measured on what was stored, when it is stored, whatever the codec is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hsx_dist.format.codecs.values import to_float32


@dataclass(frozen=True, slots=True)
class Loss:
    """Relative errors of one layer, by Euclidean norms; elements that were not finite before do not count.

    ``rms``: of all its tokens together, ``|decoded - original| / |original|``. ``worst_token``: of the worst one.
    ``inf`` where something was made of nothing, or finite elements came back infinite or NaN.
    """

    rms: float
    worst_token: float


@dataclass(frozen=True, slots=True)
class Squares:
    """Sums over the tokens of one chunk of one layer: of squared errors, of squares, and the worst token's ratio."""

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
    """The loss of a layer of a segment, from its chunks in order; to four digits, so that it is the same everywhere."""
    error, original = sum(c.error for c in chunks), sum(c.original for c in chunks)
    rms = _ratios(np.array([error]), np.array([original]))[0]
    rms, worst = (float(f"{np.sqrt(x):.4g}") for x in (rms, max(c.worst for c in chunks)))
    return Loss(rms, worst)


def _ratios(error: np.ndarray[Any, Any], squares: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(error == 0, 0.0, error / squares)
