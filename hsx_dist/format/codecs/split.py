"""``split``: byte planes. Sign and exponent of hidden states compress, the mantissa is noise and stays raw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hsx_dist.errors import FormatError
from hsx_dist.format.codecs.base import flat, itemsize, raw_array, scratch
from hsx_dist.format.codecs.zstd import check_expansion, compress_huffman, decompress_into
from hsx_dist.store.base import Buffer


@dataclass(frozen=True, slots=True)
class SplitCodec:
    """The low bytes of every element raw, then the high bytes Huffman-coded: one zstd frame.

    bf16 and fp16: ``n * H`` low bytes, the frame. fp32: ``n * H`` low halves (uint16, little-endian), ``n * H`` third
    bytes, the frame.
    """

    name: ClassVar[str] = "split"
    lossy: ClassVar[bool] = False

    def encode(self, x: np.ndarray[Any, Any], dtype: str) -> tuple[Buffer, ...]:
        # Shifts and casts run at memory speed; slicing bytes out with a stride of two is five times slower.
        width = itemsize(dtype)
        high = scratch("high", x.size).reshape(x.shape)
        np.right_shift(x, 8 * (width - 1), out=high, casting="unsafe")
        frame = compress_huffman(high)
        if width == 2:
            return flat(x.astype(np.uint8, order="C")), frame
        third = np.empty(x.shape, np.uint8)
        np.right_shift(x, 16, out=third, casting="unsafe")
        return flat(x.astype("<u2", order="C")), flat(third), frame

    def decode(self, data: memoryview, out: np.ndarray[Any, Any], dtype: str) -> None:
        size, width = out.size, itemsize(dtype)
        raw = size * (width - 1)
        if data.nbytes < raw:
            raise FormatError(f"codec split: expected at least {raw} bytes of raw planes, got {data.nbytes}")
        check_expansion(data.nbytes - raw, size)
        high = scratch("high", size)
        decompress_into(data[raw:], high)
        # In place and in few passes; what comes in between stays in the processor's cache.
        out[:] = high.reshape(out.shape)
        if width == 2:
            out <<= 8
            out |= raw_array(data[:size], 1, out.shape, "low bytes")
        else:
            out <<= 8
            out |= raw_array(data[2 * size : 3 * size], 1, out.shape, "third bytes")
            out <<= 16
            out |= raw_array(data[: 2 * size], 2, out.shape, "low halves")

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name}
