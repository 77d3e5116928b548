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

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

#: Bytes of a compressed file that are read at once.
_READ = 1 << 17
#: What a decompressor may allocate: a file's window or dictionary. ``xz -9`` needs 65 MiB, ``zstd --long`` 128 MiB.
MAX_DICTIONARY_BYTES = 128 << 20
_WINDOW_LOG = 27

#: What the decompressors raise for a damaged file.
BROKEN: tuple[type[Exception], ...] = (EOFError, lzma.LZMAError, zstd.ZstdError)


_Decompressor = zstd.ZstdDecompressor | lzma.LZMADecompressor | bz2.BZ2Decompressor
#: Files of lines may expand by so much beyond so many bytes. More is repetition that costs the driver time.
MAX_EXPANSION, FREE_BYTES = 1000, 1 << 30
#: The same for lines and rows: short ones cost the driver an entry each, as long ones do.
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

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer``, or its beginning. Returns the number of bytes, 0 at the end."""
        target = memoryview(buffer).cast("B")
        while True:
            data = b""
            if self._frame is None or self._frame.needs_input:
                data = self._rest
                if not data:
                    data = self._source.read(_READ)
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
