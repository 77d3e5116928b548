"""``split``: byte planes. Sign and exponent of hidden states compress; the mantissa is noise and is stored raw."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hsx_dist.errors import FormatError
from hsx_dist.format.codecs.base import Allocate, Look, allocate, blocks, itemsize, raw_array, scratch
from hsx_dist.format.codecs.zstd import check_expansion, compress_huffman, decompress_into
from hsx_dist.store.base import Buffer

_local = threading.local()


@dataclass(frozen=True, slots=True)
class SplitCodec:
    """The low bytes of every element raw, then the high bytes Huffman-coded: one zstd frame.

    bf16 and fp16: ``n * H`` low bytes, the frame. fp32: ``n * H`` low halves (uint16, little-endian), ``n * H`` third
    bytes, the frame.
    """

    name: ClassVar[str] = "split"
    lossy: ClassVar[bool] = False

    def encode(self, x: np.ndarray[Any, Any], dtype: str) -> tuple[Buffer, ...]:
        return (self.encode_into(x, dtype),)

    def encode_into(
        self, x: np.ndarray[Any, Any], dtype: str, allocate: Allocate = allocate, look: Look = lambda _: None
    ) -> np.ndarray[Any, Any]:
        """Like ``encode``, into one array from ``allocate``."""
        width = itemsize(dtype)
        raw, half = x.size * (width - 1), x.size * (width // 2)
        # The raw planes are written to their final place, so memory for the frame is allocated before the frame exists.
        # Its size is estimated from this thread's last frame.
        data = allocate(raw + int(x.size * getattr(_local, "frame_share", 0.5)) + 1024)
        high = scratch("high", x.size).reshape(x.shape)
        low = data[:half].view(f"<u{width // 2}").reshape(x.shape)
        third = data[half:raw].reshape(x.shape) if width == 4 else low
        for rows, above, below, between in blocks(x, high, low, third):
            # Casts run at memory speed; slicing bytes with a stride of 2 is 5 times slower.
            look(rows)
            _high_bytes(rows, above)
            np.copyto(below, rows, casting="unsafe")
            if width == 4:
                np.right_shift(rows, 16, out=between, casting="unsafe")
        frame = compress_huffman(high)
        _local.frame_share = 1.03 * len(frame) / max(x.size, 1)
        if raw + len(frame) > data.nbytes:
            data, planes = allocate(raw + len(frame)), data
            data[:raw] = planes[:raw]
        data[raw : raw + len(frame)] = np.frombuffer(frame, np.uint8)
        return data[: raw + len(frame)]

    def decode(self, data: memoryview, out: np.ndarray[Any, Any], dtype: str) -> None:
        size, width = out.size, itemsize(dtype)
        raw = size * (width - 1)
        if data.nbytes < raw:
            raise FormatError(f"codec split: expected at least {raw} bytes of raw planes, got {data.nbytes}")
        check_expansion(data.nbytes - raw, size)
        low = [raw_array(data[: size * (width // 2)], width // 2, out.shape, "low part")]
        if width == 4:
            low.insert(0, raw_array(data[2 * size : raw], 1, out.shape, "third bytes"))
        high = scratch("high", size)
        decompress_into(data[raw:], high)
        # In numpy a product is faster than a shift. Each operation widens its bytes one buffer at a time, in the L1
        # cache, which is faster than a cast of the whole plane in advance.
        above = high.reshape(out.shape)
        for plane in low:
            np.multiply(above, 1 << 8 * plane.itemsize, out=out, dtype=out.dtype, casting="unsafe")
            np.bitwise_or(out, plane, out=out, dtype=out.dtype, casting="unsafe")
            above = out

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name}


def _high_bytes(x: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
    """Copy the high byte of every element of ``x`` into ``out``, contiguous uint8 of the same shape."""
    bits = 8 * (x.itemsize - 1)
    if not x.flags.c_contiguous:
        np.right_shift(x, bits, out=out, casting="unsafe")
        return
    # In a view that starts at the first high byte, the high byte of each element is the lowest one. A cast to uint8
    # keeps only it, and is twice as fast as a shift. The last element would end after the array, so it is shifted.
    shifted = np.ndarray((x.size - 1,), x.dtype, buffer=x.data, offset=x.itemsize - 1)
    last = out.reshape(-1)
    np.copyto(last[:-1], shifted, casting="unsafe")
    last[-1] = x[-1, -1] >> bits
