"""Mapped objects of Ray's object store. They count as a writer's resident memory until it releases the pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hsx_dist.memory.madvise import advise

#: Smaller arrays are released together: all arrays of a call are next to each other.
LEAST_BYTES = 128 << 10


class PlasmaViews:
    """This process's views on memory that it shares with others."""

    def __init__(self) -> None:
        self._shared: list[tuple[int, int]] = []  # [start, stop) of mappings; Ray's object store is one, and stays

    def bring(self, data: np.ndarray[Any, Any]) -> bool:
        """Map all of ``data``, which is read next: one call instead of a fault for every few pages of memory.
        Returns whether the system did so (Linux since 5.14)."""
        return self._is_shared_array(data) and advise(data.ctypes.data, data.nbytes, "MADV_POPULATE_READ")

    def let_go(self, data: np.ndarray[Any, Any]) -> bool:
        """Drop this process's view of ``data``, an array that it will not read any more. Return whether it was dropped.

        Shared memory keeps its content for all processes. If this process reads the array again, the view returns.
        Does nothing for an array in private memory.
        """
        return self._is_shared_array(data) and advise(data.ctypes.data, data.nbytes, "MADV_DONTNEED")

    def let_go_between(self, arrays: Sequence[np.ndarray[Any, Any]]) -> bool:
        """Drop the view of all memory from the first to the last of ``arrays``. They are arguments of one call, so they
        are in one object of Ray's store, and no other object is between them."""
        starts = [data.ctypes.data for data in arrays]
        stops = [start + data.nbytes for start, data in zip(starts, arrays, strict=True)]
        if not starts or max(stops) - min(starts) < LEAST_BYTES or not self._shares(min(starts), max(stops)):
            return False
        return advise(min(starts), max(stops) - min(starts), "MADV_DONTNEED")

    def _is_shared_array(self, data: np.ndarray[Any, Any]) -> bool:
        if data.nbytes < LEAST_BYTES or not data.flags.c_contiguous:
            return False
        return self._shares(data.ctypes.data, data.ctypes.data + data.nbytes)

    def _shares(self, start: int, stop: int) -> bool:
        """Whether the whole range is in one shared mapping."""
        if not self._is_within(start, stop):
            self._shared = shared_mappings()
        return self._is_within(start, stop)

    def _is_within(self, start: int, stop: int) -> bool:
        return any(a <= start and stop <= b for a, b in self._shared)


def shared_mappings() -> list[tuple[int, int]]:
    """Return the address ranges of shared mappings of this process. Empty without ``/proc``."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    fields = (line.split(maxsplit=2) for line in lines)
    places = (place.split("-") for place, access, _ in fields if access.endswith("s"))
    return [(int(start, 16), int(stop, 16)) for start, stop in places]
