"""Points of a model, without an engine: the columns of a request, and each rank's copies."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hsx_dist.connector.columns import CapturedPoint, Column, columns_of
from hsx_dist.connector.connector import HiddenStatesConnector, hidden_state_group
from hsx_dist.connector.connector_config import ConnectorConfig
from hsx_dist.connector.engine_checks import check_engine
from hsx_dist.connector.metadata import CapturedMetadata
from hsx_dist.connector.ranks import Ranks, comparisons, ranks_of
from hsx_dist.connector.step import Save, Step
from hsx_dist.connector.tapped import CHECK_S, TapWatch, captured_points, check_layout
from hsx_dist.connector.worker import WorkerHalf
from hsx_dist.errors import ConfigError, EngineError, SampleFailed
from hsx_dist.format.container import Part
from hsx_dist.reading.load import load_hidden_states
from hsx_dist.store import open_store
from hsx_dist.taps.capture_config import additional_config
from hsx_dist.taps.install import Installed
from hsx_dist.taps.points import Plan
from tests.unit.connector.small_outlet import outlet_on, some, submit
from tests.unit.connector.small_server import SmallServer
from tests.unit.connector.test_request_params import read
from tests.unit.connector.test_scheduler import half, meta, request
from tests.unit.connector.test_worker import KeepingOutlet

BLOCK, BLOCKS = 4, 32
STATES = CapturedPoint("hidden_states", (0, 2, 5), 8, "float32")
HEADS = CapturedPoint("q", (1, 4), 6, "float32", head=3)
EXPERTS = CapturedPoint("topk_ids", (3,), 2, "int32")
CAPTURED = (STATES, HEADS, EXPERTS)
EVERYTHING = {"hidden_states": (0, 2, 5), "q": (1, 4), "topk_ids": (3,)}


def caches(points=CAPTURED, seed=0):
    torch.manual_seed(seed)
    return [
        (p, torch.randint(0, 99, (BLOCKS, len(p.layers), BLOCK, p.width)).to(getattr(torch, p.dtype))) for p in points
    ]


def save(n: int, key="k", points=CAPTURED, owner=0, **given) -> Save:
    blocks = np.random.default_rng(n).permutation(BLOCKS)[: -(-n // BLOCK)].astype(np.int64)
    given.setdefault("columns", columns_of({p.name: p.layers for p in points}, points))
    return Save(f"r-{key}", key, np.arange(n, dtype=np.int64), blocks, owner, **given)


def rows_of(pages, column: int, width: int, dtype: str, n: int) -> np.ndarray:
    """``[layers, n, width]`` of one column, each token once."""
    mine = sorted(((p, d) for p, d in pages if p.segment.column == column), key=lambda x: x[0].start)
    parts = [d.view(dtype).reshape(p.shape)[:, : p.num_tokens] for p, d in mine]
    assert mine[0][0].start == 0
    found = np.concatenate(parts, axis=1)
    assert found.shape[1:] == (n, width)
    return found


def run(worker: WorkerHalf, outlet: KeepingOutlet, step: Step) -> tuple[list, set[str]]:
    worker.step(step)
    pages, done = outlet.take(), worker.finished()
    while worker.pending:
        worker.step(Step())
        pages += outlet.take()
        done |= worker.finished()
    return pages, done


# -- columns of a request ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "stored"),
    [
        ({}, {"hidden_states": (0, 2, 5)}),
        ({"hidden_states_points": "all"}, EVERYTHING),
        ({"hidden_states_points": {"q": [4]}}, {"q": (4,)}),
        ({"hidden_states_points": {"topk_ids": "all", "q": [4, 1]}}, {"q": (4, 1), "topk_ids": (3,)}),
        ({"hidden_states_points": {"q": [4]}, "hidden_states_layers": [5]}, {"hidden_states": (5,), "q": (4,)}),
        ({"hidden_states_layers": [5, 0]}, {"hidden_states": (5, 0)}),
    ],
)
def test_a_request_chooses_among_the_captured_points(asked, stored):
    options = read(asked, captured=EVERYTHING)
    assert dict(options.points) == stored
    assert list(options.points) == [name for name in EVERYTHING if name in stored]
    assert not options.refused


@pytest.mark.parametrize("asked", [{"z": [1]}, {"q": [2]}, {"q": []}, {}, [], "q", 7, {"q": "last"}, {7: [1]}])
def test_a_choice_that_is_not_captured_is_refused_and_the_default_is_stored(asked):
    options = read({"hidden_states_points": asked}, captured=EVERYTHING)
    assert dict(options.points) == {"hidden_states": (0, 2, 5)}
    assert "expected some of the captured" in options.refused["hidden_states_points"]


def test_without_hidden_states_a_request_that_does_not_ask_gets_everything():
    assert dict(read({}, captured={"q": (1, 4)}).points) == {"q": (1, 4)}


def test_the_scheduler_sends_columns_and_answers_with_shapes_and_dtypes():
    scheduler = half(points=CAPTURED)
    held, answer = scheduler.request_finished(
        request(20, 20, hidden_states_points={"q": [4], "topk_ids": "all"}), [5, 9]
    )
    assert held
    (one,) = meta(scheduler).saves
    assert one.columns == (Column("q", (1,)), Column("topk_ids"))
    told = answer["hidden_states_meta"]
    assert told["points"]["q"] == {"shape": [20, 1, 6], "dtype": "float32", "layer_ids": [4]}
    assert told["points"]["topk_ids"] == {"shape": [20, 1, 2], "dtype": "int32", "layer_ids": [3]}
    assert "shape" not in told


def test_the_mean_of_id_points_is_refused():
    scheduler = half(points=CAPTURED)
    asked = {"hidden_states_points": {"q": "all", "topk_ids": "all"}, "hidden_states_tokens": "mean"}
    _, answer = scheduler.request_finished(request(20, 20, **asked), [5, 9])
    assert meta(scheduler).saves[0].columns == (Column("q"),)
    assert "topk_ids has no mean" in answer["hidden_states_meta"]["refused"]["hidden_states_points"]
    asked["hidden_states_points"] = {"topk_ids": "all"}
    held, _ = scheduler.request_finished(request(20, 20, request_id="other", **asked), [5, 9])
    assert not held


def test_a_request_before_the_workers_have_said_what_they_capture_stores_nothing():
    scheduler = half(points=())
    held, answer = scheduler.request_finished(request(20, 20), [5, 9])
    assert not held
    assert "got none" in answer["hidden_states_meta"]["reason"]
    scheduler.capture(CAPTURED)
    assert scheduler.request_finished(request(20, 20, request_id="next"), [5, 9])[0]


# -- how columns are copied --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ring", [1 << 20, 400])
def test_every_column_has_all_rows_of_its_point(ring):
    made = caches()
    outlet = KeepingOutlet(ring)
    worker = WorkerHalf(made, outlet, page_bytes=400, segment_bytes=800)
    one = save(30, meta={"a": 1}, metadata="{}", attached={"x": np.zeros(2)})
    pages, done = run(worker, outlet, Step(saves=[one]))
    assert done == {"r-k"}
    blocks = torch.from_numpy(one.block_ids)
    for column, (point, cache) in enumerate(made):
        expected = cache[blocks].permute(1, 0, 2, 3).reshape(len(point.layers), -1, point.width)[:, :30].numpy()
        np.testing.assert_array_equal(rows_of(pages, column, point.width, point.dtype, 30), expected)
    for page, _ in pages:
        segment = page.segment
        point = CAPTURED[segment.column]
        assert (segment.columns, segment.point, segment.head) == (3, point.name, point.head)
        assert (page.dtype, page.layer_ids) == (point.dtype, point.layers)
        about = (dict(segment.meta), segment.metadata, list(segment.attached))
        first = segment.column == 0
        assert about == ({"a": 1} if first else {}, "{}" if first else "", ["x"] if first and not segment.index else [])
    assert len({p.segment.source for p, _ in pages}) == 1  # one computation for all columns
    assert {p.segment.index for p, _ in pages if p.segment.column == 0} != {0}


def test_a_request_is_finished_when_all_its_columns_are_copied():
    outlet = KeepingOutlet(2 * BLOCK * 3 * 8 * 4)
    worker = WorkerHalf(caches(), outlet, page_bytes=2 * BLOCK * 3 * 8 * 4, segment_bytes=1 << 16)
    worker.step(Step(saves=[save(8)]))
    assert worker.finished() == set()  # the ring has room for the hidden states only
    assert (worker.pending, worker.blocks_held) == (1, 2)
    outlet.take()
    worker.step(Step())
    assert worker.finished() == {"r-k"}
    assert (worker.pending, worker.blocks_held) == (0, 0)


def test_a_column_that_cannot_be_copied_fails_its_sample_once():
    outlet = KeepingOutlet(1 << 20)
    worker = WorkerHalf(caches(), outlet, page_bytes=400, segment_bytes=800)
    wrong = save(8, columns=(Column(), Column("z"), Column("q")))
    pages, done = run(worker, outlet, Step(saves=[wrong, save(8, key="other")]))
    assert done == {"r-k", "r-other"}
    assert {p.segment.key for p, _ in pages} == {"other"}
    (skip,) = outlet.skipped
    assert (skip.key, skip.columns, skip.of) == ("k", (0, 1, 2), 3)


# -- ranks -------------------------------------------------------------------------------------------------------------


def ranks_with(tensor_parallel: int, kv_heads: int):
    """The captured points of each rank."""
    found = [
        SimpleNamespace(
            point=name, layers=(1,), head_size=width, head=3, kv_cache_torch_dtype=torch.float32, layer_name=name
        )
        for name, width in (("k", 3), ("resid_pre", 8), ("q", 6))
    ]
    tensors = {one.point: torch.zeros(BLOCKS, 1, BLOCK, one.head_size) for one in found}
    return [
        captured_points(found, tensors, rank=rank, ranks=tensor_parallel, kv_heads=kv_heads)
        for rank in range(tensor_parallel)
    ]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("owner", [0, 1, 3])
def test_each_column_is_copied_by_exactly_one_rank(kv_heads, owner, monkeypatch):
    monkeypatch.setattr("vllm.distributed.parallel_state.in_the_same_node_as", lambda *_, **__: [True] * 4)
    captured = ranks_with(4, kv_heads)
    assert [p.name for p, _ in captured[0]] == ["resid_pre", "q", "k"]  # in the order of computation
    assert {p.name: p.shards for p, _ in captured[0]} == {"resid_pre": 1, "q": 4, "k": kv_heads}
    points = [p for p, _ in captured[0]]
    one = save(8, points=points, owner=owner)
    assert len(one.columns) == 1 + 4 + kv_heads
    copied = []
    for rank in range(4):
        group = SimpleNamespace(world_size=4, rank_in_group=rank, cpu_group=None)
        ranks = ranks_of(group, one_node=True, limit=None, points=[p for p, _ in captured[rank]])
        own = ranks.own(Step(saves=[one]))
        copied += own.saves[0].copied
        assert not ranks.others(Step(saves=[one]))
    assert sorted(copied) == list(range(len(one.columns)))
    without = Ranks(2, (0, 1, 2, 3), {"q": None})
    assert without.others(Step(saves=[save(8, points=points[:1], owner=owner)])) == {"r-k"}


def test_the_shards_of_two_ranks_make_the_columns_of_one_sample():
    pages = {}
    for rank in (0, 1):
        point = CapturedPoint("q", (1,), 6, "float32", 3, rank, 2)
        made = caches((STATES, point), seed=rank)
        outlet = KeepingOutlet(1 << 20)
        worker = WorkerHalf(made, outlet, page_bytes=1 << 12, segment_bytes=1 << 12)
        one = save(8, points=(STATES, point), owner=1)
        copied, _ = run(worker, outlet, Ranks(rank, (0, 1), {"q": rank}).own(Step(saves=[one])))
        for page, data in copied:
            cache = made[0 if page.segment.point == "hidden_states" else 1][1]
            expected = cache[torch.from_numpy(one.block_ids)].permute(1, 0, 2, 3).reshape(page.shape).numpy()
            np.testing.assert_array_equal(data.view(np.float32).reshape(page.shape), expected)
            pages[page.segment.column] = (rank, page.segment.point, page.segment.shard, page.segment.shards)
    assert pages == {0: (1, "hidden_states", 0, 1), 1: (0, "q", 0, 2), 2: (1, "q", 1, 2)}


def test_shards_on_a_node_that_cannot_store_are_refused(monkeypatch):
    monkeypatch.setattr("vllm.distributed.parallel_state.in_the_same_node_as", lambda *_, **__: [True, False])
    group = SimpleNamespace(world_size=2, rank_in_group=1, cpu_group=None)
    with pytest.raises(ConfigError, match=r"expected all 2 tensor-parallel ranks on one node.*of q, got"):
        ranks_of(group, one_node=True, limit=None, points=[CapturedPoint("q", (1,), 6, "float32", 3, 1, 2)])
    ranks_of(group, one_node=True, limit=None, points=[STATES])


def test_points_that_every_rank_has_whole_are_compared(monkeypatch):
    sharded = CapturedPoint("k", (1,), 3, "float32", 3, 0, 2)
    made = comparisons(caches((STATES, HEADS, EXPERTS, sharded)), None, "m")
    assert [one._point for one in made] == ["hidden states", "q"]


# -- the taps ----------------------------------------------------------------------------------------------------------


def scheduling() -> HiddenStatesConnector:
    """The connector in a scheduler's process, of an engine with taps."""
    ours = HiddenStatesConnector.__new__(HiddenStatesConnector)
    ours._layer_ids, ours._scheduler, ours._settings = None, half(points=()), ConnectorConfig(output="s3://b/x")
    ours._vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64))
    return ours


