"""Reading compressed files to their true end, in memory that does not depend on what they hold.

A few KiB can expand to GiB, so every call has a limit for what comes out. zstandard's own stream reader stops silently
after the first frame and at a truncated one, which would lose rows; Python's ``LZMAFile`` allocates any dictionary that
a file claims.
"""

from __future__ import annotations

import bz2
import io
import lzma
import sys
from collections.abc import Callable
from typing import IO, Any

from hsx_dist.errors import FormatError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_READ = 1 << 17
#: What a decompressor may allocate: a file's window or dictionary. ``xz -9`` needs 65 MiB, ``zstd --long`` 128 MiB.
MAX_DICTIONARY_BYTES = 128 << 20
_WINDOW_LOG = 27

#: What the decompressors raise for a damaged file.
BROKEN: tuple[type[Exception], ...] = (EOFError, lzma.LZMAError, zstd.ZstdError)


#: What is decompressed as a whole may take so many times its stored bytes, beyond so many bytes.
_HELD_EXPANSION, _HELD_FREE_BYTES = 200, 256 << 20


def check_expansion(made: int, stored: int, what: str) -> None:
    """Raise FormatError before ``stored`` bytes are decompressed in one step to a claimed ``made`` bytes that are more
    than a table holds."""
    if made > _HELD_FREE_BYTES + _HELD_EXPANSION * stored:
        raise FormatError(
            f"expected at most {_HELD_EXPANSION} decompressed bytes for each stored one, got more in {what}. Write the "
            "file without compression"
        )


_Decompressor = zstd.ZstdDecompressor | lzma.LZMADecompressor | bz2.BZ2Decompressor
#: Rows may expand by so much beyond so many bytes. More is repetition that costs the driver an entry for each row.
MAX_EXPANSION, FREE_BYTES = 1000, 1 << 30
#: The same for lines and rows: short ones cost the driver as much as long ones.
MOST_ROWS, FREE_ROWS = 16, 1 << 20


def zstd_decompressor() -> _Decompressor:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})


def xz_decompressor() -> _Decompressor:
    return lzma.LZMADecompressor(memlimit=MAX_DICTIONARY_BYTES)


#: Ending of a name → what decompresses such a file. fsspec does ``.gz``, whose memory and expansion are bounded.
DECOMPRESSORS: dict[str, Callable[[], _Decompressor]] = {
    ".zst": zstd_decompressor,
    ".zstd": zstd_decompressor,
    ".xz": xz_decompressor,
    ".lzma": xz_decompressor,
    ".bz2": bz2.BZ2Decompressor,
}


class DecompressedFile(io.RawIOBase):
    """The decompressed bytes of ``source``: all of its frames. EOFError when it ends within one, and errors as
    ``BROKEN``."""

    def __init__(self, source: IO[bytes], make: Callable[[], _Decompressor]) -> None:
        super().__init__()
        self._source = source
        self._make = make
        self._frame: _Decompressor | None = None
        self._rest = b""  # compressed bytes after the end of a frame
        self._read = self._made = 0  # bytes
        self._lines = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer``, or a part of it; 0 at the end."""
        target = memoryview(buffer).cast("B")
        while True:
            data = b""
            if self._frame is None or self._frame.needs_input:
                data = self._rest
                if not data:
                    data = self._source.read(_READ)
                    self._read += len(data)
                self._rest = b""
                if not data and self._frame is not None:
                    raise EOFError("the file ends within a compressed frame")
                if not data:
                    return 0
            if self._frame is None:
                self._frame = self._make()
            try:
                found = self._frame.decompress(data, len(target))
            except OSError as e:  # bz2's word for a damaged file
                raise EOFError(str(e)) from e
            self._made += len(found)
            if self._made > FREE_BYTES and self._made > MAX_EXPANSION * self._read:
                raise FormatError(
                    f"expected at most {MAX_EXPANSION} decompressed bytes for each compressed one, got more beyond "
                    f"{FREE_BYTES}. Give the file decompressed"
                )
            self._lines += found.count(b"\n")
            if self._lines > FREE_ROWS and self._lines > MOST_ROWS * self._read:
                raise FormatError(
                    f"expected at most {MOST_ROWS} lines for each compressed byte, got more beyond {FREE_ROWS}. "
                    "Give the file decompressed"
                )
            if self._frame.eof:
                self._rest = self._frame.unused_data
                self._frame = None
            if found:
                target[: len(found)] = found
                return len(found)

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()
