"""``zstd``: plain zstd frames, which standard tools can read; and zstd functions for other codecs.

Two bindings of libzstd are used. Python's (``compression.zstd``, before 3.14 its backport) encodes, as it accepts
parameters that ``zstandard`` does not. ``zstandard`` decodes, as it can fill memory that the caller reuses.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import zstandard

from hsx_dist.errors import FormatError
from hsx_dist.format.codecs.base import flat, scratch
from hsx_dist.store.base import Buffer

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# A frame is decoded in one call into memory of the known size, so its window is never allocated.
_MAX_WINDOW = 1 << 27
# RFC 8878: a block of at most 128 KiB takes a header of 3 bytes and one byte of content.
_MAX_BLOCK = 128 << 10
_MOST_EXPANSION = _MAX_BLOCK // 4
_RLE_BLOCK, _RESERVED_BLOCK = 1, 3

# A zstandard context serves one thread at a time, and is expensive to create.
_local = threading.local()


def _compressor(level: int) -> zstd.ZstdCompressor:
    made: dict[int, zstd.ZstdCompressor] = _local.__dict__.setdefault("compressors", {})
    if level not in made:
        made[level] = zstd.ZstdCompressor(level=level)
    return made[level]


# With the fast strategy the target length is the step of the match search. This value, the largest, skips a whole
# block. On byte planes matches only displace Huffman codes and cost time.
_HUFFMAN: dict[int, int] = {
    zstd.CompressionParameter.compression_level: 1,
    zstd.CompressionParameter.strategy: zstd.Strategy.fast,
    zstd.CompressionParameter.window_log: 17,
    zstd.CompressionParameter.hash_log: 6,
    zstd.CompressionParameter.chain_log: 6,
    zstd.CompressionParameter.search_log: 1,
    zstd.CompressionParameter.min_match: 7,
    zstd.CompressionParameter.target_length: 128 << 10,
}
# A step turns Huffman coding off unless ZSTD_c_literalCompressionMode requests it. libzstd has had this experimental
# parameter under this number since 1.3.8. A libzstd that refuses it is used without the step.
_LITERAL_COMPRESSION_MODE, _ENABLE = 1002, 1


def _huffman_compressor() -> zstd.ZstdCompressor:
    try:
        return zstd.ZstdCompressor(options={**_HUFFMAN, _LITERAL_COMPRESSION_MODE: _ENABLE})
    except (zstd.ZstdError, ValueError):
        return zstd.ZstdCompressor(options={**_HUFFMAN, zstd.CompressionParameter.target_length: 0})


def compress_huffman(data: np.ndarray[Any, Any]) -> bytes:
    """One zstd frame, Huffman-coded with almost no match search: on planes of floats matches only displace Huffman
    codes."""
    compressor: zstd.ZstdCompressor | None = getattr(_local, "huffman", None)
    if compressor is None:
        compressor = _local.huffman = _huffman_compressor()
    return compressor.compress(data.data, zstd.ZstdCompressor.FLUSH_FRAME)


def decompress_into(frame: memoryview, out: np.ndarray[Any, Any]) -> None:
    """Fill ``out``, uint8 ``[n]``, with the content of ``frame``.

    Raises ``FormatError`` unless ``frame`` is one whole zstd frame of exactly ``n`` bytes, without bytes after it.
    """
    expected = out.nbytes
    try:
        _check_frame(frame, expected)
        decompressor: zstandard.ZstdDecompressor | None = getattr(_local, "decompressor", None)
        if decompressor is None:
            decompressor = _local.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        # libzstd decodes in one call, without a copy, when it has the whole frame and memory for its whole content.
        with decompressor.stream_reader(frame) as reader:
            got = reader.readinto(out.data)
    except zstandard.ZstdError as e:
        raise FormatError(f"expected one zstd frame of {expected} bytes, got an error from zstd: {e}") from e
    if got != expected:
        raise FormatError(f"expected {expected} bytes from the zstd frame, got {got}")


def check_expansion(frame_bytes: int, expected: int) -> None:
    """Raise ``FormatError`` if no zstd frame of ``frame_bytes`` can hold ``expected`` bytes. Call before allocating."""
    if expected > frame_bytes * _MOST_EXPANSION:
        raise FormatError(
            f"expected a zstd frame that can hold {expected} bytes, got {frame_bytes} bytes, which hold at most "
            f"{frame_bytes * _MOST_EXPANSION}"
        )


def _check_frame(frame: memoryview, expected: int) -> None:
    """Read the headers of a zstd frame's blocks, to find a truncated frame or bytes after its end before decoding.

    Raises:
        FormatError: ``frame`` is not one whole frame with ``expected`` bytes as its content size.
    """
    try:
        parameters = zstandard.get_frame_parameters(frame)
    except zstandard.ZstdError as e:
        raise FormatError(f"expected one zstd frame of {expected} bytes, got an error from zstd: {e}") from e
    if parameters.content_size != expected:
        raise FormatError(f"expected a zstd frame with {expected} bytes of content, got {parameters.content_size}")
    if parameters.dict_id:
        raise FormatError(f"expected a zstd frame without a dictionary, got dictionary id {parameters.dict_id}")
    at = zstandard.frame_header_size(frame)
    last = False
    while not last:
        header = int.from_bytes(frame[at : at + 3], "little")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        at += 3 + (1 if kind == _RLE_BLOCK else size)
        if at > frame.nbytes or kind == _RESERVED_BLOCK:
            raise FormatError(f"expected one zstd frame of {expected} bytes, got a truncated or damaged one")
    at += 4 if parameters.has_checksum else 0
    if at != frame.nbytes:
        raise FormatError(f"expected a zstd frame of {at} bytes, got {frame.nbytes}")


@dataclass(frozen=True, slots=True)
class ZstdCodec:
    """The values of a chunk as one zstd frame of ``level`` (1 to 19; levels above 1 hardly help on hidden states)."""

    name: ClassVar[str] = "zstd"
    lossy: ClassVar[bool] = False
    level: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.level, int) or isinstance(self.level, bool) or not 1 <= self.level <= 19:
            raise ValueError(f"codec zstd: expected a level from 1 to 19, got {self.level!r}")

    def encode(self, x: np.ndarray[Any, Any], dtype: str) -> tuple[Buffer, ...]:  # noqa: ARG002
        return (_compressor(self.level).compress(np.ascontiguousarray(x).data, zstd.ZstdCompressor.FLUSH_FRAME),)

    def decode(self, data: memoryview, out: np.ndarray[Any, Any], dtype: str) -> None:  # noqa: ARG002
        check_expansion(data.nbytes, out.nbytes)
        if out.flags.c_contiguous:
            decompress_into(data, flat(out))
            return
        values = scratch("values", out.nbytes)
        decompress_into(data, values)
        out[:] = values.view(out.dtype).reshape(out.shape)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "level": self.level}