def test_the_workers_send_their_captured_points_to_the_scheduler():
    ours = scheduling()
    of_ranks = {(0, rank): CapturedMetadata((replace(HEADS, shard=rank, shards=2),)) for rank in (1, 0)}
    ours.set_xfer_handshake_metadata_pp_aware(pickle.loads(pickle.dumps(of_ranks)))  # the ranks are other processes
    held, answer = ours.request_finished(request(20, 20), [5, 9])
    assert held
    assert answer["hidden_states_meta"]["points"]["q"]["shape"] == [20, 2, 12]  # of both ranks
    assert meta(ours._scheduler).saves[0].columns == (Column("q", None, 0, 2), Column("q", None, 1, 2))


def test_metadata_of_another_connector_is_refused():
    with pytest.raises(ConfigError, match=r"got str\. .*Put HiddenStatesConnector first"):
        scheduling().set_xfer_handshake_metadata({0: "theirs"})
    extraction = scheduling()
    extraction._layer_ids = (1, 2)
    extraction.set_xfer_handshake_metadata({0: "theirs"})  # its layer ids are set, so it ignores the metadata


def test_taps_need_one_group_of_cache_blocks():
    config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=None)])
    assert hidden_state_group(config, "m", tapped=True) == 0
    config.kv_cache_groups *= 2
    with pytest.raises(ConfigError, match="m: expected one group of cache blocks with capture by taps, got 2"):
        hidden_state_group(config, "m", tapped=True)


