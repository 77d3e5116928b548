"""The worker half on a cache made by torch, with an outlet that keeps its pages."""

from __future__ import annotations

import dataclasses
from itertools import product

import numpy as np
import pytest
import torch

import hsx_dist.connector.worker as worker_module
from hsx_dist.connector.columns import Column
from hsx_dist.connector.copy_stream import Cuda, DeviceCopyStream
from hsx_dist.connector.gather import Runs
from hsx_dist.connector.point_copier import CopyPlan, hidden_states_in
from hsx_dist.connector.step import Expect, Save, Skip, Step
from hsx_dist.connector.worker import IDLE_WAIT_S, WorkerHalf, pin, unpin
from hsx_dist.errors import ConfigError
from hsx_dist.observe.metrics import Meter
from hsx_dist.page import Page
from hsx_dist.transport.ring import Ring
from tests.unit.connector.recorded_cuda import DEVICE, RecordedCuda
from tests.unit.connector.small_outlet import outlet_on

BLOCKS, LAYERS, BLOCK, HIDDEN = 64, 3, 4, 8
ROW = LAYERS * HIDDEN * 4


class KeepingOutlet:
    def __init__(self, nbytes: int):
        self.ring = Ring(nbytes)
        self.meter = Meter()
        self.memory = np.zeros(self.ring.capacity, np.uint8)
        self.refs: list[Page] = []
        self.skipped: list[Skip] = []
        self.expected: list[Expect] = []
        self.waited: list[int] = []  # number of skipped requests at each wait

    def admit(self, _):
        return True

    def submit(self, *pages):
        for ref, ready in pages:
            ready()  # as the shipping thread does before it reads the page
            self.refs.append(ref)

    def expect(self, expected):
        self.expected.append(expected)

    def prepared(self):
        self.waited.append(len(self.skipped))

    def skip(self, skip):
        self.skipped.append(skip)

    def close(self, timeout=None):
        pass

    def take(self):
        """The pages submitted since the last call, copied. Their room is returned to the ring."""
        pages = [(r.attached(self.memory), r.attached(self.memory).data.copy()) for r in self.refs]
        for ref in self.refs:
            self.ring.free(ref.offset)
        self.refs.clear()
        return pages


