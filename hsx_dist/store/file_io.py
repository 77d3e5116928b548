"""Reads and writes that the system may split into several calls."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

#: Buffers in one `writev`: half of Linux' and macOS' limit of 1024.
_IOV_MAX = 512


@contextmanager
def closed_after(fd: int) -> Iterator[int]:
    """Yield ``fd``, and close it at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


def write_all(fd: int, views: Sequence[memoryview]) -> None:
    todo = list(reversed(views))
    while todo:
        batch = todo[: -_IOV_MAX - 1 : -1]
        written = os.writev(fd, batch)
        while todo and written >= todo[-1].nbytes:
            written -= todo.pop().nbytes
        if written:
            todo[-1] = todo[-1][written:]


def read_range(fd: int, start: int, stop: int) -> memoryview:
    data = np.empty(stop - start, np.uint8).data if stop > start else memoryview(b"")
    done = 0
    while done < data.nbytes:
        n = os.preadv(fd, [data[done:]], start + done)
        if n == 0:
            break  # just truncated
        done += n
    return data[:done]