def test_a_model_without_taps_is_refused_when_its_caches_are_registered():
    worker = SimpleNamespace(_block_size=BLOCK)
    with pytest.raises(ConfigError, match="expected a model with taps, got none"):
        HiddenStatesConnector._tapped(worker, {"l": object()}, {}, None)


def test_taps_and_vllms_extraction_exclude_each_other():
    config = SimpleNamespace(
        additional_config=additional_config({"points": {"q": [1]}}),
        speculative_config=SimpleNamespace(method="extract_hidden_states"),
    )
    with pytest.raises(ConfigError, match="expected none with capture by taps, got method 'extract_hidden_states'"):
        check_engine(config)


def test_taps_are_checked_before_the_first_copies_and_then_by_the_clock():
    now, checks = [100.0], []
    watch = TapWatch(lambda: checks.append(now[0]) or 7, lambda: now[0])
    watch.end()  # no sample was copied
    watch.step(saves=False)
    assert checks == []
    watch.step(saves=True)
    watch.step(saves=True)
    assert checks == [100.0]
    now[0] += CHECK_S
    watch.step(saves=False)
    assert checks == [100.0, 100.0 + CHECK_S]
    watch.end()
    assert len(checks) == 3


def test_taps_that_never_run_are_detected():
    """A cached graph from an engine without taps runs no tap. The taps' counts are equal, and their blocks hold the
    rows of earlier requests.
    """
    counts = {("q", layer): torch.zeros(2, dtype=torch.int64) for layer in (0, 1)}
    installed = Installed(Plan({"q": (0, 1)}, {}), {}, counts, {})
    watch = TapWatch(installed.check_alive)
    watch.step(saves=False)
    with pytest.raises(EngineError, match="expected rows of each step, got none from any tap"):
        watch.step(saves=True)
    for count in counts.values():
        count += torch.tensor([1, 8])
    watch.step(saves=True)
    counts["q", 0] += torch.tensor([1, 8])
    with pytest.raises(
        EngineError, match=r"expected 16 rows from each, got another number from q of layer 1.*Samples of the last 10 s"
    ):
        watch.end()


