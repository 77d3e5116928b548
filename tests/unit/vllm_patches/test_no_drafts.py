"""Requests without drafts, with vLLM's own request class and schedulers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.request import Request

from hsx_dist.vllm_patches.no_drafts import never_draft, sample_without_drafts
from tests.unit.vllm_patches.engine_config import engine_config


def request() -> Request:
    return Request("r", [1, 2, 3], SamplingParams(max_tokens=8), None)


def test_drafts_of_a_marked_request_are_dropped():
    r, other = request(), request()
    never_draft(r)
    never_draft(r)
    assert isinstance(r, Request)
    r.append_output_token_ids([4])
    for one in (r, other):
        one.spec_token_ids = [4]
    assert (r.spec_token_ids, other.spec_token_ids) == ([], [4])
    assert r.num_tokens_with_spec == r.num_tokens == 4
    assert other.num_tokens_with_spec == 4  # three tokens and its draft
    assert type(r).__mro__[1] is Request
    again = request()
    never_draft(again)
    assert type(again) is type(r)


def test_a_vllm_that_keeps_drafts_elsewhere_is_warned_of_once(caplog):
    class Renamed: ...

    for one in (Renamed(), Renamed()):
        never_draft(one)
    assert caplog.text.count("drafts are verified") == 1
    never_draft(request())
    assert caplog.text.count("drafts are verified") == 1


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("kind", ["scheduler:Scheduler", "async_scheduler:AsyncScheduler"])
def test_vllms_schedulers_schedule_drafts_for_the_v2_runner_alone(tiny_model_path: Path, monkeypatch, kind, v2):
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import HiddenStateCacheSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.structured_output import StructuredOutputManager

    connector = {
        "kv_connector": "HiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"hsx": {"output": "s3://bucket/x", "transport": "attach", "address": "none"}},
    }
    config = engine_config(tiny_model_path, (0, 4), block_size=32, dtype="float32", kv_transfer_config=connector)
    config.cache_config.num_gpu_blocks = 16
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(v2)))  # vLLM reads it on each use
    module, _, name = kind.partition(":")
    cls = getattr(__import__(f"vllm.v1.core.sched.{module}", fromlist=[name]), name)
    spec = HiddenStateCacheSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
    scheduler = cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(16, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=32,
    )
    init_none_hash(hash)
    hasher = get_request_block_hasher(32, hash)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    scheduler.add_request(Request("r", [1, 2, 3], params, None, block_hasher=hasher))
    drafts = 0
    for _ in range(3):
        out = scheduler.schedule()
        drafts += len(out.scheduled_spec_decode_tokens)
        assert out.num_scheduled_tokens["r"] == (3 if out.scheduled_new_reqs else 1 + bool(drafts))
        scheduler.update_from_output(out, ModelRunnerOutput(["r"], {"r": 0}, sampled_token_ids=[[7]]))
        scheduler.update_draft_token_ids(DraftTokenIds(["r"], [[7]]))  # the synchronous scheduler needs this call
    assert drafts == (2 if v2 else 0)


def test_batches_without_drafts_are_sampled_as_without_a_drafter(monkeypatch):
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    calls = []
    monkeypatch.setattr(RejectionSampler, "forward", lambda _, *rest: calls.append(rest))
    sample_without_drafts()
    patched = RejectionSampler.forward
    sample_without_drafts()
    assert RejectionSampler.forward is patched
    sampler = SimpleNamespace(sampler=lambda **given: given)
    none, some = (SimpleNamespace(draft_token_ids=torch.zeros(n, dtype=torch.int32)) for n in (0, 2))
    assert patched(sampler, none, None, "logits", "about") == {"logits": "logits", "sampling_metadata": "about"}
    assert not calls
    patched(sampler, some, None, "logits", "about")
    assert calls == [(some, None, "logits", "about")]
