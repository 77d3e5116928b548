"""Reading a zstandard file to its true end: all of its frames, and an error when it was cut off.

zstandard's own stream reader stops silently after the first frame and at a truncated one, which would lose rows.
"""

from __future__ import annotations

import io
from typing import IO, Any

import zstandard

_READ = 1 << 18


class ZstdFile(io.RawIOBase):
    """The decompressed bytes of ``source``; EOFError when it ends within a frame, ZstdError when it is none."""

    def __init__(self, source: IO[bytes]) -> None:
        super().__init__()
        self._source = source
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._ready = memoryview(b"")
        self._rest = b""  # compressed bytes after the end of a frame

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer``; 0 at the end."""
        while not self._ready:
            data = self._rest or self._source.read(_READ)
            self._rest = b""
            if not data:
                if self._frame is not None:
                    raise EOFError("the file ends within a zstandard frame")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._ready = memoryview(self._frame.decompress(data))
            if self._frame.eof:
                self._rest = self._frame.unused_data
                self._frame = None
        target = memoryview(buffer).cast("B")
        n = min(len(target), len(self._ready))
        target[:n] = self._ready[:n]
        self._ready = self._ready[n:]
        return n

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()
