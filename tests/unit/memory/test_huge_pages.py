"""Advice about huge pages changes no byte, and never raises."""

from __future__ import annotations

import numpy as np
import pytest

from hsx_dist.memory import huge_pages


@pytest.mark.parametrize("nbytes", [0, 1, 4096, (4 << 20) + 64])
def test_memory_of_any_size_is_zeroed_and_can_be_written(nbytes):
    memory = huge_pages.zeroed(nbytes)
    assert memory.shape == (nbytes,)
    assert not memory.any()
    memory[:] = 7
    assert (memory == 7).all()


def test_memory_without_a_whole_huge_page_is_not_changed():
    small = np.zeros(4096, np.uint8)
    assert not huge_pages.advise(small.ctypes.data, small.nbytes)


def test_advise_does_not_change_the_content():
    memory = np.arange(6 << 20, dtype=np.uint8)
    huge_pages.advise(memory.ctypes.data, memory.nbytes)
    assert (memory == np.arange(6 << 20, dtype=np.uint8)).all()
