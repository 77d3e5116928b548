"""``fp8-token``: 8-bit floats with one scale per token. Lossy, never the default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hsx_dist.errors import FormatError
from hsx_dist.format.codecs.base import flat, raw_array, scratch
from hsx_dist.format.codecs.values import from_float32, to_float32
from hsx_dist.format.codecs.zstd import check_expansion, compress_huffman, decompress_into
from hsx_dist.store.base import Buffer

#: The largest finite value of e4m3fn.
_LARGEST = np.float32(448)
#: NaN of e4m3fn, without the sign. All smaller codes are finite.
_NAN = 0x7F
#: No scale is smaller, as quotients by denormals overflow. No scale is larger, so that 448 times a scale is a float32.
_SMALLEST_SCALE, _LARGEST_SCALE = (
    np.float32(2.0**-126),
    np.nextafter(np.finfo(np.float32).max / _LARGEST, np.float32(0)),
)
#: Elements that are processed at once: all intermediate results fit the processor's cache.
_BLOCK = 1 << 16


def _table() -> np.ndarray[Any, Any]:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    magnitude = np.where(exponent > 0, normal, mantissa * 2.0**-9)
    magnitude[[_NAN, 0x80 | _NAN]] = np.nan
    return np.where(code & 0x80, -magnitude, magnitude).astype(np.float32)


#: Code → value, float32 ``[256]``. e4m3fn of the OCP 8-bit floating point specification 1.0: no infinities.
E4M3 = _table()


def encode_e4m3(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The codes of float32 ``x`` (any shape, contiguous), rounded to nearest even: uint8.

    Magnitudes above 448 become 448. Infinities and NaN become NaN of the same sign.
    """
    bits = x.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    # 3 of 23 mantissa bits are kept. Add half a unit of the last kept bit, or slightly less where that bit is even.
    codes = magnitude >> 20
    codes &= 1
    codes += magnitude
    codes += np.uint32((1 << 19) - 1)
    codes >>= 20
    codes -= np.uint32((127 - 7) << 3)
    # Codes of values below 2**-6 count multiples of 2**-9. float32 values near 2**14 have the same spacing, so that
    # adding 2**14 rounds to such a multiple.
    small = magnitude < np.uint32((127 - 6) << 23)
    if small.any():
        shifted = magnitude[small].view(np.float32) + np.float32(2.0**14)
        codes[small] = shifted.view(np.uint32) & 0xF
    np.minimum(codes, np.uint32(_NAN - 1), out=codes)
    codes[magnitude >= 0x7F800000] = _NAN
    sign = bits >> 24
    sign &= 0x80
    codes |= sign
    return codes.astype(np.uint8)


@dataclass(frozen=True, slots=True)
class Fp8TokenCodec:
    """Each token of a layer divided by a scale, as e4m3fn: ``n`` scales (float32), then the codes, one zstd frame.

    A scale is the token's largest finite magnitude divided by 448. Infinities become NaN. A few channels of hidden
    states are hundreds of times larger than the rest ("massive activations", Sun et al., 2024, arXiv:2402.17762). int8
    would round the rest to zero; e4m3 does not.
    """

    name: ClassVar[str] = "fp8-token"
    lossy: ClassVar[bool] = True

    def encode(self, x: np.ndarray[Any, Any], dtype: str) -> tuple[Buffer, ...]:
        n, hidden_size = x.shape
        scales = np.empty((n, 1), "<f4")
        codes = scratch("codes", x.size).reshape(x.shape)
        rows = max(1, _BLOCK // hidden_size)
        for a in range(0, n, rows):
            block, b = to_float32(x[a : a + rows], dtype), min(a + rows, n)
            magnitude = np.abs(block)
            if not np.isfinite(largest := magnitude.max(axis=1, keepdims=True)).all():
                largest = np.where(np.isfinite(magnitude), magnitude, 0).max(axis=1, keepdims=True)
            scales[a:b] = np.clip(largest / _LARGEST, _SMALLEST_SCALE, _LARGEST_SCALE)
            with np.errstate(invalid="ignore"):
                block /= scales[a:b]
            codes[a:b] = encode_e4m3(block)
        return flat(scales), compress_huffman(codes)

    def decode(self, data: memoryview, out: np.ndarray[Any, Any], dtype: str) -> None:
        n, hidden_size = out.shape
        if data.nbytes < 4 * n:
            raise FormatError(f"codec fp8-token: expected at least {4 * n} bytes of scales, got {data.nbytes}")
        check_expansion(data.nbytes - 4 * n, out.size)
        scales = raw_array(data[: 4 * n], 4, (n, 1), "scales").view("<f4")
        codes = scratch("codes", out.size)
        decompress_into(data[4 * n :], codes)
        codes = codes.reshape(out.shape)
        rows = max(1, _BLOCK // hidden_size)
        for a in range(0, n, rows):
            block = E4M3[codes[a : a + rows]]
            with np.errstate(over="ignore", invalid="ignore"):  # a damaged or forged file may have any scale
                block *= scales[a : a + rows]
            from_float32(block, dtype, out[a : a + rows])

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name}
