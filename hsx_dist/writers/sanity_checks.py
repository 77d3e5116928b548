"""Looks for states that cannot be right: non-finite rows, and layers that are zero throughout.

Trainers have been fed all-zero layers for weeks while their losses looked good, so every page is looked at while it is
encoded. Two maximum reductions over the bit patterns are enough, and make no temporaries of the page's size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

#: dtype → bits of positive infinity: magnitudes from here on are not finite.
_INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000}


@dataclass(slots=True)
class SanityChecks:
    """What was seen of a segment so far: ``nonfinite`` rows, int64 ``[L]``; ``zero`` throughout, bool ``[L]``."""

    nonfinite: np.ndarray[Any, Any]
    zero: np.ndarray[Any, Any]

    @classmethod
    def empty(cls, layers: int) -> SanityChecks:
        return cls(np.zeros(layers, np.int64), np.ones(layers, bool))

    def look(self, dtype: str, i: int, rows: np.ndarray[Any, Any]) -> None:
        """Look at some rows of the ``i``-th layer, carriers of ``dtype``: fastest while they are in the processor's
        cache."""
        if dtype not in _INFINITY:  # ids: each may be 0, and all are finite
            self.zero[i] = False
            return
        infinity = _INFINITY[dtype]
        # As unsigned numbers, negative values lie above all positive ones, by magnitude; as signed ones, below.
        sign = 1 << (8 * rows.itemsize - 1)
        signed = rows.view(f"i{rows.itemsize}")
        largest_of_all, positive_of_all = np.maximum.reduce(rows, axis=None), np.maximum.reduce(signed, axis=None)
        if largest_of_all < sign + infinity and 0 < positive_of_all < infinity:
            self.zero[i] = False  # as almost always: all rows at once take a third of row by row
            return
        largest, positive = rows.max(axis=1), signed.max(axis=1)
        self.nonfinite[i] += np.count_nonzero((largest >= sign + infinity) | (positive >= infinity))
        if self.zero[i]:
            self.zero[i] = bool(((positive <= 0) & ((largest == 0) | (largest == sign))).all())

    def join(self, other: SanityChecks) -> None:
        """Add what was seen of other pages of the same segment."""
        self.nonfinite += other.nonfinite
        self.zero &= other.zero

    def findings(self, layer_ids: tuple[int, ...]) -> dict[str, Any]:
        """What is wrong, as JSON values; empty when nothing is."""
        found: dict[str, Any] = {}
        if self.nonfinite.any():
            found["nonfinite_rows"] = {
                str(layer): int(n) for layer, n in zip(layer_ids, self.nonfinite, strict=True) if n
            }
        if self.zero.any():
            found["zero_layers"] = [layer for layer, zero in zip(layer_ids, self.zero, strict=True) if zero]
        return found