def half(outlet, *, page_bytes=2 * BLOCK * ROW, segment_bytes=4 * BLOCK * ROW):
    cache = torch.randn(BLOCKS, LAYERS, BLOCK, HIDDEN)
    worker = WorkerHalf(
        [hidden_states_in(cache, (1, 2, 3))], outlet, page_bytes=page_bytes, segment_bytes=segment_bytes
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
    worker.step(Step(saves=[s]))
    assert worker.finished() == {"req-k"}
    assert worker.finished() == set()  # reported exactly once
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
    worker.step(Step(saves=[save(n)]))
    assert worker.finished() == set()
    assert worker.pending == 1
    tokens = sum(p.num_tokens for p, _ in outlet.take())
    steps = 0
    while not worker.finished():
        worker.step(Step())
        tokens += sum(p.num_tokens for p, _ in outlet.take())
        steps += 1
        assert steps < 100
    assert tokens == n


def test_blocks_are_held_while_the_ring_is_full_and_requests_keep_their_order():
    outlet = KeepingOutlet(2 * BLOCK * ROW)
    _, worker = half(outlet)
    worker.step(Step(saves=[save(8, key="a"), save(8, key="b")]))
    assert worker.finished() == {"req-a"}
    for _ in range(3):
        worker.step(Step(idle=True))
        assert worker.finished() == set()
    outlet.take()
    worker.step(Step())
    assert worker.finished() == {"req-b"}


def test_an_engine_with_nothing_to_do_waits_for_the_ring_instead_of_spinning(monkeypatch):
    outlet = KeepingOutlet(2 * BLOCK * ROW)
    _, worker = half(outlet)
    waits: list[float] = []
    monkeypatch.setattr(outlet.ring, "wait", waits.append)
    worker.step(Step(saves=[save(8, key="a"), save(8, key="b")]))
    assert waits == []  # there was work to do
    for _ in range(3):
        worker.step(Step(idle=True))
    assert waits == [IDLE_WAIT_S] * 3
    assert {n: v for (n, _), v in outlet.meter.sums().items()}["store_wait_seconds"] > 0
    outlet.take()
    worker.step(Step(idle=True))
    assert len(waits) == 3  # no page waits for room


def test_pages_name_their_request_and_two_copies_have_different_sources():
    outlet = KeepingOutlet(1 << 20)
    _, worker = half(outlet)
    for _ in range(2):
        worker.step(Step(saves=[save(8)]))
    sources = {p.segment.source for p, _ in outlet.take()}
    assert len(sources) == 2
    assert {source.rpartition(":")[0] for source in sources} == {"req-k"}


def test_locks_are_requested_before_the_forward_pass_and_held_when_its_step_ends():
    outlet = KeepingOutlet(1 << 20)
    _, worker = half(outlet)
    step = Step(skipped=[Skip("r", "c", "c.safetensors", 0, "why")], expected=[Expect("s", "s.safetensors", 0)])
    worker.begin(step)
    assert outlet.expected == step.expected
    assert not outlet.waited
    worker.step(step)
    assert outlet.expected == step.expected  # once
    assert outlet.waited == [1]  # after the skip, with no sample to copy


def test_plan_is_whole_blocks_within_page_frame_and_segment():
    plan = CopyPlan.of(block_size=16, layers=4, hidden_size=576, itemsize=2, page_bytes=8 << 20, segment_bytes=64 << 20)
    assert plan.page_tokens % 16 == 0
    assert plan.page_tokens * 576 * 2 <= 1 << 20  # a layer's share of a page is one frame
    assert plan.segment_tokens % plan.page_tokens == 0
    assert plan.segment_tokens * 4 * 576 * 2 <= 64 << 20
    with pytest.raises(ValueError, match="Raise segment_bytes"):
        CopyPlan.of(block_size=128, layers=80, hidden_size=8192, itemsize=2, page_bytes=1 << 20, segment_bytes=1 << 20)


@pytest.mark.parametrize("order", ["LTH", "TLH"])
@pytest.mark.parametrize(
    ("positions", "layers"),
    [(range(3, 17), None), (range(0, 30, 7), (2, 0)), (range(29, 30), (1,)), (None, (2,))],
)
def test_only_requested_layers_and_tokens_are_copied(order, positions, layers):
    outlet = KeepingOutlet(1 << 20)
    cache = torch.randn(BLOCKS, LAYERS, BLOCK, HIDDEN)
    if order == "TLH":
        cache = cache.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    worker = WorkerHalf([hidden_states_in(cache, (1, 2, 3))], outlet, page_bytes=2 * BLOCK * ROW, segment_bytes=1 << 20)
    n = 30
    s = save(n)
    at = positions if positions is not None else range(n)
    s.positions, s.columns = positions, (Column(layers=layers),)
    s.token_ids = s.token_ids[at.start : at.stop : at.step]
    worker.step(Step(saves=[s]))
    assert worker.finished() == {"req-k"}
    whole = cache[torch.from_numpy(s.block_ids)].permute(1, 0, 2, 3).reshape(LAYERS, -1, HIDDEN).numpy()
    expected = whole[list(layers or range(LAYERS))][:, list(at)]
    pages = outlet.take()
    got = np.concatenate([data.view(np.float32) for _, data in pages], axis=1)
    np.testing.assert_array_equal(got, expected)
    assert {p.layer_ids for p, _ in pages} == {tuple((1, 2, 3)[i] for i in layers or range(LAYERS))}
    assert [t for p, _ in pages for t in p.token_ids.tolist()] == [100 + i for i in at]


def test_a_ring_smaller_than_a_page_is_refused_at_the_start():
    with pytest.raises(ConfigError, match="in_flight_bytes"):
        half(KeepingOutlet(BLOCK * ROW // 2))


def test_closing_copies_waiting_pages_and_counts_the_rest():
    outlet = KeepingOutlet(2 * BLOCK * ROW)
    _, worker = half(outlet)
    worker.step(Step(saves=[save(8, key="a"), save(8, key="b")]))
    assert worker.drain(0.01) == 1
    outlet.take()
    assert worker.drain(10) == 0


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 9, 70])
def test_a_mean_is_one_float32_row_over_all_tokens(n, dtype, token_major, monkeypatch):
    monkeypatch.setattr("hsx_dist.connector.gather.MEAN_ROWS", 16)  # makes several pieces
    outlet = KeepingOutlet(1 << 20)
    cache = torch.randn(BLOCKS, LAYERS, BLOCK, HIDDEN).to(dtype)
    if token_major:
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    worker = WorkerHalf([hidden_states_in(cache, (1, 2, 3))], outlet, page_bytes=1 << 16, segment_bytes=1 << 16)
    s = save(n)
    ids = s.token_ids.astype(np.int32)
    columns = (Column(layers=(2, 0) if n == 9 else None),)
    attached = {"request_token_ids": ids}
    s = dataclasses.replace(
        s, token_ids=np.array([-1]), mean_of=n, attached=attached, columns=columns, sample_hash="0f" * 8
    )
    worker.step(Step(saves=[s]))
    ((page, data),) = outlet.take()
    assert (page.dtype, page.token_ids.tolist(), page.segment.total) == ("float32", [-1], 1)
    assert page.layer_ids == ((3, 1) if n == 9 else (1, 2, 3))
    assert page.segment.attached["request_token_ids"].tolist() == ids.tolist()
    rows = cache[torch.from_numpy(s.block_ids)].permute(1, 0, 2, 3).reshape(LAYERS, -1, HIDDEN)[:, :n].double()
    expected = rows[list(s.columns[0].layers or (0, 1, 2))].mean(dim=1).numpy()
    np.testing.assert_allclose(data.view(np.float32)[:, 0], expected, rtol=1e-5, atol=1e-6)
    assert page.segment.sample_hash == s.sample_hash


def test_selected_positions_are_copied_and_arrays_go_with_the_first_segment():
    outlet = KeepingOutlet(1 << 20)
    cache, worker = half(outlet)
    s = save(70)
    at = np.flatnonzero(np.arange(70) % 3)
    mask = np.ones(len(at), np.uint8)
    s = dataclasses.replace(s, token_ids=s.token_ids[at], positions=at, attached={"loss_mask": mask})
    worker.step(Step(saves=[s]))
    whole = cache[torch.from_numpy(s.block_ids)].permute(1, 0, 2, 3).reshape(LAYERS, -1, HIDDEN).numpy()
    pages = outlet.take()
    for page, data in pages:
        np.testing.assert_array_equal(data.view(np.float32), whole[:, at[page.start : page.stop]])
        assert set(page.segment.attached) == ({"loss_mask"} if page.segment.index == 0 else set())
    assert pages[-1][0].segment.index > 0


def test_pinned_memory_is_registered_and_given_back(monkeypatch, caplog):
    """Without a GPU: only the calls are checked."""
    calls = []

    class Runtime:
        code = 0

        def cudaHostRegister(self, pointer, nbytes, flags):  # noqa: N802
            calls.append(("register", pointer, nbytes, flags))
            return self.code

        def cudaHostUnregister(self, pointer):  # noqa: N802
            calls.append(("unregister", pointer))
            return self.code

    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = torch.zeros(64, dtype=torch.uint8)
    pin(memory)
    unpin(memory)
    assert calls == [("register", memory.data_ptr(), 64, 0), ("unregister", memory.data_ptr())]
    runtime.code = 2
    with pytest.raises(RuntimeError, match=r"64 bytes failed with error 2\. Lower in_flight_bytes"):
        pin(memory)
    unpin(memory)
    assert "cudaHostUnregister of 64 bytes failed with error 2" in caplog.text


def test_a_request_that_cannot_be_copied_fails_alone():
    """Its blocks are freed, its failure is reported, and the engine's step gets no error."""
    outlet = KeepingOutlet(1 << 20)
    _, worker = half(outlet)
    bad = dataclasses.replace(save(8, key="bad"), positions=np.array([0, 1_000_000]), id="short")
    worker.step(Step(saves=[save(4, key="a"), bad, save(5, key="b")]))
    assert worker.finished() == {"req-a", "req-bad", "req-b"}
    assert worker.finished() == set()
    assert {ref.segment.key for ref in outlet.refs} == {"a", "b"}
    (skip,) = outlet.skipped
    assert (skip.request_id, skip.key, skip.name) == ("short", "bad", "bad.safetensors")
    assert "cannot be copied" in skip.reason
    assert worker.pending == 0


def test_an_outlet_error_of_one_request_does_not_affect_other_requests():
    outlet = KeepingOutlet(1 << 20)
    _, worker = half(outlet)
    kept = outlet.skip, outlet.expect

    def refuse(which):
        def call(item):
            if item.request_id == "bad":
                raise OSError("disk")
            kept[which](item)

        return call

    outlet.skip, outlet.expect = refuse(0), refuse(1)
    step = Step(
        saves=[save(4)],
        skipped=[Skip(i, i, f"{i}.safetensors", 0, "why") for i in ("bad", "c")],
        expected=[Expect(i, i, 0) for i in ("bad", "d")],
    )
    worker.begin(step)
    worker.step(step)
    assert [e.request_id for e in outlet.expected] == ["d"]
    assert [s.request_id for s in outlet.skipped] == ["c"]
    assert worker.finished() == {"req-k"}


def test_a_clients_metadata_is_sent_with_the_pages_as_text():
    outlet = KeepingOutlet(1 << 20)
    _, worker = half(outlet)
    worker.step(Step(saves=[dataclasses.replace(save(4), metadata='{"a": 1}', id="short")]))
    assert {(ref.segment.metadata, ref.segment.source.rpartition(":")[0]) for ref in outlet.refs} == {
        ('{"a": 1}', "short")
    }


@pytest.mark.parametrize(
    ("stream", "which", "apart"), [*product([False, True], range(3), [False]), (False, 0, True), (False, 1, True)]
)
def test_a_page_that_fails_in_its_copy_fails_its_sample_alone(tmp_path, monkeypatch, stream, which, apart):
    """The blocks and ring bytes are freed, the client gets the reason, and the batch's other requests are stored."""
    copy_page = Runs.copy_to

    def copy_or_fail(runs, *outs, start, stop):
        if len(runs.units) == len(bad.block_ids) and start == 2 * which:
            raise torch.OutOfMemoryError("CUDA out of memory")
        copy_page(runs, *outs, start=start, stop=stop)

    monkeypatch.setattr(Runs, "copy_to", copy_or_fail)
    if stream:
        recorded = RecordedCuda(monkeypatch)
        recorded.ended = set(range(100))
        monkeypatch.setattr(worker_module, "copy_stream_for", lambda _: DeviceCopyStream(Cuda(DEVICE)))
    outlet = outlet_on(tmp_path, apart=apart)
    _, worker = half(outlet, segment_bytes=1 << 20)
    bad = save(20, key="bad")  # three pages
    meta = Step(saves=[named(save(4, key="a")), named(bad), named(save(5, key="b"))])
    worker.begin(meta)
    worker.step(meta)
    named_by_steps = worker.finished()
    while worker.pending:
        worker.step(Step(idle=True))
        named_by_steps |= worker.finished()
    assert named_by_steps == {"req-a", "req-bad", "req-b"}
    worker.close()
    outlet.close(60)
    assert outlet.pending == 0
    assert outlet.ring.used_bytes == 0
    if not apart:
        assert outlet._writers.sink.held_bytes == 0  # also for the pages before
    assert outlet.meter.sums()["failed", ""] == 1
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == ["a.safetensors", "b.safetensors"]
    marker = (tmp_path / "bad.error.json").read_text()
    assert "its states were not copied: OutOfMemoryError: CUDA out of memory" in marker


def named(s: Save) -> Save:
    return dataclasses.replace(s, name=f"{s.key}.safetensors")


def test_copies_wait_for_earlier_steps_but_not_for_the_current_forward_pass(monkeypatch):
    recorded = RecordedCuda(monkeypatch)
    monkeypatch.setattr(worker_module, "copy_stream_for", lambda _: DeviceCopyStream(Cuda(DEVICE)))
    outlet = KeepingOutlet(1 << 20)
    _, worker = half(outlet)
    for meta in (Step(), Step(saves=[save(4)]), Step()):
        worker.begin(meta)
        recorded.calls.append("the model's run")
        worker.step(meta)
    assert [call for call in recorded.calls if not call.startswith(("enter", "leave", "wait"))] == [
        "the model's run", "record 0 on model", "copies wait for 0", "the model's run", "record 1 on copies",
        "the model's run",
    ]  # fmt: skip
    worker.step(Step(saves=[save(4)]))  # the caller announced no step: the copies wait for all queued work
    assert [call for call in recorded.calls if "2" in call] == ["record 2 on model", "copies wait for 2"]


def test_a_device_that_is_lost_ends_the_step(monkeypatch):
    recorded = RecordedCuda(monkeypatch)
    monkeypatch.setattr(worker_module, "copy_stream_for", lambda _: DeviceCopyStream(Cuda(DEVICE)))
    _, worker = half(KeepingOutlet(1 << 20))
    worker.step(Step(saves=[save(4)]))
    recorded.lost = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        worker.finished()


def test_a_selection_larger_than_the_ring_fails_alone():
    """A mean is float32, so one row may need more bytes than a page of the cache's dtype."""
    outlet = KeepingOutlet(64)  # a page is 48 bytes
    cache = torch.randn(BLOCKS, LAYERS, 1, HIDDEN).to(torch.bfloat16)
    worker = WorkerHalf([hidden_states_in(cache, (1, 2, 3))], outlet, page_bytes=1, segment_bytes=1 << 20)
    mean = dataclasses.replace(
        save(1, key="mean"), token_ids=np.array([-1]), mean_of=1, attached={"request_token_ids": np.zeros(1, np.int32)}
    )
    worker.step(Step(saves=[mean, save(1, key="b")]))
    assert worker.finished() == {"req-mean", "req-b"}
    assert [ref.segment.key for ref in outlet.refs] == ["b"]
    assert "in_flight_bytes: expected at least 96 bytes" in outlet.skipped[0].reason
