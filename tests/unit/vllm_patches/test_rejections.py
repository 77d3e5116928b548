"""Rejected requests never share a live id, with vLLM's ``EngineCore``, ``Scheduler`` and ``AsyncLLM``."""

from __future__ import annotations

import asyncio
from collections import deque
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from hsx_dist.connector.connector import HiddenStatesConnector
from hsx_dist.vllm_patches import rejections


class Connector:
    """Another connector of the engine, which frees remote blocks when a request is rejected."""

    def __init__(self):
        self.new: list[str] = []

    def on_new_request(self, request):
        self.new.append(request.request_id)


def engine(connector, *live: str) -> EngineCore:
    """An engine core with vLLM's scheduler, in which requests with the ids ``live`` run."""
    core = object.__new__(EngineCore)
    core.scheduler = scheduler = object.__new__(Scheduler)
    scheduler.connector = connector
    scheduler.spec_decode_metrics_level = "none"
    scheduler.log_stats = False
    scheduler._enqueue_waiting_request = scheduler._set_kv_fetch_stage = lambda *_: None
    scheduler.requests = {name: Request(name, [1], SamplingParams(max_tokens=1), None) for name in live}
    scheduler.aborted = []
    scheduler.finish_requests = lambda ids, _status: scheduler.aborted.extend(ids)
    return core


@pytest.fixture(autouse=True)
def patched(monkeypatch):
    theirs = EngineCore.add_request
    monkeypatch.setattr(EngineCore, "add_request", getattr(theirs, "__wrapped__", theirs))
    for _ in range(2):
        rejections.install()
    assert not hasattr(EngineCore.add_request.__wrapped__, "hsx")  # patched once


def rejected(request_id: str) -> Request:
    """The request that vLLM's API server adds for a rejected one."""
    sent = []

    async def add_request_async(request):
        sent.append(request)

    front = SimpleNamespace(engine_core=SimpleNamespace(add_request_async=add_request_async))
    params = {"do_remote_prefill": True, "hidden_states_key": "of-another-client"}
    asyncio.run(AsyncLLM.notify_kv_transfer_request_rejected(front, request_id, params))
    return Request.from_engine_core_request(sent[0], None)


@pytest.mark.parametrize("request_id", ["live", "", "free"])
def test_a_rejected_request_harms_no_live_request(request_id):
    other = Connector()
    core = engine(other, "live", "")
    live = dict(core.scheduler.requests)
    core.add_request(rejected(request_id))
    assert core.scheduler.aborted == other.new  # the other connector gets it, and it is aborted
    assert {name: core.scheduler.requests[name] for name in live} == live
    (name,) = set(core.scheduler.requests) - set(live)
    assert other.new == [name]
    assert (name == request_id) == (request_id == "free")


def test_a_rejected_request_does_not_abort_a_live_streaming_session():
    core = engine(Connector(), "live")
    core.scheduler.requests["live"].streaming_queue = queue = deque()
    core.add_request(rejected("live"))
    assert not queue
    assert "live" not in core.scheduler.aborted


def test_other_requests_keep_their_ids():
    core = engine(Connector(), "live")
    core.add_request(Request("free", [1], SamplingParams(max_tokens=1), None))
    assert set(core.scheduler.requests) == {"live", "free"}
    assert core.scheduler.aborted == []
    with pytest.raises(AssertionError, match="duplicate"):
        core.add_request(Request("live", [1], SamplingParams(max_tokens=1), None))


def test_the_connector_ignores_a_rejected_request_that_enters_the_engine_all_the_same():
    ours = object.__new__(HiddenStatesConnector)
    ours._scheduler, ours._group = SimpleNamespace(), 0  # any call would fail
    made = rejected("live")
    ours.on_new_request(made)
    assert ours.request_finished_all_groups(made, ()) == (False, None)


@pytest.mark.parametrize("missing", ["method", "member"])
def test_an_unknown_vllm_is_left_alone_with_a_warning(monkeypatch, caplog, missing):
    if missing == "method":
        monkeypatch.delattr(EngineCore, "add_request")
    else:
        monkeypatch.setattr("vllm.v1.request.Request", Connector)
    before = getattr(EngineCore, "add_request", None)
    rejections.install()
    assert getattr(EngineCore, "add_request", None) is before
    assert "rejected requests" in caplog.text
