"""The scheduler half on requests of vLLM's own class."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from hsx_dist.connector.scheduler import SchedulerHalf
from hsx_dist.connector.settings import ConnectorSettings, read_settings
from hsx_dist.errors import ConfigError

BLOCK = 16


def half(tp=1, **settings) -> SchedulerHalf:
    return SchedulerHalf(
        ConnectorSettings(output="s3://bucket/run", **settings),
        block_size=BLOCK,
        tensor_parallel_size=tp,
        layer_ids=(2, 15),
        dtype="bfloat16",
        hidden_size=576,
    )


def request(n: int, computed: int, *, generated: int = 1, in_flight: int = 0, **params) -> Request:
    r = Request(
        request_id="client-id/../x-1234",
        prompt_token_ids=list(range(n)),
        sampling_params=SamplingParams(max_tokens=8, extra_args={"kv_transfer_params": params} if params else None),
        pooling_params=None,
    )
    r.append_output_token_ids([7] * generated)
    r.num_computed_tokens = computed
    r.num_in_flight_tokens = in_flight
    r.status = RequestStatus.FINISHED_LENGTH_CAPPED
    return r


def meta(scheduler: SchedulerHalf):
    return scheduler.build_meta(SimpleNamespace(total_num_scheduled_tokens=0))


def test_a_whole_prompt_is_saved_under_the_key_that_was_asked_for():
    scheduler = half()
    held, answer = scheduler.request_finished(request(20, 20, hidden_states_key="row-7"), [5, 9])
    assert held
    assert scheduler.holds_blocks
    assert answer is not None
    assert answer["hidden_states_key"] == "row-7"
    assert answer["hidden_states_meta"]["shape"] == [20, 2, 576]
    (save,) = meta(scheduler).saves
    assert save.token_ids.tolist() == list(range(20))
    assert save.block_ids.tolist() == [5, 9]
    assert meta(scheduler).saves == []  # told once
    scheduler.copies_done({save.request_id})
    assert not scheduler.holds_blocks


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_STOPPED])
def test_coverage_decides_and_not_status(status):
    scheduler = half()
    r = request(20, 20)
    r.status = status
    assert scheduler.request_finished(r, [1, 2])[0]
    r = request(20, 16)
    r.status = status
    assert scheduler.request_finished(r, [1]) == (False, None)
    m = meta(scheduler)
    assert len(m.saves) == 1
    ((_, reason),) = m.skipped
    assert "16 of 20" in reason


def test_tokens_of_a_step_in_flight_do_not_count():
    assert half().request_finished(request(20, 20, in_flight=4), [1, 2]) == (False, None)


def test_never_scheduled_is_told_and_holds_nothing():
    scheduler = half()
    assert scheduler.request_finished(request(20, 0, generated=0), []) == (False, None)
    assert not scheduler.holds_blocks
    assert "0 of 20" in meta(scheduler).skipped[0][1]


def test_output_tokens_end_before_the_last_which_was_never_an_input():
    scheduler = half()
    assert scheduler.request_finished(request(20, 24, generated=5, include_output_tokens=True), [1, 2])[0]
    assert len(meta(scheduler).saves[0].token_ids) == 24


def test_owners_take_turns():
    scheduler = half(tp=2)
    for _ in range(4):
        scheduler.request_finished(request(3, 3), [1])
    assert [s.owner for s in meta(scheduler).saves] == [0, 1, 0, 1]


def test_a_clients_request_id_cannot_leave_the_prefix():
    _, answer = half(via="store").request_finished(request(3, 3), [1])
    assert answer is not None
    path = answer["hidden_states_path"].removeprefix("s3://bucket/run/")
    assert "/" not in path
    assert path.endswith(".safetensors")


def test_settings_that_could_deadlock_are_refused():
    with pytest.raises(ConfigError, match="two segments"):
        read_settings({"hsx": {"output": "x", "segment_bytes": 100, "in_flight_bytes": 199}})
    with pytest.raises(ConfigError, match="nonsense"):
        read_settings({"hsx": {"output": "x", "nonsense": 1}})
