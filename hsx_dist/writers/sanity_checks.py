"""Checks for wrong states: non-finite rows, and layers that are zero throughout.

A trainer's loss can look good on all-zero layers, so every page is checked while it is encoded. Two maximum reductions
over the bit patterns are enough, and need no temporary arrays of the page's size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

#: dtype → bits of positive infinity: magnitudes from here on are not finite.
_INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000}


@dataclass(slots=True)
class SanityChecks:
    """Findings for a segment. ``nonfinite``: number of such rows, int64 ``[L]``; ``zero``: all are zero, ``[L]``."""

    nonfinite: np.ndarray[Any, Any]
    zero: np.ndarray[Any, Any]

    @classmethod
    def empty(cls, layers: int) -> SanityChecks:
        return cls(np.zeros(layers, np.int64), np.ones(layers, bool))

    def look(self, dtype: str, i: int, rows: np.ndarray[Any, Any]) -> None:
        """Check some rows of the ``i``-th layer, carriers of ``dtype``.

        Fastest while the rows are in the processor's cache.
        """
        if dtype not in _INFINITY:  # ids: always finite, and all may be 0
            self.zero[i] = False
            return
        infinity = _INFINITY[dtype]
        # As unsigned numbers, negative values are above all positive ones, ordered by magnitude; as signed ones, below.
        sign = 1 << (8 * rows.itemsize - 1)
        signed = rows.view(f"i{rows.itemsize}")
        largest_of_all, positive_of_all = np.maximum.reduce(rows, axis=None), np.maximum.reduce(signed, axis=None)
        if largest_of_all < sign + infinity and 0 < positive_of_all < infinity:
            self.zero[i] = False  # almost always: one reduction over all rows takes a third of the time by row
            return
        largest, positive = rows.max(axis=1), signed.max(axis=1)
        self.nonfinite[i] += np.count_nonzero((largest >= sign + infinity) | (positive >= infinity))
        if self.zero[i]:
            self.zero[i] = bool(((positive <= 0) & ((largest == 0) | (largest == sign))).all())

    def join(self, other: SanityChecks) -> None:
        """Add the findings for other pages of the same segment."""
        self.nonfinite += other.nonfinite
        self.zero &= other.zero

    def findings(self, layer_ids: tuple[int, ...]) -> dict[str, Any]:
        """Return the errors found as JSON values; empty if there are none."""
        found: dict[str, Any] = {}
        if self.nonfinite.any():
            found["nonfinite_rows"] = {
                str(layer): int(n) for layer, n in zip(layer_ids, self.nonfinite, strict=True) if n
            }
        if self.zero.any():
            found["zero_layers"] = [layer for layer, zero in zip(layer_ids, self.zero, strict=True) if zero]
        return found
