"""Where a part's bytes come from, and the second fetch of bytes that fail a check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from hsx_dist.errors import FormatError
from hsx_dist.logger import get_logger
from hsx_dist.store.base import ObjectInfo

log = get_logger(__name__)
T = TypeVar("T")
_NO_MEMORY = "expected data that fits this machine's memory, got more. Read fewer tokens at once"


class PartSource(Protocol):
    """The subset of ``Store`` that reading needs.

    A source that keeps bytes also has ``refetch``, with the arguments of ``get_ranges``: it asks the store, and
    replaces what it keeps.
    """

    @property
    def url(self) -> str: ...

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]: ...

    def head(self, name: str) -> ObjectInfo: ...


def refetch(source: PartSource, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
    """``source.get_ranges``, past all bytes that ``source`` keeps."""
    views: list[memoryview] = getattr(source, "refetch", source.get_ranges)(name, ranges)
    return views


def fetched(source: PartSource, name: str, ranges: Sequence[tuple[int, int]], again: bool) -> list[memoryview]:
    """``get_ranges``, or ``refetch`` if ``again``. ``FormatError``: the object is too short for the ranges."""
    try:
        views = refetch(source, name, ranges) if again else source.get_ranges(name, ranges)
    except ValueError as e:  # the store raises it for a range past the object's end
        raise FormatError(f"cut short: {e}") from e
    except MemoryError as e:  # a file with holes has any size
        raise FormatError(
            f"expected ranges that fit this machine's memory, got {sum(b - a for a, b in ranges)} bytes. Read fewer "
            "tokens at once"
        ) from e
    for (start, stop), view in zip(ranges, views, strict=True):
        if view.nbytes != stop - start:
            raise FormatError(f"expected {stop - start} bytes at {start}, got {view.nbytes}: the object was cut short")
    return views


def verified(where: str, read: Callable[[bool], T]) -> T:
    """Return ``read(False)``. If its checks fail, return ``read(True)``, which must fetch with ``again``.

    The network may damage one answer. No cache may keep it, and a reader must not take it for a damaged object.
    ``FormatError``: both failed, or the memory is too small.
    """
    for again in (False, True):
        try:
            found = read(again)
        except FormatError as e:
            error = type(e)(f"{where}: {e}")
        except MemoryError:
            error = FormatError(f"{where}: {_NO_MEMORY}")
            break
        else:
            if again:
                log.warning(
                    "%s: the first fetch failed a check, the second passed. If this repeats, check the network and the "
                    "memory",
                    where,
                )
            return found
    # Neither the second fetch nor a kept error may hold the fetched bytes. The caught errors and their frames do.
    raise error


@contextmanager
def within_memory() -> Iterator[None]:
    """Raise ``MemoryError`` as ``FormatError``: a file with holes has any size."""
    try:
        yield
    except MemoryError as e:
        raise FormatError(_NO_MEMORY) from e


@contextmanager
def located(where: str) -> Iterator[None]:
    """Prefix format errors with ``where``."""
    try:
        yield
    except FormatError as e:
        raise type(e)(f"{where}: {e}") from e