def test_an_object_of_one_sample_holds_what_one_rank_has_whole():
    server, of_a_job = ConnectorConfig(output="out"), ConnectorConfig(output="out", transport="attach", address="x")
    check_layout(CAPTURED, server)
    with pytest.raises(ConfigError, match=r"one tensor-parallel rank with layout 'sample' .*got q too"):
        check_layout([replace(HEADS, shards=2), STATES], server)
    check_layout([STATES], of_a_job)
    with pytest.raises(ConfigError, match=r"hidden_states alone .*got q, topk_ids too"):
        check_layout(CAPTURED, of_a_job)
    check_layout(CAPTURED, of_a_job.model_copy(update={"layout": "part"}))


def test_a_servers_object_has_the_points_of_its_request(tmp_path):
    points = {"hidden_states": ((1, 2), 8), "q": ((0, 3), 12), "mlp_out": ((3,), 8)}
    server = SmallServer(tmp_path, points=points)
    server.ask([5, 6, 7, 8, 9], key="all", points="all")
    server.ask([5, 6, 7, 8, 9], key="some", points={"q": [3], "mlp_out": "all"})
    server.ask([5, 6, 7, 8, 9], key="states")
    server.close()
    asked = {"all": {name: layers for name, (layers, _) in points.items()}, "some": {"q": (3,), "mlp_out": (3,)}}
    for key, layers in asked.items():
        loaded = load_hidden_states(f"{tmp_path}/{key}.safetensors", points=list(layers), framework="numpy")
        assert loaded["token_ids"].tolist() == [5, 6, 7, 8, 9]
        for name, ids in layers.items():
            cache = server.caches[name][1:3, [points[name][0].index(i) for i in ids]]  # the rows of its blocks
            right = cache.transpose(1, 2).reshape(8, len(ids), -1)[:5]
            assert np.array_equal(loaded["points"][name], right.numpy())
    part = Part.open(open_store(str(tmp_path)), "states.safetensors")
    assert [info.segment.point for info in part.segments] == ["hidden_states"]


