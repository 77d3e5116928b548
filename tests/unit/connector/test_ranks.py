"""Which ranks store and report, and the comparison of all ranks' states."""

from __future__ import annotations

import logging
import multiprocessing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hsx_dist.connector import ranks as module
from hsx_dist.connector.connector_config import ConnectorConfig
from hsx_dist.connector.ranks import (
    RankComparison,
    Ranks,
    check_parallelism,
    check_siblings,
    ranks_of,
    row_distances,
    tolerance,
)
from hsx_dist.connector.step import Expect, Save, Skip, Step
from hsx_dist.errors import ConfigError
from tests.unit.connector.test_worker import BLOCK, LAYERS, ROW, KeepingOutlet, half

# -- who reports -------------------------------------------------------------------------------------------------------


def connector(rank: int, owners: tuple[int, ...], outlet):
    """The real connector on one worker rank, without an engine."""
    from hsx_dist.connector.connector import HiddenStatesConnector

    ours = HiddenStatesConnector.__new__(HiddenStatesConnector)
    ours._connector_metadata = None
    ours._agreements, ours._taps = [], None
    ours._ranks = Ranks(rank, owners)
    ours._worker = half(outlet)[1] if ours._ranks.stores else None
    return ours


@pytest.mark.parametrize("sibling", [None, 1, 4])
@pytest.mark.parametrize("owners", [(0, 1, 2), (0,), (0, 2)])
def test_vllm_gets_each_request_once_when_all_ranks_have_reported_it(owners, sibling):
    """vLLM's own ``MultiConnector`` and aggregator over three ranks whose rings are sometimes full.

    The sibling connector reports a request after a number of steps.
    """
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorMetadata
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    from hsx_dist.connector.metadata import StepMetadata
    from tests.integration.other_connector import OtherConnector, OtherMetadata

    world = 3
    rng = np.random.default_rng([*owners, sibling or 0])
    outlets = [KeepingOutlet(2 * BLOCK * ROW) for _ in range(world)]
    workers = []
    for rank in range(world):
        ours = connector(rank, owners, outlets[rank])
        if sibling is not None:
            several = MultiConnector.__new__(MultiConnector)
            other = OtherConnector.__new__(OtherConnector)
            other._connector_metadata, other._waiting, other.STEPS = None, {}, sibling
            several._connectors = [ours, other]
            several._extra_async_saves = {}
            several._connector_metadata = None
            workers.append(several)
        else:
            workers.append(ours)
    aggregator = KVOutputAggregator.from_connector(workers[0], world)
    told, heard = 0, []
    for step in range(200):
        saves = []
        while told < 24 and rng.random() < 0.5:
            n = int(rng.integers(1, 2 * BLOCK + 1))
            blocks = rng.permutation(60)[: -(-n // BLOCK)].astype(np.int64)
            saves.append(Save(f"r{told}", f"k{told}", np.arange(n, dtype=np.int64), blocks, told % world))
            told += 1
        metadata = StepMetadata(saves=saves, idle=step % 2 == 0)
        outputs = []
        for worker, outlet in zip(workers, outlets, strict=True):
            if sibling is None:
                worker.bind_connector_metadata(metadata)
            else:
                ids = [s.request_id for s in saves]
                worker.bind_connector_metadata(
                    MultiKVConnectorMetadata((metadata, OtherMetadata(ids)), extra_async_saves=dict.fromkeys(ids, 1))
                )
            finished, _ = worker.get_finished(set())
            worker.clear_connector_metadata()
            outputs.append(
                ModelRunnerOutput(
                    req_ids=[],
                    req_id_to_index={},
                    kv_connector_output=KVConnectorOutput(finished_sending=finished),
                )
            )
            if rng.random() < 0.5:
                outlet.take()
        heard += aggregator.aggregate(outputs).kv_connector_output.finished_sending or ()
        if told == 24 and len(heard) == 24:
            break
    assert sorted(heard) == sorted(f"r{i}" for i in range(24))
    assert aggregator._send_remaining_count == {}, "expected each rank to report a request once"


def test_each_part_of_a_step_reaches_exactly_one_rank():
    saves = [Save(f"r{i}", f"k{i}", np.arange(2), np.arange(1), i % 4) for i in range(8)]
    step = Step(
        saves=saves,
        skipped=[Skip(f"s{i}", "c", "c.safetensors", i, "why") for i in range(4)],
        expected=[Expect(f"e{i}", "e.safetensors", i) for i in range(4)],
        idle=True,
    )
    all_ranks = [Ranks(rank, (0, 1)) for rank in range(4)]
    parts = [r.own(step) for r in all_ranks]
    for field in ("saves", "skipped", "expected"):
        ids = [item.request_id for part in parts for item in getattr(part, field)]
        assert sorted(ids) == sorted(item.request_id for item in getattr(step, field))
    assert [len(part.saves) for part in parts] == [4, 4, 0, 0]
    assert [(r.stores, part.idle) for r, part in zip(all_ranks, parts, strict=True)] == [
        (True, True),
        (True, True),
        (False, True),
        (False, True),
    ]
    for r, part in zip(all_ranks, parts, strict=True):
        assert r.others(step) | {s.request_id for s in part.saves} == {s.request_id for s in saves}
        assert not r.others(step) & {s.request_id for s in part.saves}


# -- which engines -----------------------------------------------------------------------------------------------------


class Counting:
    def __init__(self, count):
        self.count = count

    def get_finished_count(self):
        return self.count


def test_a_sibling_whose_reports_come_from_one_rank_is_refused():
    check_siblings([Counting(None), Counting(None)], 2)
    check_siblings([Counting(None), Counting(2)], 2)
    check_siblings([Counting(None), Counting(1)], 1)
    with pytest.raises(ConfigError, match=r"Counting.*expected None or 2, .* got 1"):
        check_siblings([Counting(None), Counting(1)], 2)


def test_vllms_example_connector_is_refused_when_the_cache_is_registered(monkeypatch):
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        ExampleHiddenStatesConnector,
    )

    from hsx_dist.connector import connector as connectors

    ours = connector(0, (0, 1), KeepingOutlet(1 << 16))
    ours._layer_ids, ours._block_size, ours._settings = (1, 2), BLOCK, ConnectorConfig(output="s3://b/x")
    ours._vllm_config = SimpleNamespace(model_config=SimpleNamespace(model="m"))
    theirs = ExampleHiddenStatesConnector.__new__(ExampleHiddenStatesConnector)
    monkeypatch.setattr(connectors, "get_layers_from_vllm_config", lambda *_: {"l": None})
    group = SimpleNamespace(world_size=2, rank_in_group=1, cpu_group=None)
    monkeypatch.setattr("vllm.distributed.parallel_state.get_tp_group", lambda: group)
    several = SimpleNamespace(sub_connectors=[ours, theirs])
    monkeypatch.setattr("vllm.distributed.kv_transfer.get_kv_transfer_group", lambda: several)
    with pytest.raises(ConfigError, match="ExampleHiddenStatesConnector"):
        ours.register_kv_caches({"l": torch.zeros(4, 2, BLOCK, 8)})


def test_workers_that_are_not_ranks_of_one_scheduler_are_refused():
    def parallel(**changes):
        return SimpleNamespace(**{"tensor_parallel_size": 2, "distributed_executor_backend": "mp", **changes})

    check_parallelism(parallel())
    check_parallelism(parallel(prefill_context_parallel_size=1))
    check_parallelism(parallel(tensor_parallel_size=1, distributed_executor_backend="external_launcher"))
    with pytest.raises(ConfigError, match=r"prefill_context_parallel_size: expected 1 .* got 2"):
        check_parallelism(parallel(prefill_context_parallel_size=2))
    with pytest.raises(ConfigError, match=r"expected mp or ray .* got external_launcher"):
        check_parallelism(parallel(distributed_executor_backend="external_launcher"))


# -- which ranks store -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "address", "one_node"),
    [
        ("/data/states", None, True),
        ("file:///data/states", None, True),
        ("local://data/states", None, True),
        ("s3://bucket/states", None, False),
        ("s3://bucket/states", "/tmp/ring", True),  # the process at `address` is on the engine's node
    ],
)
def test_only_a_remote_store_is_reached_from_every_node(output, address, one_node):
    assert ConnectorConfig(output=output, address=address).one_node is one_node


