from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsx_dist.errors import StoreError
from hsx_dist.store.base import as_bytes_view, coalesce, cut

_RANGES = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 100)).map(lambda r: (r[0], r[0] + r[1])), max_size=20)


@settings(deadline=None)
@given(_RANGES, st.integers(0, 50))
def test_coalesced_spans_give_every_range(ranges: list[tuple[int, int]], gap: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, 600, np.uint8).tobytes()
    spans = coalesce(ranges, gap)
    assert all(a < b for a, b in spans)
    assert all(spans[i][1] + gap < spans[i + 1][0] for i in range(len(spans) - 1))
    got = cut("x", ranges, spans, [data[a:b] for a, b in spans])
    assert [bytes(v) for v in got] == [data[a:b] for a, b in ranges]


def test_short_content_raises() -> None:
    with pytest.raises(ValueError, match=r"x: expected 10 bytes at \[5, 15\), got 3"):
        cut("x", [(5, 15)], [(5, 15)], [b"abc"])
    with pytest.raises(StoreError, match="expected at most 2 bytes, got at least 3: the server ignores"):
        cut("x", [(5, 7)], [(5, 7)], [b"abc"])  # the server may have more


def test_a_view_shares_memory() -> None:
    a = np.zeros((2, 3), np.uint16)
    view = as_bytes_view(a)
    a[0, 0] = 0x0201
    assert (view.nbytes, bytes(view[:2])) == (12, b"\x01\x02")
