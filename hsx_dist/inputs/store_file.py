"""Files as Arrow reads them: with a limit of the bytes that are read, and errors that differ from Arrow's."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import IO
from zipfile import ZipExtFile

from hsx_dist.errors import FormatError
from hsx_dist.inputs.read_ahead import fetched_bytes
from hsx_dist.inputs.web import no_ranges
from hsx_dist.inputs.whole_file import not_whole

#: How often Arrow may read or fetch the bytes of a file, and bytes beyond it. It reads the footer or the schema a few
#: times, all other bytes at most once, unless the footer names them several times. Parts in order are fetched once.
_MOST_READS, _FREE_READ = 4, 1 << 16
#: How often seeks may decompress a member of a zip file before they count. Arrow opens a file with 7.
_FREE_SKIPS = 8
#: Bytes of such a member that are decompressed at once before Arrow gets it.
_PIECE = 1 << 20


class StoreFailed(Exception):
    """The file system raised ``error`` while Arrow read a file."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class StoreFile(io.RawIOBase):
    """A file that Arrow reads. Errors of the file system become ``StoreFailed``, so that they differ from Arrow's.

    ``at_read``: called when bytes arrived, before Arrow gets them. What it raises ends the work on the file.
    ``after_read``: called with the position and the bytes of a read. What it raises ends the work on the file.
    ``expands``: called for each read, and for seeks that decompress again. Its argument is the bytes that a member of a
    zip file decompressed for it, else 0. What it raises ends the work on the file.
    ``failed``: the error of the file system that ended a read.
    ``last_read``: the number of bytes of the last read.
    ``stored``: the file's bytes in the store, if they are known.
    ``expand``: counts the decompressed bytes of a zip file's member, which is read once to its end.

    Raises:
        ConfigError: the file is a stream. Arrow reads a file's end first.
        BadZipFile: a zip file's member has another checksum than the zip file says.
    """

    def __init__(self, file: IO[bytes], shown: str, stored: int | None, expand: Callable[[int], None]) -> None:
        super().__init__()
        self._file, self._shown = file, shown
        self.failed: Exception | None = None  # Arrow gives some errors of a read another type
        self.at_read: Callable[[], None] | None = None
        self.after_read: Callable[[int, bytes], None] | None = None
        self.expands: Callable[[int], None] | None = None
        self.size = _read_once(file, expand) if isinstance(file, ZipExtFile) else _size(file, shown, stored)
        file.seek(0)
        self._read = self._skipped = self.last_read = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        before = self._file.tell()
        at = self._file.seek(offset, whence)
        if self.expands is not None and isinstance(self._file, ZipExtFile):
            # It reads all bytes between, and for a position before the current one all bytes from the member's start.
            skipped = at - before if at >= before else at
            self._skipped += skipped
            if self._skipped > _FREE_SKIPS * self.size:
                self.expands(skipped)
        return at

    def read(self, size: int = -1) -> bytes:  # type: ignore[override]
        """Return all of the ``size`` bytes that the file has. Arrow takes fewer as the file's end, or as its bytes."""
        begin = self._file.tell()
        try:
            data = self._whole(size)
        except MemoryError:
            raise
        except Exception as e:  # noqa: BLE001 (as in read_batches)
            self.failed = e
            raise StoreFailed(e) from None
        self.last_read = len(data)
        self._read += len(data)
        if max(self._read, fetched_bytes(self._file)) > _FREE_READ + _MOST_READS * self.size:
            raise FormatError(
                f"expected parts in order that do not overlap, got a file of {self.size} bytes that names the same "
                "bytes many times, or jumps many times. Write the file again with its library"
            )
        if self.expands is not None:
            self.expands(len(data) if isinstance(self._file, ZipExtFile) else 0)
        if self.at_read is not None:
            self.at_read()
        if self.after_read is not None:
            self.after_read(begin, data)
        return data

    def _whole(self, size: int) -> bytes:
        begin = self._file.tell()
        left = max(self.size - begin, 0)
        left = left if size is None or size < 0 else min(size, left)
        data = self._file.read(left)
        while len(data) < left:
            more = self._file.read(left - len(data))
            if not more and isinstance(self._file, ZipExtFile):
                return data  # its directory claims a false size
            if not more:
                raise not_whole(self._shown, self.size, str(begin + len(data)))
            data += more
        return data


def _size(file: IO[bytes], shown: str, stored: int | None) -> int:
    try:
        return file.seek(0, io.SEEK_END)
    except (OSError, ValueError) as e:
        if stored is not None and not isinstance(e, ValueError):
            raise
        raise no_ranges(shown) from None


def _read_once(member: ZipExtFile, expand: Callable[[int], None]) -> int:
    """Read a zip file's member to its end, which checks its checksum. Return its size.

    From Python 3.12 on, a member is not checked after a seek. Arrow seeks, and would read changed rows.
    """
    size = 0
    while data := member.read(_PIECE):
        size += len(data)
        expand(len(data))
    return size
