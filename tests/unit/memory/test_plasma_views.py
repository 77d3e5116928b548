"""Released shared memory is no longer resident in this process and keeps its content. Private memory is unchanged."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from hsx_dist.memory.plasma_views import LEAST_BYTES, PlasmaViews

NBYTES = 4 << 20


def resident(data: np.ndarray) -> int:
    """Resident bytes of the mapping that holds ``data``."""
    at = data.ctypes.data
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *fields = line.split()
        if "-" in name and not name.endswith(":"):
            start, stop = (int(x, 16) for x in name.split("-"))
            here = start <= at < stop
        elif here and name == "Rss:":
            return int(fields[0]) << 10
    raise AssertionError("expected a mapping of the array, got none")


@pytest.fixture
def shared() -> np.ndarray:
    data = np.frombuffer(mmap.mmap(-1, NBYTES), np.uint8)  # shared, like every process's view of Ray's object store
    data[:] = np.arange(NBYTES, dtype=np.uint8)
    data.flags.writeable = False
    return data


def test_dropped_shared_memory_is_mapped_again_on_access(shared: np.ndarray):
    mapped = PlasmaViews()
    assert resident(shared) == NBYTES
    assert mapped.let_go(shared)
    assert resident(shared) == 0
    assert np.array_equal(shared, np.arange(NBYTES, dtype=np.uint8))
    assert mapped.let_go(shared[: NBYTES // 2])
    assert resident(shared) == NBYTES // 2


def test_dropped_memory_is_mapped_again_at_once(shared: np.ndarray):
    mapped = PlasmaViews()
    mapped.let_go(shared)
    if mapped.bring(shared):  # a system that refuses the advice reads it as before
        assert resident(shared) == NBYTES
    assert np.array_equal(shared, np.arange(NBYTES, dtype=np.uint8))


def test_partial_pages_of_memory_are_not_dropped(shared: np.ndarray):
    assert PlasmaViews().let_go(shared[100 : 100 + LEAST_BYTES])
    assert resident(shared) == NBYTES - LEAST_BYTES + mmap.PAGESIZE


def test_small_arrays_of_one_call_are_dropped_together(shared: np.ndarray):
    mapped = PlasmaViews()
    small = [shared[i : i + 50_000] for i in range(1000, NBYTES - 60_000, 60_000)]
    assert not any(map(mapped.let_go, small))
    assert mapped.let_go_between(small)
    assert resident(shared) <= 4 * mmap.PAGESIZE + 60_000
    assert np.array_equal(shared, np.arange(NBYTES, dtype=np.uint8))
    assert not mapped.let_go_between([])
    assert not mapped.let_go_between(small[:1])


def test_arrays_of_several_mappings_are_left_alone(shared: np.ndarray):
    own = np.arange(NBYTES, dtype=np.uint8)
    assert not PlasmaViews().let_go_between([shared, own])
    assert resident(shared) == NBYTES


@pytest.mark.parametrize("nbytes", [100, NBYTES])
def test_own_memory_is_left_alone(nbytes: int):
    own = np.arange(nbytes, dtype=np.uint8)
    own.flags.writeable = False
    assert not PlasmaViews().bring(own)
    assert not PlasmaViews().let_go(own)
    assert np.array_equal(own, np.arange(nbytes, dtype=np.uint8))


def test_rows_with_gaps_are_left_alone(shared: np.ndarray):
    assert not PlasmaViews().let_go(shared.reshape(4, -1)[:, : NBYTES // 8])
