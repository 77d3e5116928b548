"""vLLM's real ``AsyncScheduler`` with the connector, and simulated runner outputs: a CPU cannot run this combination.

The simulated runner writes states into a cache by the scheduler's own block tables, and calls the worker half in the
order of either model runner. Each state contains its request, layer and position.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch

from hsx_dist.connector import connector
from hsx_dist.connector.connector import pending_of
from hsx_dist.connector.metadata import StepMetadata
from tests.unit.connector.test_worker import KeepingOutlet

BLOCK, HIDDEN, LAYERS = 16, 4, (1, 3)
#: The V2 runner of vLLM 0.33 asks for the results before the drafter, as V1 does; both V2 runners resume as V2 does.
ORDERS = ("v1", "v2", "v2 of 0.33")


OURS = {
    "kv_connector": "HiddenStatesConnector",
    "kv_role": "kv_producer",
    "kv_connector_module_path": "hsx_dist.connector.connector",
    "kv_connector_extra_config": {"hsx": {"output": "s3://bucket/x", "transport": "attach", "address": "none"}},
}


@pytest.fixture(scope="module")
def vllm_config(tiny_model_path):
    return config_of(tiny_model_path, OURS)


def config_of(model, connector):
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(model),
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
        kv_transfer_config=connector,
    ).create_engine_config()


class MadeUpRunner:
    """Executes scheduler outputs: writes states, calls the worker half, verifies drafts, and samples.

    Like both of vLLM's runners, it uses its own count of computed tokens. The scheduler's count of a step that is
    scheduled ahead assumes that all drafts are accepted.
    """

    def __init__(self, blocks: int, order: str, acceptance: float | None):
        from hsx_dist.connector.point_copier import hidden_states_in
        from hsx_dist.connector.worker import WorkerHalf

        self.cache = torch.full((blocks, len(LAYERS), BLOCK, HIDDEN), -1.0)
        self.outlet = KeepingOutlet(1 << 22)
        self.worker = WorkerHalf(
            [hidden_states_in(self.cache, LAYERS)], self.outlet, page_bytes=1 << 12, segment_bytes=1 << 20
        )
        self.order = order
        self.acceptance = acceptance
        self.random = np.random.default_rng(0)
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.preempted: set[str] = set()
        self.drafts = self.accepted = 0

    def execute(self, out):
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        self.worker.begin(ours_of(out))
        for new in out.scheduled_new_reqs:
            if new.req_id in self.tokens:  # the V2 runner receives a resumed request as a new one
                self.preempted.add(new.req_id)
            self.tables[new.req_id] = list(new.block_ids[0])
            self.tokens[new.req_id] = list(new.prefill_token_ids or new.prompt_token_ids)
            self.computed[new.req_id] = new.num_computed_tokens
        cached = out.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            fresh = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                self.preempted.add(request_id)
                self.tables[request_id] = []
                self.tokens[request_id] = list(cached.all_token_ids[request_id])
                self.computed[request_id] = cached.num_computed_tokens[i]
            self.tables[request_id] += fresh[0] if fresh is not None else []
        drafts = {r: self._drafts(r, len(d)) for r, d in out.scheduled_spec_decode_tokens.items()}
        finished: set[str] = set()
        if self.order != "v2":  # get_transfer_results, drafter, wait_for_save
            finished = self._connector(out)
        for request_id, n in out.num_scheduled_tokens.items():
            self._write(request_id, n, drafts.get(request_id, []))
        if self.order == "v2":  # drafter, wait_for_save, get_transfer_results
            finished = self._connector(out)
        ids = list(out.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=[self._sample(r, out.num_scheduled_tokens[r], drafts.get(r, [])) for r in ids],
            kv_connector_output=KVConnectorOutput(finished_sending=finished or None),
        )

    def _drafts(self, request_id: str, count: int) -> list[int]:
        """Drafts after the known tokens. A wrong draft is a token that the model never generates."""
        assert self.acceptance is not None, "drafts were scheduled"
        at = len(self.tokens[request_id])
        right = self.random.random(count) < self.acceptance
        return [next_token(request_id, at + i) if right[i] else 9999 for i in range(count)]

    def _write(self, request_id: str, n: int, drafts: list[int]) -> None:
        start, tokens = self.computed[request_id], [*self.tokens[request_id], *drafts]
        for position in range(start, start + n):
            block = self.tables[request_id][position // BLOCK]
            for i, layer in enumerate(LAYERS):
                state = torch.tensor(state_of(request_id, layer, position, tokens[position]))
                self.cache[block, i, position % BLOCK] = state

    def _sample(self, request_id: str, n: int, drafts: list[int]) -> list[int]:
        tokens = self.tokens[request_id]
        self.computed[request_id] += n - len(drafts)
        if self.computed[request_id] < len(tokens):
            return []  # a chunk of the prompt
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == next_token(request_id, len(tokens) + accepted):
            accepted += 1
        self.drafts += len(drafts)
        self.accepted += accepted
        self.computed[request_id] += accepted
        sampled = [next_token(request_id, len(tokens) + i) for i in range(accepted + 1)]
        tokens += sampled
        return sampled

    def _connector(self, out) -> set[str]:
        self.worker.step(ours_of(out))
        return self.worker.finished()


def ours_of(out):
    """The connector's metadata of a step, also inside vLLM's ``MultiConnector``."""
    found = out.kv_connector_metadata
    return next(m for m in getattr(found, "metadata", (found,)) if isinstance(m, StepMetadata))


def next_token(request_id: str, position: int) -> int:
    """The token that the simulated model samples for a position."""
    return 5000 + (number_of(request_id) * 31 + position * 7) % 97


def number_of(request_id: str) -> int:
    return int(request_id.partition("-")[0][1:])


def state_of(request_id: str, layer: int, position: int, token: int) -> list[float]:
    return [number_of(request_id) * 4096 + position + layer / 8, float(token), 0.0, 0.0]


@pytest.fixture
def drive(vllm_config, monkeypatch):
    """Function that runs requests to their end, see ``run``."""
    never_draft = connector.never_draft
    # The tests choose drafts, not the connector.
    monkeypatch.setattr(connector, "never_draft", lambda _: None)

    def started(prompts, *, order, acceptance=None, **arguments):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(order != "v1")))  # selects how requests resume
        prepare = never_draft if acceptance is None else lambda _: None
        return run(vllm_config, prompts, prepare, order=order, acceptance=acceptance, **arguments)

    return started


def run(vllm_config, prompts, prepare, *, order, blocks, depth, acceptance, abort_after=None, max_tokens=6, **wanted):
    """Run requests to their end with ``depth`` steps scheduled ahead. Returns the shipped rows by key, and the runner.

    Args:
        prepare: called with each request.
        acceptance: the share of right drafts. None: no drafts are scheduled.
        wanted: ``kv_transfer_params``.
    """
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
    runner = MadeUpRunner(blocks, order, acceptance)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": {"hidden_states_key": f"k{i}", **wanted}},
        )
        request = Request(f"r{i}-00000000", prompt, params, pooling_params=None, block_hasher=hasher)
        scheduler.add_request(request)
        prepare(request)
    rows: dict[str, dict[int, tuple[int, np.ndarray]]] = {}
    under_way: deque = deque()
    steps = 0
    while scheduler.has_requests() or under_way or pending_of(scheduler.connector):
        steps += 1
        assert steps < 500, "expected the scheduler to finish within 500 steps"
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
                assert position not in rows.setdefault(page.segment.key, {}), "expected each row once, got one twice"
                rows[page.segment.key][position] = (int(page.token_ids[j]), data.view(np.float32)[:, j].copy())
    assert not scheduler.requests, "expected no held blocks"
    return rows, runner


def check(rows, key: str, prompt: list[int], generated: int = 0) -> None:
    """Each row of the prompt and of the generated tokens was computed from its token. No row is missing."""
    request_id = f"r{key[1:]}-"
    tokens = [*prompt, *(next_token(request_id, len(prompt) + i) for i in range(generated))]
    assert sorted(rows[key]) == list(range(len(tokens)))
    for position, token in enumerate(tokens):
        got, states = rows[key][position]
        assert got == token
        assert states.tolist() == [state_of(request_id, layer, position, token) for layer in LAYERS]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("include", [False, True])
def test_every_row_is_right_however_far_ahead_is_scheduled(drive, order, depth, include):
    prompts = [list(range(100 * i, 100 * i + n)) for i, n in enumerate((1, 15, 16, 17, 60, 130))]
    rows, _ = drive(prompts, order=order, blocks=64, depth=depth, include_output_tokens=include)
    for i, prompt in enumerate(prompts):
        check(rows, f"k{i}", prompt, 5 if include else 0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("acceptance", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("blocks", [64, 14], ids=["room", "preempted"])
def test_every_row_is_right_at_any_rate_of_accepted_drafts(drive, order, depth, acceptance, blocks):
    """A rejected draft leaves the states of a wrong token in the cache, which the next step overwrites."""
    prompts = [list(range(300 * i, 300 * i + n)) for i, n in enumerate((60, 62, 61, 63, 1, 15))]
    rows, runner = drive(
        prompts,
        order=order,
        blocks=blocks,
        depth=depth,
        acceptance=acceptance,
        max_tokens=14,
        include_output_tokens=True,
    )
    for i, prompt in enumerate(prompts):
        check(rows, f"k{i}", prompt, 13)
    assert runner.drafts > 20
    assert runner.accepted == pytest.approx(acceptance * runner.drafts, abs=0.25 * runner.drafts * (0 < acceptance < 1))
    assert bool(runner.preempted) == (blocks < 64)


@pytest.mark.parametrize("order", ORDERS)
def test_preempted_and_resumed(drive, order):
    """The blocks are so few that running requests preempt each other."""
    prompts = [list(range(300 * i, 300 * i + n)) for i, n in enumerate((60, 62, 61, 63))]
    rows, runner = drive(prompts, order=order, blocks=14, depth=2, include_output_tokens=True)
    assert runner.preempted
    for i, prompt in enumerate(prompts):
        check(rows, f"k{i}", prompt, 5)


@pytest.mark.parametrize("acceptance", [None, 0.4])
@pytest.mark.parametrize("abort_after", range(1, 24, 2))
def test_a_request_aborted_in_any_step_is_stored_whole_or_not_at_all(drive, abort_after, acceptance):
    prompts = [list(range(300 * i, 300 * i + n)) for i, n in enumerate((130, 40))]  # no common prefix
    rows, _ = drive(prompts, order="v2", blocks=64, depth=2, abort_after=abort_after, acceptance=acceptance)
    check(rows, "k1", prompts[1])
    if "k0" in rows:
        check(rows, "k0", prompts[0])
