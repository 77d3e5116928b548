"""Reads of a file's bytes that are those that were asked for, to the end that the store states.

fsspec takes each answer of a server for the bytes of the file, also a page or a part. It takes an empty answer for the
file's end.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import IO, Any

from hsx_dist.errors import HsxError, Unavailable
from hsx_dist.inputs.file_systems import is_web, schemes_of
from hsx_dist.inputs.web import WebRanges


class ArrivingFile:
    """A file that calls ``arrive`` with the number of bytes of each read."""

    def __init__(self, file: Any, arrive: Callable[[int], None]) -> None:
        self.file, self._arrive = file, arrive

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> ArrivingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def read(self, size: int = -1) -> bytes:
        data: bytes = self.file.read(size)
        self._arrive(len(data))
        return data


class WholeFile(io.RawIOBase):
    """Reads a file in order. Raises ``Unavailable`` if it ends before ``size``, or, unless ``may_grow``, after it."""

    def __init__(self, file: Any, shown: str, size: int | None, *, may_grow: bool) -> None:
        super().__init__()
        self._file, self._shown, self._size, self._may_grow = file, shown, size, may_grow
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        data = self._file.read(len(target))
        self._at += len(data)
        if self._size is not None and target:
            ends_early = not data and self._at < self._size
            if ends_early or (self._at > self._size and not self._may_grow):
                raise not_whole(self._shown, self._size, f"{self._at}{'' if ends_early else ' or more'}")
        target[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def whole_ranges(file: Any, shown: str) -> Callable[[int, int], bytes]:
    """Return a function that fetches a range of fsspec's ``file``: exactly the bytes from its start to its end.

    The function raises ``Unavailable`` for another answer.
    """
    fetch = WebRanges(file, shown) if is_web(file.fs) else file._fetch_range
    if "s3" in schemes_of(file.fs):
        from hsx_dist.store.s3_answers import STATED_SIZE  # part of an extra

        arguments = "read_kw" if hasattr(file, "read_kw") else "req_kw"  # before s3fs 2026.9
        setattr(file, arguments, {**getattr(file, arguments), STATED_SIZE: file.size})

    def fetched(start: int, end: int) -> bytes:
        end = min(end, file.size)
        if start >= end:  # fsspec's cache of blocks asks behind the end. S3 answers with the whole file
            return b""
        try:
            data: bytes = fetch(start, end)
        except (HsxError, MemoryError):
            raise
        except Exception as e:  # noqa: BLE001 (as in read_batches; zipfile would give some another type)
            raise _no_bytes(start, end, shown, type(e).__name__) from None
        if len(data) != end - start:
            raise _no_bytes(start, end, shown, f"an answer of {len(data)} bytes")
        return data

    return fetched


def _no_bytes(start: int, end: int, shown: str, got: str) -> Unavailable:
    return Unavailable(
        f"expected the bytes from {start} to {end} of {shown}, got {got}. Try again: stored rows are skipped"
    )


def require_size(file: IO[bytes], shown: str, size: int) -> None:
    """Raise ``Unavailable`` if a file that can seek has another size. Streams have no size."""
    try:
        found = file.seek(0, io.SEEK_END)
        file.seek(0)
    except (OSError, ValueError):
        return
    if found != size:
        raise not_whole(shown, size, str(found))


def not_whole(shown: str, size: int, got: str) -> Unavailable:
    """Return the error for a file with another size than the store states."""
    return Unavailable(
        f"expected {shown} to have {size} bytes, as its store states, got {got}. Try again: stored rows are skipped. "
        "Delete its copy if a cache is before its URL"
    )
