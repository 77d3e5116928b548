"""``split``: byte planes. Sign and exponent of hidden states compress, the mantissa is noise and stays raw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hsx_dist.errors import FormatError
from hsx_dist.format.codecs.base import flat, itemsize, raw_array, scratch
from hsx_dist.format.codecs.zstd import check_expansion, compress_huffman, decompress_into
from hsx_dist.store.base import Buffer

#: Elements that are split at once.
_BLOCK = 1 << 16


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
        width, rows = itemsize(dtype), max(1, _BLOCK // max(1, x.shape[1]))
        high = scratch("high", x.size).reshape(x.shape)
        low = np.empty(x.shape, f"<u{width // 2}")
        third = np.empty(x.shape, np.uint8) if width == 4 else None
        # A block at a time: what is read from memory once is still in the cache when it is read again.
        for a in range(0, len(x), rows):
            block = x[a : a + rows]
            np.right_shift(block, 8 * (width - 1), out=high[a : a + rows], casting="unsafe")
            np.copyto(low[a : a + rows], block, casting="unsafe")
            if third is not None:
                np.right_shift(block, 16, out=third[a : a + rows], casting="unsafe")
        frame = compress_huffman(high)
        return (flat(low), frame) if third is None else (flat(low), flat(third), frame)

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
