"""Carriers ↔ float32: numpy has no bfloat16, and the core does not depend on torch."""

from __future__ import annotations

from typing import Any

import numpy as np

#: A quiet NaN of bfloat16.
_NOT_NUMBER = 0x7FC0


def to_float32(x: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """The values of a carrier array of ``dtype``: an exact float32 copy of the same shape."""
    if dtype == "bfloat16":
        wide = x.astype(np.uint32, order="C")
        wide <<= 16
        return wide.view(np.float32)
    values = np.ascontiguousarray(x).view(np.float16 if dtype == "float16" else np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN of fp16
        return values.astype(np.float32)


def from_float32(values: np.ndarray[Any, Any], dtype: str, out: np.ndarray[Any, Any]) -> None:
    """Round float32 ``values`` (contiguous) to nearest even into ``out``, a carrier array of ``dtype``.

    NaN stays NaN. Values too large for fp16 become infinity.
    """
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        rounded = bits >> 16
        rounded &= 1
        rounded += bits
        rounded += np.uint32(0x7FFF)
        rounded >>= 16
        lost = np.isnan(values)
        if lost.any():  # rounding up a NaN's mantissa may carry into its sign
            rounded[lost] = _NOT_NUMBER | (bits[lost] >> 16 & 0x8000)
        np.copyto(out, rounded, casting="unsafe")
    elif dtype == "float16":
        with np.errstate(over="ignore"):
            out[:] = values.astype(np.float16).view(np.uint16)
    else:
        out[:] = values.view(np.uint32)
