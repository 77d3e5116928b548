"""vLLM's real ``AsyncScheduler`` with our connector, and runner outputs that are made up: what a CPU cannot run.

The made-up runner writes states into a cache by the scheduler's own block tables, and calls the worker half in the
order of either model runner. Each state says of which request, layer and position it is.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch

from tests.unit.connector.test_worker import KeepingOutlet

BLOCK, HIDDEN, LAYERS = 16, 4, (1, 3)


@pytest.fixture(scope="module")
def vllm_config(tiny_model_path):
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(tiny_model_path),
        dtype="float32",
        max_model_len=256,
        block_size=32,
        max_num_batched_tokens=48,
        max_num_seqs=8,
        enforce_eager=True,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}},
        },
        kv_transfer_config={
            "kv_connector": "HiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_module_path": "hsx_dist.connector.connector",
            "kv_connector_extra_config": {"hsx": {"output": "s3://bucket/x", "via": "socket", "address": "none"}},
        },
    ).create_engine_config()


class MadeUpRunner:
    """Executes scheduler outputs: writes states, calls the worker half, answers with one sampled token a request."""

    def __init__(self, blocks: int, order: str):
        from hsx_dist.connector.worker import WorkerHalf

        self.cache = torch.full((blocks, len(LAYERS), BLOCK, HIDDEN), -1.0)
        self.outlet = KeepingOutlet(1 << 22)
        self.worker = WorkerHalf(self.cache, self.outlet, layer_ids=LAYERS, page_bytes=1 << 12, segment_bytes=1 << 20)
        self.order = order
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.preempted: set[str] = set()

    def execute(self, out):
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        self.worker.begin(out.kv_connector_metadata)
        starts = {}
        for new in out.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
            self.lengths.setdefault(new.req_id, len(new.prompt_token_ids))
            starts[new.req_id] = new.num_computed_tokens
        cached = out.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            starts[request_id] = cached.num_computed_tokens[i]
            fresh = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                self.tables[request_id] = []
                self.preempted.add(request_id)
            self.tables[request_id] += fresh[0] if fresh is not None else []
        finished: set[str] = set()
        if self.order == "v1":
            finished = self._connector(out)
        for request_id, n in out.num_scheduled_tokens.items():
            for position in range(starts[request_id], starts[request_id] + n):
                block = self.tables[request_id][position // BLOCK]
                for i, layer in enumerate(LAYERS):
                    self.cache[block, i, position % BLOCK] = value(request_id, layer, position)
        if self.order == "v2":
            finished = self._connector(out)
        ids = list(out.num_scheduled_tokens)
        sampled = [
            [7] if starts[r] + out.num_scheduled_tokens[r] >= self.lengths[r] else [] for r in ids
        ]  # drafts are never accepted
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(finished_sending=finished or None),
        )

    def _connector(self, out) -> set[str]:
        self.worker.step(out.kv_connector_metadata)
        return self.worker.finished()


def value(request_id: str, layer: int, position: int) -> float:
    return int(request_id.partition("-")[0][1:]) * 4096 + position + layer / 8


def drive(vllm_config, prompts, *, order, blocks, depth, abort_after=None, **params):
    """Run requests to their end with ``depth`` steps scheduled ahead; the shipped rows by key, and the runner."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.kv_cache_interface import HiddenStateCacheSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

    spec = HiddenStateCacheSpec(block_size=BLOCK, num_kv_heads=1, head_size=HIDDEN * len(LAYERS), dtype=torch.float32)
    vllm_config.cache_config.num_gpu_blocks = blocks
    scheduler = AsyncScheduler(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=BLOCK,
        log_stats=False,
    )
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    runner = MadeUpRunner(blocks, order)
    for i, prompt in enumerate(prompts):
        scheduler.add_request(
            Request(
                request_id=f"r{i}-00000000",
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(
                    max_tokens=6,
                    ignore_eos=True,
                    extra_args={"kv_transfer_params": {"hidden_states_key": f"k{i}", **params}},
                ),
                pooling_params=None,
                block_hasher=hasher,
            )
        )
    rows: dict[str, dict[int, tuple[int, np.ndarray]]] = {}
    under_way: deque = deque()
    steps = 0
    while scheduler.has_requests() or under_way or scheduler.connector.pending:
        steps += 1
        assert steps < 500, "the scheduler never comes to an end"
        if len(under_way) < depth and scheduler.has_requests():
            under_way.append(scheduler.schedule())
            if len(under_way) < depth and steps % 7:
                continue
        if under_way:
            out = under_way.popleft()
            scheduler.update_from_output(out, runner.execute(out))
        if abort_after == steps:
            scheduler.finish_requests(["r0-00000000"], RequestStatus.FINISHED_ABORTED)
        for page, data in runner.outlet.take():
            for j, position in enumerate(range(page.start, page.stop)):
                assert position not in rows.setdefault(page.segment.key, {}), "a row was shipped twice"
                rows[page.segment.key][position] = (int(page.token_ids[j]), data.view(np.float32)[:, j, 0].copy())
    assert not scheduler.requests, "blocks are still held"
    return rows, runner


def check(rows, key: str, tokens: list[int]) -> None:
    number = int(key[1:])
    assert sorted(rows[key]) == list(range(len(tokens)))
    for position, token in enumerate(tokens):
        got, states = rows[key][position]
        assert got == token
        assert states.tolist() == [value(f"r{number}-", layer, position) for layer in LAYERS]


@pytest.mark.parametrize("order", ["v1", "v2"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("include", [False, True])
def test_every_row_is_right_however_far_ahead_is_scheduled(vllm_config, order, depth, include):
    prompts = [list(range(100 * i, 100 * i + n)) for i, n in enumerate((1, 15, 16, 17, 60, 130))]
    rows, _ = drive(vllm_config, prompts, order=order, blocks=64, depth=depth, include_output_tokens=include)
    for i, prompt in enumerate(prompts):
        check(rows, f"k{i}", [*prompt, *[7] * 5] if include else prompt)


@pytest.mark.parametrize("order", ["v1", "v2"])
def test_preempted_and_resumed(vllm_config, order):
    """So few blocks that running requests take each other's."""
    prompts = [list(range(300 * i, 300 * i + n)) for i, n in enumerate((60, 62, 61, 63))]
    rows, runner = drive(vllm_config, prompts, order=order, blocks=14, depth=2, include_output_tokens=True)
    assert runner.preempted
    for i, prompt in enumerate(prompts):
        check(rows, f"k{i}", [*prompt, *[7] * 5])


@pytest.mark.parametrize("abort_after", range(1, 24, 2))
def test_aborted_in_any_step_is_whole_or_nothing(vllm_config, abort_after):
    prompts = [list(range(300 * i, 300 * i + n)) for i, n in enumerate((130, 40))]  # no common prefix
    rows, _ = drive(vllm_config, prompts, order="v2", blocks=64, depth=2, abort_after=abort_after)
    check(rows, "k1", prompts[1])
    if "k0" in rows:
        check(rows, "k0", prompts[0])
