"""``zstd``: plain zstd frames, for those who want only a stock tool; and what other codecs need of zstd."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import zstandard

from hsx_dist.errors import FormatError
from hsx_dist.format.codecs.base import Plane, itemsize, raw_plane
from hsx_dist.store.base import Buffer, as_bytes_view

# One frame is decoded into memory of a size that is known beforehand; a larger window than this has no honest use.
_MAX_WINDOW = 1 << 27

# A zstandard context serves one thread at a time, and is dear to make.
_local = threading.local()


def _compressor(level: int) -> zstandard.ZstdCompressor:
    made: dict[int, zstandard.ZstdCompressor] = _local.__dict__.setdefault("compressors", {})
    if level not in made:
        made[level] = zstandard.ZstdCompressor(level=level)
    return made[level]


def compress_huffman(data: np.ndarray[Any, Any]) -> bytes:
    """One zstd frame, Huffman-coded with next to no match search: matches only displace it on planes of floats."""
    compressor: zstandard.ZstdCompressor | None = getattr(_local, "huffman", None)
    if compressor is None:
        compressor = _local.huffman = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters(
                compression_level=1,
                strategy=zstandard.STRATEGY_FAST,
                window_log=17,
                hash_log=6,
                chain_log=6,
                search_log=1,
                min_match=7,
                target_length=0,  # with this strategy anything else turns Huffman coding off
                write_content_size=True,
            )
        )
    return compressor.compress(data.data)


def decompress(data: Buffer, expected: int, plane: str) -> bytes:
    """The content of the zstd frame ``data``. ``FormatError`` unless it is ``expected`` bytes, before allocating."""
    view = as_bytes_view(data)
    try:
        size = zstandard.frame_content_size(view)
        if size != expected:
            raise FormatError(f"plane {plane!r}: expected a zstd frame of {expected} bytes, it says {size}")
        decompressor: zstandard.ZstdDecompressor | None = getattr(_local, "decompressor", None)
        if decompressor is None:
            decompressor = _local.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        content = decompressor.decompress(view, max_output_size=expected, allow_extra_data=False)
    except zstandard.ZstdError as e:
        raise FormatError(f"plane {plane!r}: expected one zstd frame of {expected} bytes: {e}") from e
    if len(content) != expected:
        raise FormatError(f"plane {plane!r}: expected {expected} bytes, the zstd frame gave {len(content)}")
    return content


@dataclass(frozen=True, slots=True)
class ZstdCodec:
    """The values of a chunk as one zstd frame of ``level`` (1 to 19; higher levels hardly help on hidden states)."""

    name: ClassVar[str] = "zstd"
    level: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.level, int) or isinstance(self.level, bool) or not 1 <= self.level <= 19:
            raise ValueError(f"codec zstd: expected a level from 1 to 19, got {self.level!r}")

    def planes(self, dtype: str) -> tuple[Plane, ...]:  # noqa: ARG002
        return (Plane("z", None),)

    def encode(self, x: np.ndarray[Any, Any], dtype: str) -> tuple[Buffer, ...]:  # noqa: ARG002
        return (_compressor(self.level).compress(np.ascontiguousarray(x).data),)

    def decode(self, planes: Sequence[Buffer], n: int, hidden_size: int, dtype: str) -> np.ndarray[Any, Any]:
        (z,) = planes
        width = itemsize(dtype)
        return raw_plane(decompress(z, n * hidden_size * width, "z"), width, n, hidden_size, "z")

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "level": self.level}
