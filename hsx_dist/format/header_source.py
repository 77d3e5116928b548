"""Fetch the header of a part, within a limit of the memory of the headers that all threads open at once."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from hsx_dist.errors import FormatError
from hsx_dist.format.byte_budget import ByteBudget
from hsx_dist.format.description import MAX_HEADER_BYTES
from hsx_dist.format.part_source import PartSource, fetched

#: Memory of a parsed header for each of its bytes. Measured for headers of many samples with one layer: 7.4.
PARSED = 8
#: One larger header is opened alone.
_AT_ONCE = 256 << 20
#: Of a header that no receipt proves and that is larger than the first, so many bytes are read before the rest. In a
#: file with holes they are zero.
_LARGE, _LOOK = 1 << 20, 64 << 10

_budget = ByteBudget(_AT_ONCE)


def _renew_budget() -> None:
    """In a forked process, the parent's threads that hold bytes do not exist."""
    global _budget
    _budget = ByteBudget(_AT_ONCE)


os.register_at_fork(after_in_child=_renew_budget)


@contextmanager
def header_of(
    store: PartSource, name: str, header_bytes: int | None, size: int, front_bytes: int, again: bool
) -> Iterator[tuple[bytes, bytes]]:
    """Yield the header without its length field, and the first ``front_bytes`` of the data. Parse it in the context.

    Blocks until its memory is free. A thread in the context waits only for the store, so a thread that holds memory of
    another kind may call this without a deadlock. Arguments and errors: as ``Part.open``. Without ``header_bytes`` no
    data is fetched.
    """
    if header_bytes is None:
        header_bytes, front_bytes = _declared(fetched(store, name, [(0, 8)], again)[0], size), 0
        if header_bytes > _LARGE:
            _check_text(fetched(store, name, [(8, _LOOK)], again)[0])
    elif not 8 <= header_bytes <= 8 + MAX_HEADER_BYTES:
        raise FormatError(f"expected a header of 8 to {8 + MAX_HEADER_BYTES} bytes, got a receipt with {header_bytes}")
    with _budget.hold(PARSED * header_bytes + front_bytes):
        data = fetched(store, name, [(0, header_bytes + front_bytes)], again)[0]
        length = _declared(data, size)
        if length != header_bytes:
            raise FormatError(f"expected a header of {header_bytes} bytes, got {length}")
        _check_text(data[8:length])
        body, front = bytes(data[8:length]), bytes(data[length:])
        del data  # the parser takes several times the memory
        yield body, front


def _declared(data: memoryview, size: int) -> int:
    """Bytes of length field and header, as the first bytes of an object of ``size`` bytes say."""
    (length,) = struct.unpack_from("<Q", data)
    if length > MAX_HEADER_BYTES or 8 + length > size:
        raise FormatError(
            f"expected a header of at most {MAX_HEADER_BYTES} bytes within the object ({size} bytes), got a declared "
            f"length of {length} bytes. Check that this is a safetensors file"
        )
    return int(8 + length)


def _check_text(body: memoryview) -> None:
    """Refuse zero bytes before the parser copies them: a header of 100 MB may be the hole of a small file."""
    if not np.frombuffer(body, np.uint8).all():
        raise FormatError("expected JSON in the header, got a zero byte: the object is damaged, or a file with holes")