def test_an_object_of_points_is_renewed_by_the_same_request_and_kept_from_others(tmp_path):
    points, ends = {"hidden_states": ((1, 2), 8), "q": ((0, 3), 12)}, []
    for ttl in (100, 1000):
        server = SmallServer(tmp_path, points=points, ttl_seconds=ttl)
        server.ask([5, 6, 7], key="k", points="all")
        loaded = load_hidden_states(f"{tmp_path}/k.safetensors", points=["hidden_states", "q"], framework="numpy")
        ends.append(loaded["meta"]["expires"])
        server.close()
    assert ends[1] - ends[0] > 800
    server = SmallServer(tmp_path, points=points)
    server.ask([5, 6, 7], key="k", points={"q": "all"})
    server.close()
    with pytest.raises(SampleFailed, match="another sample"):
        load_hidden_states(f"{tmp_path}/k.safetensors")


def test_a_sample_of_several_points_that_is_lost_ends_once(tmp_path):
    outlet = outlet_on(tmp_path, on_bad_rows="fail")
    for at in range(3):  # the later columns arrive after the request has ended
        submit(outlet, "k", some() * (np.nan if at == 0 else 1), column=at, columns=3, point=f"p{at}")
        end = time.monotonic() + 30
        while (outlet.pending and at == 0) or outlet.ring.used_bytes:
            assert time.monotonic() < end
            time.sleep(0.001)
    assert outlet.meter.sums()["failed", ""] == 1
    assert outlet.ring.claimed_bytes == outlet.pending == 0
    outlet.close(10)
    with pytest.raises(SampleFailed, match="states are wrong"):
        load_hidden_states(f"{tmp_path}/k.safetensors")
