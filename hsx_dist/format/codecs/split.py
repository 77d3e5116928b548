"""``split``: byte planes. Sign and exponent of hidden states compress, the mantissa is noise and stays raw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hsx_dist.errors import FormatError
from hsx_dist.format.codecs.base import Plane, flat, itemsize, raw_plane
from hsx_dist.format.codecs.zstd import compress_huffman, decompress
from hsx_dist.store.base import Buffer

_PLANES_16 = (Plane("hi", None), Plane("lo", 1))
_PLANES_32 = (Plane("hi", None), Plane("mid", 1), Plane("lo", 2))


@dataclass(frozen=True, slots=True)
class SplitCodec:
    """The high byte of every element Huffman-coded (a zstd frame), the others raw.

    bf16 and fp16: ``hi``, ``lo``. fp32: ``hi``, ``mid`` (the second byte), ``lo`` (the low two bytes, little-endian).
    """

    name: ClassVar[str] = "split"

    def planes(self, dtype: str) -> tuple[Plane, ...]:
        return _PLANES_16 if itemsize(dtype) == 2 else _PLANES_32

    def encode(self, x: np.ndarray[Any, Any], dtype: str) -> tuple[Buffer, ...]:
        # Shifts and casts run at memory speed; slicing bytes out with a stride of two is five times slower.
        if itemsize(dtype) == 2:
            return compress_huffman(_shifted(x, 8)), flat(x.astype(np.uint8, order="C"))
        return compress_huffman(_shifted(x, 24)), flat(_shifted(x, 16)), flat(x.astype("<u2", order="C"))

    def decode(self, planes: Sequence[Buffer], n: int, hidden_size: int, dtype: str) -> np.ndarray[Any, Any]:
        if len(planes) != len(self.planes(dtype)):
            raise FormatError(f"codec split: expected {len(self.planes(dtype))} planes for {dtype}, got {len(planes)}")
        # The raw planes first: they prove the size before the frame is decompressed.
        if itemsize(dtype) == 2:
            low = raw_plane(planes[1], 1, n, hidden_size, "lo")
            x = self._high(planes[0], n, hidden_size).astype("<u2")
            x <<= 8
            x |= low
            return x
        mid, low = raw_plane(planes[1], 1, n, hidden_size, "mid"), raw_plane(planes[2], 2, n, hidden_size, "lo")
        x = self._high(planes[0], n, hidden_size).astype("<u4")
        x <<= 8
        x |= mid
        x <<= 16
        x |= low
        return x

    @staticmethod
    def _high(frame: Buffer, n: int, hidden_size: int) -> np.ndarray[Any, Any]:
        return raw_plane(decompress(frame, n * hidden_size, "hi"), 1, n, hidden_size, "hi")

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name}


def _shifted(x: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """The low byte of ``x >> bits``, contiguous, without an array of the wide type between."""
    out = np.empty(x.shape, np.uint8)
    np.right_shift(x, bits, out=out, casting="unsafe")
    return out