@pytest.mark.parametrize(
    ("nodes", "one_node", "limit", "owners"),
    [
        ("aaaa", True, None, (0, 1, 2, 3)),
        ("aabb", True, None, (0, 1)),
        ("abab", True, None, (0, 2)),  # Ray may place them so
        ("abab", True, 1, (0,)),
        ("aabb", False, None, (0, 1, 2, 3)),
        ("aabb", False, 3, (0, 1, 2)),
        ("a", True, None, (0,)),
    ],
)
def test_a_local_output_is_stored_by_ranks_of_one_node(monkeypatch, nodes, one_node, limit, owners):
    def in_the_same_node_as(group, source_rank):
        assert (group, source_rank) == ("cpu", 0)
        assert len(nodes) > 1
        return [node == nodes[0] for node in nodes]

    monkeypatch.setattr("vllm.distributed.parallel_state.in_the_same_node_as", in_the_same_node_as)
    found = [
        ranks_of(
            SimpleNamespace(world_size=len(nodes), rank_in_group=rank, cpu_group="cpu"), one_node=one_node, limit=limit
        )
        for rank in range(len(nodes))
    ]
    assert [r.rank for r in found] == list(range(len(nodes)))
    assert {r.owners for r in found} == {owners}
    saves = [Save(f"r{i}", f"k{i}", np.arange(2), np.arange(1), i % len(nodes)) for i in range(12)]
    storing = {rank for rank, r in enumerate(found) for s in saves if r.owns(s)}
    assert storing == set(owners)


