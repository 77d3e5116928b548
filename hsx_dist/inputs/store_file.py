"""Files as Arrow reads them: with a limit of the bytes that are read, and errors that differ from Arrow's."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import IO
from zipfile import ZipExtFile

from hsx_dist.errors import ConfigError, FormatError
from hsx_dist.inputs.read_ahead import fetched_bytes

#: How often Arrow may read or fetch the bytes of a file, and bytes beyond it. It reads the footer or the schema a few
#: times, all other bytes at most once, unless the footer names them several times. Parts in order are fetched once.
_MOST_READS, _FREE_READ = 4, 1 << 16
#: How often seeks may decompress a member of a zip file before ``skips`` is called. Arrow opens a file with 7.
_FREE_SKIPS = 8


class StoreFailed(Exception):
    """The file system raised ``error`` while Arrow read a file."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class StoreFile(io.RawIOBase):
    """A file that Arrow reads. Errors of the file system become ``StoreFailed``, so that they differ from Arrow's.

    ``before_read``: called before Arrow reads bytes. What it raises ends the work on the file.
    ``skips``: called with the bytes that a further seek decompressed. What it raises ends the work on the file.
    ``stored``: the file's bytes in the store, which are fewer than its own in a zip file. None: its own.

    Raises:
        ConfigError: the file has no size that the store knows, and is a stream. Arrow reads a file's end first.
    """

    def __init__(self, file: IO[bytes], shown: str, stored: int | None) -> None:
        super().__init__()
        self._file = file
        self.before_read: Callable[[], None] | None = None
        self.skips: Callable[[int], None] | None = None
        try:
            size = file.seek(0, io.SEEK_END)
        except (OSError, ValueError):
            if stored is not None:
                raise
            raise ConfigError(
                f"input.path: expected the size of {shown}, got none from its server. Use a server that sends "
                "Content-Length, or copy the file to a folder"
            ) from None
        file.seek(0)
        self.size, self.stored = size, size if stored is None else min(size, stored)
        self._read = self._skipped = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        before = self._file.tell()
        at = self._file.seek(offset, whence)
        if self.skips is not None and isinstance(self._file, ZipExtFile):
            # It reads all bytes between, and for a position before the current one all bytes from the member's start.
            skipped = at - before if at >= before else at
            self._skipped += skipped
            if self._skipped > _FREE_SKIPS * self.size:
                self.skips(skipped)
        return at

    def read(self, size: int = -1) -> bytes:  # type: ignore[override]
        if self.before_read is not None:
            self.before_read()
        try:
            data = self._file.read(size)
        except MemoryError:
            raise
        except Exception as e:  # noqa: BLE001 (as in read_batches)
            raise StoreFailed(e) from None
        self._read += len(data)
        if max(self._read, fetched_bytes(self._file)) > _FREE_READ + _MOST_READS * self.size:
            raise FormatError(
                f"expected parts in order that do not overlap, got a file of {self.size} bytes that names the same "
                "bytes many times, or jumps many times. Write the file again with its library"
            )
        return data
