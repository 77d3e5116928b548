"""Reads compressed files to their true end, in memory that does not depend on their contents.

A few KiB can expand to GiB, so every call limits the decompressed bytes. zstandard's own stream reader stops silently
after the first frame and at a truncated frame, which would lose rows. Python's ``LZMAFile`` allocates any dictionary
that a file claims. ``GzipFile`` reads a long name in a file's header byte by byte, and an empty file as one without
rows.
"""

from __future__ import annotations

import bz2
import io
import lzma
import sys
import zlib
from collections.abc import Callable
from typing import IO, Any

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

#: Bytes of a compressed file that are read at once. All that follow a frame are copied, and a frame may have 8 bytes.
_READ = 1 << 14
#: Limit of a file's window or dictionary in memory. ``xz -9`` needs 65 MiB, ``zstd --long`` 128 MiB.
MAX_DICTIONARY_BYTES = 128 << 20
_WINDOW_LOG = 27
#: Memory of an xz decoder besides the dictionary. Its files state dictionaries as 96 or 128 MiB, and nothing between.
_DECODER_BYTES = 1 << 20

#: Errors of the decompressors for a damaged file.
BROKEN: tuple[type[Exception], ...] = (EOFError, lzma.LZMAError, zlib.error, zstd.ZstdError)


class GzipDecompressor:
    """A member of a gzip file. Has the attributes and the method of ``bz2.BZ2Decompressor``."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        self._is_full = False

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._is_full

    def decompress(self, data: bytes, most: int) -> bytes:
        found = self._zlib.decompress(self._zlib.unconsumed_tail + data, most)
        # zlib may hold more bytes although it has consumed all of ``data``.
        self._is_full = len(found) == most and not self._zlib.eof
        return found


_Decompressor = zstd.ZstdDecompressor | lzma.LZMADecompressor | bz2.BZ2Decompressor | GzipDecompressor


def zstd_decompressor() -> _Decompressor:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})


def xz_decompressor() -> _Decompressor:
    return lzma.LZMADecompressor(memlimit=MAX_DICTIONARY_BYTES + _DECODER_BYTES)


#: Ending of a name → decompressor.
DECOMPRESSORS: dict[str, Callable[[], _Decompressor]] = {
    ".gz": GzipDecompressor,
    ".zst": zstd_decompressor,
    ".zstd": zstd_decompressor,
    ".xz": xz_decompressor,
    ".lzma": xz_decompressor,
    ".bz2": bz2.BZ2Decompressor,
}


class DecompressedFile(io.RawIOBase):
    """The decompressed bytes of all frames of ``source``. Raises errors of ``BROKEN``, and EOFError if the file ends
    within a frame, or has none.

    ``begin``: called for each frame before it is decompressed. What it raises ends the work on the file.
    """

    def __init__(
        self, source: IO[bytes], make: Callable[[], _Decompressor], begin: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._begin = begin
        self._source = source
        self._make = make
        self._frame: _Decompressor | None = None
        self._rest = b""  # compressed bytes after the end of a frame
        self._padding = b""  # what may be between frames, and after the last one
        self._began = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer``, or its beginning. Returns the number of bytes, 0 at the end."""
        target = memoryview(buffer).cast("B")
        while True:
            data = b""
            if self._frame is None or self._frame.needs_input:
                data = self._rest or self._source.read(_READ)
                self._rest = b""
                if not data and self._frame is not None:
                    raise EOFError("the file ends within a compressed frame")
                if not data and not self._began:
                    raise EOFError("the file is empty: also without rows it has a compressed frame")
                if not data:
                    return 0
                self._began = True
            if self._frame is None:
                data = data.lstrip(self._padding)
                if not data:
                    continue
                self._begin()
                self._frame = self._make()
            try:
                found = self._frame.decompress(data, len(target))
            except OSError as e:  # bz2 raises it for a damaged file
                raise EOFError(str(e)) from e
            if self._frame.eof:
                self._rest = self._frame.unused_data
                self._frame = None
                # xz allows null bytes after a stream, and gzip's tools do. The first byte of .lzma may be a null.
                self._padding = b"\0" if self._make in (xz_decompressor, GzipDecompressor) else b""
            if found:
                target[: len(found)] = found
                return len(found)

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()