# -- the comparison ----------------------------------------------------------------------------------------------------


def streams(ranks: int, *, reduced: bool, seed: int = 0) -> torch.Tensor:
    """Residual streams in bfloat16 after 60 layers, ``[ranks, rows, 1, hidden]``.

    One channel is 100 times the others. Each rank sums the ranks' parts in another order. Not ``reduced``: the last
    layer is not summed, and each rank adds only its part.
    """
    generator = torch.Generator().manual_seed(seed)
    stream = torch.randn(4, 1, 1024, generator=generator)
    stream[..., 7] *= 100
    stream = stream.to(torch.bfloat16).expand(ranks, -1, -1, -1).clone()
    for layer in range(60):
        parts = (torch.randn(ranks, 4, 1, 1024, generator=generator) * ranks**-0.5).to(torch.bfloat16)
        if layer == 59 and not reduced:
            return stream + parts
        for rank in range(ranks):
            total = torch.zeros_like(parts[0])
            for other in torch.randperm(ranks, generator=generator):
                total = total + parts[other]
            stream[rank] += total
    return stream


@pytest.mark.parametrize("ranks", [4, 16])
def test_sums_in_another_order_are_within_the_tolerance_and_partial_sums_are_not(ranks):
    rounded = float(row_distances(streams(ranks, reduced=True)).max())
    partial = float(row_distances(streams(ranks, reduced=False)).max())
    assert 0 < rounded < tolerance(torch.bfloat16) < partial / 2


def test_nothing_is_copied_of_states_that_differ():
    from hsx_dist.connector.metadata import StepMetadata

    class Same:
        def check(self, saves):
            pass

    class Differing:
        def check(self, saves):
            raise ConfigError(f"{len(saves)} differ")

    outlet = KeepingOutlet(1 << 20)
    ours = connector(0, (0, 1), outlet)
    ours._agreements = [Same(), Differing()]  # every point is compared, not the first alone
    # The saves of all ranks: each rank compares in the same step.
    ours.bind_connector_metadata(StepMetadata(saves=[request(0), request(1, owner=1)]))
    with pytest.raises(ConfigError, match="2 differ"):
        ours.get_finished(set())
    assert not outlet.refs


def test_numbers_that_are_not_finite_must_be_the_same():
    rows = torch.ones(2, 1, 5, 4)
    rows[:, 0, 1, 0] = torch.nan
    rows[:, 0, 2, 0] = torch.inf
    rows[1, 0, 3, 0] = torch.nan
    rows[1, 0, 4] = 2.0
    rows[:, 0, 0] = 0.0
    assert row_distances(rows)[1, 0].tolist() == [0, 0, 0, torch.inf, 1]
    assert row_distances(torch.stack([torch.zeros(1, 1, 4), torch.ones(1, 1, 4)]))[1].item() == torch.inf


