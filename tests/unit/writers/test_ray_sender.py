"""How a sender spreads pages over writers, without Ray: nothing is sent here."""

from __future__ import annotations

import numpy as np

from hsx_dist.page import Page, Segment
from hsx_dist.writers.base import CALL_BYTES
from hsx_dist.writers.ray_pool import RaySender


def pages(count: int, nbytes: int) -> list[Page]:
    tokens = nbytes // 4
    data = np.zeros((1, tokens, 1), np.uint32)
    ids = np.zeros(tokens, np.int64)
    return [
        Page(Segment(f"k{i}", 0, 0, tokens, tokens), 0, tokens, tokens, (0,), "float32", 1, "LTH", ids, data)
        for i in range(count)
    ]


def calls(count: int, nbytes: int) -> list[int]:
    """Bytes for each of four writers that have room for all."""
    sender = RaySender([("here", f"writer {i}") for i in range(4)], print, node="here")
    for writer in sender._writers:
        writer.credit, writer.asked = 1 << 30, True
    return [sum(p.nbytes for p in batch) for _, batch in sender._routed(pages(count, nbytes))]


def test_small_pages_fill_a_call_before_the_next_writer_gets_one():
    assert calls(8, CALL_BYTES // 4) == [CALL_BYTES] * 2


def test_large_pages_are_spread():
    assert calls(8, CALL_BYTES) == [2 * CALL_BYTES] * 4
