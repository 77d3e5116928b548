"""The worker half on a cache that torch made, with an outlet that keeps what it is given."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hsx_dist.connector.metadata import Save, StepMetadata
from hsx_dist.connector.outlet import PageRef
from hsx_dist.connector.ring import Ring
from hsx_dist.connector.worker import Plan, WorkerHalf

BLOCKS, LAYERS, BLOCK, HIDDEN = 64, 3, 4, 8
ROW = LAYERS * HIDDEN * 4


class KeepingOutlet:
    def __init__(self, nbytes: int):
        self.ring = Ring(nbytes)
        self.memory = np.zeros(self.ring.capacity, np.uint8)
        self.refs: list[PageRef] = []
        self.skipped: list[tuple[str, str]] = []

    def submit(self, ref, ready):
        assert ready is None
        self.refs.append(ref)

    def skip(self, key, reason):
        self.skipped.append((key, reason))

    def close(self):
        pass

    def take(self):
        """The pages submitted since the last call, copied; their room goes back to the ring."""
        pages = [(r.page(self.memory), r.page(self.memory).data.copy()) for r in self.refs]
        for ref in self.refs:
            self.ring.free(ref.offset)
        self.refs.clear()
        return pages


def half(outlet, *, rank=0, page_bytes=2 * BLOCK * ROW, segment_bytes=4 * BLOCK * ROW):
    cache = torch.randn(BLOCKS, LAYERS, BLOCK, HIDDEN)
    worker = WorkerHalf(
        cache, outlet, rank=rank, layer_ids=(1, 2, 3), page_bytes=page_bytes, segment_bytes=segment_bytes
    )
    return cache, worker


def save(n: int, *, key="k", owner=0) -> Save:
    blocks = np.random.default_rng(n).permutation(BLOCKS)[: -(-n // BLOCK)].astype(np.int64)
    return Save(f"req-{key}", key, np.arange(n, dtype=np.int64) + 100, blocks, owner)


@pytest.mark.parametrize("n", [1, 3, 4, 5, 8, 9, 16, 17, 33, 70])
def test_pages_hold_exactly_the_tokens_of_the_request(n):
    outlet = KeepingOutlet(1 << 20)
    cache, worker = half(outlet)
    s = save(n)
    worker.step(StepMetadata(saves=[s]))
    assert worker.finished() == {"req-k"}
    assert worker.finished() == set()  # named exactly once
    expected = cache[torch.from_numpy(s.block_ids)].permute(1, 0, 2, 3).reshape(LAYERS, -1, HIDDEN)[:, :n].numpy()
    seen = np.zeros(n, int)
    for page, data in outlet.take():
        assert page.num_tokens <= page.chunk_tokens == 2 * BLOCK
        assert page.segment.total == n
        assert page.segment.start <= page.start < page.stop <= page.segment.stop
        assert (page.start - page.segment.start) % page.chunk_tokens == 0
        assert page.token_ids.tolist() == list(range(100 + page.start, 100 + page.stop))
        got = data.view(np.float32)[:, : page.num_tokens]
        np.testing.assert_array_equal(got, expected[:, page.start : page.stop])
        seen[page.start : page.stop] += 1
    assert (seen == 1).all()


def test_a_request_longer_than_the_ring_goes_through_page_by_page():
    outlet = KeepingOutlet(2 * 2 * BLOCK * ROW)  # two pages
    _, worker = half(outlet)
    n = 50
    worker.step(StepMetadata(saves=[save(n)]))
    assert worker.finished() == set()
    assert worker.pending == 1
    tokens = sum(p.num_tokens for p, _ in outlet.take())
    steps = 0
    while not worker.finished():
        worker.step(StepMetadata())
        tokens += sum(p.num_tokens for p, _ in outlet.take())
        steps += 1
        assert steps < 100
    assert tokens == n


def test_while_the_ring_is_full_blocks_are_held_and_nothing_else_overtakes():
    outlet = KeepingOutlet(2 * BLOCK * ROW)
    _, worker = half(outlet)
    worker.step(StepMetadata(saves=[save(8, key="a"), save(8, key="b")]))
    assert worker.finished() == {"req-a"}
    for _ in range(3):
        worker.step(StepMetadata(idle=True))
        assert worker.finished() == set()
    outlet.take()
    worker.step(StepMetadata())
    assert worker.finished() == {"req-b"}


def test_only_the_owner_copies_and_reports():
    outlet = KeepingOutlet(1 << 20)
    _, worker = half(outlet, rank=1)
    worker.step(StepMetadata(saves=[save(8, key="a", owner=0), save(8, key="b", owner=1)], skipped=[("c", "why")]))
    assert worker.finished() == {"req-b"}
    assert {p.segment.key for p, _ in outlet.take()} == {"b"}
    assert outlet.skipped == []  # rank 0 tells


def test_plan_is_whole_blocks_within_page_frame_and_segment():
    plan = Plan.of(block_size=16, layers=4, hidden_size=576, itemsize=2, page_bytes=8 << 20, segment_bytes=64 << 20)
    assert plan.page_tokens % 16 == 0
    assert plan.page_tokens * 576 * 2 <= 1 << 20  # a layer's share of a page is one frame
    assert plan.segment_tokens % plan.page_tokens == 0
    assert plan.segment_tokens * 4 * 576 * 2 <= 64 << 20
    with pytest.raises(ValueError, match="raise segment_bytes"):
        Plan.of(block_size=128, layers=80, hidden_size=8192, itemsize=2, page_bytes=1 << 20, segment_bytes=1 << 20)