def compare(rank: int, folder: str, scenarios, answers) -> None:
    """Run every scenario in a separate process. Sends the outcomes on this rank."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    lines: list[str] = []
    module.log.setLevel(logging.WARNING)
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    module.log.addHandler(handler)
    outcomes = {}
    for name, (saves, caches, *point) in scenarios.items():
        agreement = RankComparison(
            caches[rank],
            dist.group.WORLD,
            layer_ids=(2, 5, 9),
            model="some/model",
            **dict(zip(("point",), point, strict=False)),
        )
        lines.clear()
        try:
            for step in saves:
                agreement.check(step)
            outcomes[name] = [*lines, "agreed"]
        except ConfigError as e:
            outcomes[name] = [str(e)]
    answers.put((rank, outcomes))
    dist.destroy_process_group()


def compared(tmp_path, scenarios) -> list[dict[str, list[str]]]:
    """The outcomes of both ranks."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=compare, args=(r, str(tmp_path), scenarios, answers)) for r in range(2)]
    for process in processes:
        process.start()
    try:
        outcomes = dict(answers.get(timeout=120) for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    return [outcomes[0], outcomes[1]]


def request(number: int, n: int = 3 * BLOCK, **changes) -> Save:
    blocks = np.arange(number * 4, number * 4 + -(-n // BLOCK), dtype=np.int64)
    save = Save(f"r{number}", f"k{number}", np.arange(n, dtype=np.int64), blocks, 0)
    for name, value in changes.items():
        setattr(save, name, value)
    return save


def test_two_processes_compare_their_caches(tmp_path):
    """Each scenario: the saves of several steps, both ranks' caches, and a point; without it, the hidden states."""
    same = torch.randn(64, LAYERS, BLOCK, 256).to(torch.bfloat16)

    def changed(block: int, slot: int, by: float, layer: int = 1):
        other = same.clone()
        other[block, layer, slot] += (torch.randn(256) * by).to(torch.bfloat16)
        return [same, other]

    rounding = same.clone()
    rounding[0, 2, 0, 3] *= 1 + torch.finfo(torch.bfloat16).eps
    not_a_number = same.clone()
    not_a_number[0, 0, 0, 0] = torch.nan
    one = [[], [request(0)]]
    scenarios = {
        "same": (one, [same, same]),
        "token-major": (one, [same, same.transpose(1, 2).contiguous().transpose(1, 2)]),
        "partial first token": (one, changed(0, 0, 1.0)),
        "partial last token": (one, changed(2, BLOCK - 1, 1.0)),
        "rounding": (one, [same, rounding]),
        "nan": (one, [same, not_a_number]),
        "another request's block": (one, changed(9, 0, 1.0)),
        # The third save is not compared, the fourth is. One step may have several saves.
        "third": ([[request(i)] for i in range(3)], changed(8, 0, 1.0)),
        "fourth": ([[request(i)] for i in range(4)], changed(12, 0, 1.0)),
        "several": ([[request(0)], [request(1), request(2)], [request(3), request(4)]], changed(12, 0, 1.0)),
        "short": ([[request(0, 1)]], changed(0, 0, 1.0)),
        "selected": ([[request(0, 2 * BLOCK, positions=range(0, 4, 3), token_ids=np.arange(2))]], changed(0, 3, 1.0)),
        "mean": ([[request(0, 3 * BLOCK, mean_of=3 * BLOCK, token_ids=np.array([-1]))]], changed(2, BLOCK - 1, 1.0)),
        "another point": (one, changed(0, 0, 1.0), "mlp_out"),
        "another point, the same": (one, [same, same], "mlp_out"),
    }
    refused = {
        "partial first token",
        "partial last token",
        "nan",
        "fourth",
        "several",
        "short",
        "selected",
        "mean",
        "another point",
    }
    first, second = compared(tmp_path, scenarios)
    assert first == second  # no rank continues without the others
    for name, (outcome, *more) in first.items():
        if name in refused:
            point = "mlp_out" if name == "another point" else "hidden states"
            assert outcome.startswith(f"some/model: expected the same {point} on all 2"), (name, outcome)
            assert "ranks 0 and 1" in outcome
        elif name == "rounding":
            assert "within rounding" in outcome
            assert "at layer 9" in outcome
            assert more == ["agreed"]
        else:
            assert (outcome, more) == ("agreed", []), name
    assert "at layer 5" in first["partial last token"][0]
