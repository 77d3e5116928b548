"""The scheduler half, with requests of vLLM's own class."""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.request import Request, RequestStatus

from hsx_dist.connector import request_identity
from hsx_dist.connector.columns import CapturedPoint, Column
from hsx_dist.connector.connector_config import ConnectorConfig, read_connector_config
from hsx_dist.connector.request_identity import MAX_TEXT
from hsx_dist.connector.request_params import MAX_METADATA_DEPTH
from hsx_dist.connector.scheduler import SchedulerHalf
from hsx_dist.connector.worker_params import withhold_from_workers
from hsx_dist.errors import ConfigError
from hsx_dist.format.identity import identity_hash

BLOCK = 16


HIDDEN_STATES = CapturedPoint("hidden_states", (2, 15), 576, "bfloat16")


def half(tp=1, output="s3://bucket/run", points=(HIDDEN_STATES,), **settings) -> SchedulerHalf:
    return SchedulerHalf(
        ConnectorConfig(output=output, **settings),
        block_size=BLOCK,
        tensor_parallel_size=tp,
        points=points,
    )


def request(
    n: int, computed: int, *, generated: int = 1, in_flight: int = 0, request_id: str = "client-id/../x-1234", **params
) -> Request:
    r = Request(
        request_id=request_id,
        prompt_token_ids=list(range(n)),
        sampling_params=SamplingParams(max_tokens=8, extra_args={"kv_transfer_params": params} if params else None),
        pooling_params=None,
    )
    r.append_output_token_ids([7] * generated)
    r.num_computed_tokens = computed
    r.num_in_flight_tokens = in_flight
    r.status = RequestStatus.FINISHED_LENGTH_CAPPED
    return r


def an_image(identifier: str, offset: int = 0) -> SimpleNamespace:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=2))


def engines_id(own: str) -> str:
    """The engine's id that the connector's own id of a request begins with."""
    return own[:-33]


def meta(scheduler: SchedulerHalf, *new: Request):
    """Run one step, in which ``new`` are scheduled for the first time."""
    return scheduler.build_meta(
        SimpleNamespace(
            total_num_scheduled_tokens=0,
            scheduled_new_reqs=[SimpleNamespace(req_id=r.request_id, sampling_params=r.sampling_params) for r in new],
        )
    )


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
    assert meta(scheduler).saves == []  # reported once
    scheduler.copies_done({save.request_id})
    assert not scheduler.holds_blocks


def test_vllms_null_block_holds_no_states():
    """A cache that drops blocks between a prompt and the last tokens (R-SWA) has block 0 in their place."""
    scheduler, asked = half(), {"hidden_states_key": "k", "include_output_tokens": True}
    held, answer = scheduler.request_finished(request(20, 79, generated=60, **asked), [1, 2, 0, 0, 3])
    assert not held
    assert answer["hidden_states_meta"]["reason"] == "expected 5 cache blocks, got 3"
    assert meta(scheduler).saves == []
    assert scheduler.request_finished(request(20, 79, generated=60), [1, 2, 0, 0, 3])[0]  # the prompt's are all there
    assert meta(scheduler).saves[0].block_ids.tolist() == [1, 2]


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_STOPPED])
def test_computed_tokens_decide_completeness_and_not_the_status(status):
    scheduler = half()
    r = request(20, 20)
    r.status = status
    assert scheduler.request_finished(r, [1, 2])[0]
    r = request(20, 16)
    r.status = status
    held, answer = scheduler.request_finished(r, [1])
    assert not held
    assert answer is not None
    assert answer["hidden_states_meta"]["saved"] is False
    m = meta(scheduler)
    assert len(m.saves) == 1
    (skip,) = m.skipped
    assert skip.reason == f"expected 20 computed tokens, got 16 ({r.status.name}). Send the request again"


def test_tokens_of_a_step_in_flight_do_not_count():
    held, _ = half().request_finished(request(20, 20, in_flight=4), [1, 2])
    assert not held


def test_a_request_that_was_never_scheduled_is_skipped_and_holds_no_blocks():
    scheduler = half()
    assert scheduler.request_finished(request(20, 0, generated=0), []) == (False, None)
    assert not scheduler.holds_blocks
    assert "expected 20 computed tokens, got 0" in meta(scheduler).skipped[0].reason


@pytest.mark.parametrize("tokens", ["last", "mean", [-2, None], "stride:3", "loss_mask"])
def test_two_computations_of_a_row_with_other_generated_tokens_have_other_hashes(tokens):
    """A row whose replica died is computed again, and may get another text. The selected tokens of both texts may be
    equal: a reader that joined their columns would mix two texts.
    """
    hashes = set()
    for text in ([5, 8, 8, 9], [6, 8, 8, 9], [5, 8, 8, 9]):
        scheduler = half()
        asked = {"hidden_states_tokens": tokens, "hidden_states_key": "k", "include_output_tokens": True}
        if tokens == "loss_mask":
            asked["hidden_states_loss_mask"] = [0] * 5 + [1]
        r = request(6, 9, generated=0, **asked)
        r.append_output_token_ids(text)
        scheduler.new_request(r)
        scheduler.request_finished(r, [1, 2])
        (save,) = meta(scheduler).saves
        hashes.add(save.sample_hash)
    assert len(hashes) == 2
    scheduler = half()
    r = request(6, 9, generated=4, hidden_states_key="k", include_output_tokens=True)
    scheduler.new_request(r)
    scheduler.request_finished(r, [1, 2])
    assert meta(scheduler).saves[0].sample_hash == ""  # its token ids identify it


@pytest.mark.parametrize("params", [{}, {"hidden_states_key": "k"}, {"hidden_states_loss_mask": [1] * 20}])
@pytest.mark.parametrize("aborted", [False, True])
def test_an_input_stream_is_not_stored(params, aborted):
    """Each part of an input stream extends the prompt of vLLM's request. Parameters and hash are of the first part."""
    scheduler = half()
    stream = request(20, 10 if aborted else 25, request_id="stream-1", **params)
    stream.resumable = True
    scheduler.new_request(stream)
    stream.prompt_token_ids.extend(range(5))
    whole = request(20, 20, request_id="whole-1", **params)
    scheduler.new_request(whole)
    assert scheduler.request_finished(whole, [1, 2])[0]
    held, answer = scheduler.request_finished(stream, [3, 4])
    assert not held
    assert answer["hidden_states_meta"]["reason"].startswith("expected a request in one part, got an input stream")
    step = meta(scheduler)
    assert step.skipped[0].request != step.saves[0].meta["identity"]["request"]  # its reader gets no other sample


def test_output_tokens_end_before_the_last_which_was_never_an_input():
    scheduler = half()
    assert scheduler.request_finished(request(20, 24, generated=5, include_output_tokens=True), [1, 2])[0]
    assert len(meta(scheduler).saves[0].token_ids) == 24


def test_owners_alternate_and_get_a_request_when_it_is_first_scheduled():
    scheduler = half(tp=2)
    requests = [request(3, 3, request_id=f"r{i}-aaaa") for i in range(4)]
    for r in requests:
        scheduler.new_request(r)
    m = meta(scheduler, *requests)
    told = [(engines_id(e.request_id), e.owner) for e in m.expected]
    assert told == [(r.request_id, i % 2) for i, r in enumerate(requests)]
    assert meta(scheduler, requests[0]).expected == []  # preempted and resumed: the V2 runner receives it as new again
    for r in requests:
        scheduler.request_finished(r, [1])
    assert [s.owner for s in meta(scheduler).saves] == [0, 1, 0, 1]


def test_requests_of_one_name_have_one_owner_at_any_outcome():
    """Two ranks would race for the object, for its marker, and for the order in which both are stored."""
    scheduler = half(tp=3, output="/data/x", allow_custom_save_path=True)
    r = [
        request(3, 3, request_id="a-1", hidden_states_key="k"),
        request(3, 3, request_id="b-1"),
        request(3, 3, request_id="c-1", hidden_states_key="k"),
        request(4, 4, request_id="d-1", hidden_states_key="k"),  # another prompt
        request(3, 0, request_id="e-1", generated=0, hidden_states_key="k"),  # never scheduled
        request(3, 3, request_id="f-1", hidden_states_path="p"),
        request(4, 4, request_id="g-1", hidden_states_path="p"),
        request(3, 3, request_id="h-1", hidden_states_key="k", hidden_states_save=False),
    ]
    for each in r:
        scheduler.new_request(each)
    first = meta(scheduler, *(each for each in r if each.request_id != "e-1"))
    for each in r:
        scheduler.request_finished(each, [1])
    last = meta(scheduler)
    owners = {engines_id(told.request_id): told.owner for told in (*first.expected, *first.skipped, *last.skipped)} | {
        told.request_id: told.owner for told in last.saves
    }
    assert set(owners) == {each.request_id for each in r}
    assert len({owners[f"{name}-1"] for name in "acdeh"}) == 1
    assert owners["f-1"] == owners["g-1"]
    assert len({owners["a-1"], owners["b-1"], owners["f-1"]}) == 3  # other requests still alternate


def test_a_clients_request_id_cannot_leave_the_prefix():
    _, answer = half().request_finished(request(3, 3), [1])
    assert answer is not None
    path = answer["hidden_states_path"].removeprefix("s3://bucket/run/")
    assert "/" not in path
    assert path.endswith(".safetensors")


def test_settings_that_could_deadlock_are_refused():
    sizes = {"output": "x", "segment_bytes": 100, "in_flight_bytes": 199}
    with pytest.raises(ConfigError, match="two segments"):
        read_connector_config({"hsx": {**sizes, "transport": "inline", "address": "here", "layout": "part"}})
    read_connector_config({"hsx": sizes})  # a bare connector has no segments
    with pytest.raises(ConfigError, match=r"hsx\.layout"):
        read_connector_config({"hsx": {"output": "x", "layout": "part"}})
    for given in ({"transport": "attach"}, {"address": "/x"}):
        with pytest.raises(ConfigError, match=r"hsx\.address: expected"):
            read_connector_config({"hsx": {"output": "x", **given}})
    for old, value, new in (
        ("via", "socket", "attach"),
        ("via", "process", "inline"),
        ("writers", "threads", "inline"),
    ):
        with pytest.raises(ConfigError, match=rf"got hsx\.{old}. Set hsx.transport to {new}"):
            read_connector_config({"hsx": {"output": "x", old: value}})
    with pytest.raises(ConfigError, match="nonsense"):
        read_connector_config({"hsx": {"output": "x", "nonsense": 1}})


def test_only_the_requested_layers_and_tokens_are_saved():
    scheduler = half()
    r = request(20, 20, hidden_states_layers=[15], hidden_states_tokens=[-5, None, 2])
    held, answer = scheduler.request_finished(r, [3, 4])
    assert held
    assert answer is not None
    assert answer["hidden_states_meta"]["shape"] == [3, 1, 576]
    assert answer["hidden_states_meta"]["layer_ids"] == [15]
    (save,) = meta(scheduler).saves
    assert save.token_ids.tolist() == [15, 17, 19]
    assert list(save.positions) == [15, 17, 19]
    assert save.columns == (Column(layers=(1,)),)
    assert save.meta["tokens"] == {"start": 15, "step": 2, "of": 20}


def test_a_wrong_value_is_refused_and_the_sample_is_stored():
    scheduler = half()
    r = request(20, 20, hidden_states_layers=[99], hidden_states_tokens="first", hidden_states_key="k")
    held, answer = scheduler.request_finished(r, [3, 4])
    assert held
    assert answer is not None
    assert answer["hidden_states_key"] == "k"
    assert set(answer["hidden_states_meta"]["refused"]) == {"hidden_states_layers", "hidden_states_tokens"}
    assert len(meta(scheduler).saves[0].token_ids) == 20


def test_tokens_that_select_nothing_are_refused_when_the_length_is_known():
    scheduler = half()
    _, answer = scheduler.request_finished(request(4, 4, hidden_states_tokens=[10, 20]), [3])
    assert answer is not None
    assert "none of the 4" in answer["hidden_states_meta"]["refused"]["hidden_states_tokens"]
    assert len(meta(scheduler).saves[0].token_ids) == 4


@pytest.mark.parametrize("status", [status for status in RequestStatus if RequestStatus.is_finished(status)])
def test_a_loss_mask_that_selects_nothing_is_final_unless_the_answer_was_cut(status):
    scheduler = half()
    asked = {"hidden_states_tokens": "loss_mask", "hidden_states_loss_mask": [0] * 4, "include_output_tokens": True}
    r = request(4, 4, **asked)  # the one generated token has no state
    r.status = status
    assert not scheduler.request_finished(r, [3])[0]
    (skip,) = meta(scheduler).skipped
    assert "selects none of 4 tokens" in skip.reason
    assert skip.final == (status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED))
    scheduler.request_finished(request(20, 16), [1])
    assert not meta(scheduler).skipped[0].final  # another try may compute the rest


def test_a_request_without_saving_does_not_affect_the_next_request():
    scheduler = half()
    held, answer = scheduler.request_finished(request(4, 4, hidden_states_save=False), [3])
    assert not held
    assert answer is not None
    assert answer["hidden_states_meta"]["saved"] is False
    assert scheduler.request_finished(request(4, 4, request_id="b-1"), [3])[0]
    m = meta(scheduler)
    assert m.skipped[0].quiet
    assert len(m.saves) == 1


def test_a_used_key_is_refused_for_other_tokens_and_stored_again_for_the_same():
    scheduler = half()
    assert scheduler.request_finished(request(4, 4, hidden_states_key="k"), [1])[0]
    assert scheduler.request_finished(request(4, 4, hidden_states_key="k", request_id="b-1"), [1])[0]
    held, answer = scheduler.request_finished(request(5, 5, hidden_states_key="k", request_id="c-1"), [1])
    assert not held
    assert answer is not None
    assert "used before" in answer["hidden_states_meta"]["refused"]["hidden_states_key"]
    m = meta(scheduler)
    assert len(m.saves) == 2
    assert "used before" in m.skipped[0].reason
    held, _ = scheduler.request_finished(
        request(4, 4, hidden_states_key="k", request_id="d-1", hidden_states_layers=[2]), [1]
    )
    assert not held  # other layers are another sample, too


@pytest.mark.parametrize(("setting", "stored"), [("store", True), ("drop", False)])
def test_an_aborted_request_with_outputs_stores_what_it_covers_labelled_or_nothing(setting, stored):
    scheduler = half(aborted_outputs=setting)
    r = request(20, 23, generated=4, include_output_tokens=True)
    r.status = RequestStatus.FINISHED_ABORTED
    held, answer = scheduler.request_finished(r, [1, 2])
    assert held is stored
    assert answer is not None
    if stored:
        assert answer["hidden_states_meta"]["finish_reason"] == "abort"
        (save,) = meta(scheduler).saves
        assert len(save.token_ids) == 23
        assert {**save.meta, "identity": None} == {"prompt_tokens": 20, "finish_reason": "abort", "identity": None}
    else:
        assert "aborted_outputs" in meta(scheduler).skipped[0].reason


def test_a_request_aborted_after_its_prompt_is_saved():
    scheduler = half()
    r = request(20, 20, generated=0, include_output_tokens=True)
    r.status = RequestStatus.FINISHED_ABORTED
    assert scheduler.request_finished(r, [1, 2])[0]
    assert len(meta(scheduler).saves[0].token_ids) == 20


def test_prompts_of_embeddings_are_refused_with_the_reason():
    import torch

    r = request(4, 4)
    r.prompt_embeds = torch.zeros(4, 8)
    scheduler = half()
    held, answer = scheduler.request_finished(r, [1])
    assert not held
    assert answer is not None
    assert "embeddings" in answer["hidden_states_meta"]["reason"]


def test_samples_with_other_images_differ_at_equal_placeholders():
    scheduler = half()
    told = []
    for i, image in enumerate(("cat", "cat", "dog")):
        r = request(4, 4, hidden_states_key="k", request_id=f"r{i}-1")
        r.mm_features = [an_image(image)]
        held, answer = scheduler.request_finished(r, [1])
        told.append((held, answer["hidden_states_meta"].get("multimodal")))
    assert told == [(True, ["cat"]), (True, ["cat"]), (False, None)]


def test_samples_of_other_adapters_are_conflicts():
    scheduler = half()
    told = []
    for i, adapter in enumerate((None, "a", "a", None)):
        r = request(4, 4, hidden_states_key="k" if i % 3 == 0 else "l", request_id=f"r{i}-1")
        r.lora_request = SimpleNamespace(lora_name=adapter, lora_path=f"/{adapter}") if adapter else None
        told.append(scheduler.request_finished(r, [1])[1]["hidden_states_meta"].get("lora"))
    assert told == [None, "a", "a", None]
    r = request(4, 4, hidden_states_key="k", request_id="other-1")
    r.lora_request = SimpleNamespace(lora_name="b", lora_path="/b")
    assert not scheduler.request_finished(r, [1])[0]


@pytest.mark.parametrize("outputs", [False, True])
def test_a_key_of_another_prompt_is_refused_before_its_first_token(outputs):
    """Its answer may be sent in any step. By then the workers know that they must store a marker."""
    scheduler = half()
    first, second, third = (
        request(n, n, hidden_states_key="k", include_output_tokens=outputs, request_id=request_id)
        for n, request_id in ((4, "a-1"), (5, "b-1"), (4, "c-1"))
    )
    scheduler.new_request(first)
    assert not meta(scheduler, first).skipped
    scheduler.new_request(second)
    scheduler.new_request(third)  # the same sample again
    m = meta(scheduler, second, third)
    (skip,) = m.skipped
    assert (engines_id(skip.request_id), skip.conflict, skip.quiet) == ("b-1", True, False)
    assert [engines_id(e.request_id) for e in m.expected] == ["c-1"]
    held, answer = scheduler.request_finished(second, [1])
    assert not held
    assert "used before" in answer["hidden_states_meta"]["refused"]["hidden_states_key"]
    assert meta(scheduler).skipped == []  # reported once
    assert scheduler.request_finished(first, [1])[0]


def test_a_used_key_with_other_generated_tokens_is_a_conflict_at_the_end():
    scheduler = half()
    for generated, stored in ((3, True), (4, False)):
        r = request(
            4, 4 + generated, generated=generated, hidden_states_key="k", include_output_tokens=True,
            request_id=f"{generated}-1",
        )  # fmt: skip
        assert scheduler.request_finished(r, [1])[0] is stored
    assert [s.conflict for s in meta(scheduler).skipped] == [True]


def test_a_row_of_a_job_may_be_computed_again_with_other_generated_tokens():
    """The pages of the first computation were lost. In another batch, rounding changes the text."""
    scheduler = half(address="replica-1", transport="inline", layout="part")
    saves = []
    for text in ([7, 7, 7], [7, 8, 7], [7, 7, 7]):
        again = request(
            4, 6, generated=0, hidden_states_key="row", include_output_tokens=True, request_id=f"{len(saves)}-1"
        )
        again.append_output_token_ids(text)
        scheduler.new_request(again)
        held, answer = scheduler.request_finished(again, [1])
        assert held
        assert "refused" not in answer["hidden_states_meta"]
        saves += meta(scheduler, again).saves
    assert [save.token_ids.tolist()[4:] for save in saves] == [[7, 7], [7, 8], [7, 7]]


def test_a_key_without_computed_tokens_can_be_used_again():
    scheduler = half()
    assert not scheduler.request_finished(request(9, 0, generated=0, hidden_states_key="k"), [])[0]
    assert scheduler.request_finished(request(5, 5, hidden_states_key="k", request_id="b-1"), [1])[0]


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "params",
    [
        *(["a"], "text", 7, nested(100_000)),
        *({f"hidden_states_{name}": nested(100_000)} for name in ("key", "tokens", "layers", "metadata", "loss_mask")),
        *({"hidden_states_key": "a\ud800"}, {"hidden_states_\ud800": 1}),
    ],
    ids=range(11),
)
def test_no_client_parameter_raises(params):
    scheduler = half(allow_custom_save_path=True)
    r = request(4, 4)
    r.kv_transfer_params = params
    scheduler.new_request(r)
    held, answer = scheduler.request_finished(r, [1])
    assert held
    assert len(answer["hidden_states_meta"]["refused"]) == 1
    json.dumps(answer, ensure_ascii=False).encode()


def test_unknown_parameter_names_are_logged_once(caplog):
    scheduler = half()
    with caplog.at_level(logging.WARNING):
        for i in range(50):
            r = request(4, 4, request_id=f"{i}-1", hidden_states_layers=[99], **{f"hidden_states_x{i}": 1})
            _, answer = scheduler.request_finished(r, [1])
            assert f"hidden_states_x{i}" in answer["hidden_states_meta"]["refused"]
    assert len(caplog.records) == 2  # a known name with a wrong value, and all the others


def test_shutdown_logs_samples_that_were_not_sent_to_the_workers(caplog):
    scheduler = half()
    scheduler.request_finished(request(4, 4, hidden_states_key="late"), [1])
    with caplog.at_level(logging.ERROR):
        scheduler.shutdown()
    assert "late" in caplog.text
    meta(scheduler)
    caplog.clear()
    scheduler.shutdown()
    assert not caplog.records


def test_results_of_a_batch_and_of_n_choices_have_keys_that_a_client_can_compute():
    scheduler = half()
    keys = {}
    for request_id in ("cmpl-x-0-00000000", "cmpl-x-2-00000000", "1_cmpl-x-0-00000000", "1_cmpl-x-2-00000000"):
        r = request(3, 3, hidden_states_key="k", request_id=request_id)
        _, answer = scheduler.request_finished(r, [1])
        assert answer is not None
        keys[request_id] = answer["hidden_states_key"]
    assert list(keys.values()) == ["k", "k-p2", "k-n1", "k-p2-n1"]


def test_the_scheduler_has_news_until_the_workers_have_the_metadata():
    scheduler = half()
    assert not scheduler.has_news
    scheduler.request_finished(request(20, 4), [1])
    assert scheduler.has_news
    meta(scheduler)
    assert not scheduler.has_news


def test_vllms_own_keys_are_understood():
    settings = read_connector_config(
        {
            "shared_storage_path": "/data/x",
            "allow_custom_save_path": True,
            "num_writer_threads": 3,
            "use_synchronization_lock": False,
        }
    )
    assert settings.output == "/data/x"
    assert settings.allow_custom_save_path
    assert settings.writer_threads == 3
    assert not settings.use_synchronization_lock
    assert settings.one_object


@pytest.mark.parametrize("allowed", [True, False])
def test_a_clients_path_is_used_if_it_is_allowed_and_refused_otherwise(allowed):
    scheduler = half(output="/data/x", allow_custom_save_path=allowed)
    r = request(3, 3, hidden_states_path="/data/x/sub/mine.safetensors")
    _, answer = scheduler.request_finished(r, [1])
    assert answer is not None
    if allowed:
        assert answer["hidden_states_path"] == "/data/x/sub/mine.safetensors"
        assert meta(scheduler).saves[0].name == "sub/mine.safetensors"
    else:
        assert "hidden_states_path" in answer["hidden_states_meta"]["refused"]
        assert meta(scheduler).saves[0].name == ""


def nested_in(depth: int) -> dict:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return {"a": value}


def test_metadata_of_any_depth_travels_as_text_and_harms_no_other_request_of_its_step():
    """vLLM pickles a step's metadata for its worker processes inside the engine's step."""
    scheduler = half()
    requests = [
        request(4, 4, request_id="deep-1", hidden_states_metadata=nested_in(600)),
        request(4, 4, request_id="fits-1", hidden_states_metadata=nested_in(MAX_METADATA_DEPTH - 1)),
        request(4, 4, request_id="none-1"),
    ]
    for r in requests:
        scheduler.new_request(r)
        held, answer = scheduler.request_finished(r, [1])
        assert held
        assert ("refused" in answer["hidden_states_meta"]) == (r.request_id == "deep-1")
    told = pickle.loads(pickle.dumps(meta(scheduler)))
    assert [save.metadata for save in told.saves] == ["", json.dumps(nested_in(MAX_METADATA_DEPTH - 1)), ""]
    assert "metadata" not in told.saves[1].meta


def test_lists_and_objects_of_many_parameters_are_limited_together():
    """The check of each value visits all of its lists. A request may have a million values."""
    for values, kept in ((31, 32), (32, 1)):
        extra = {**{f"p{i}": [[]] * 9_000 for i in range(values)}, "number": 1}
        new = SimpleNamespace(sampling_params=SamplingParams(extra_args=extra))
        withhold_from_workers(SimpleNamespace(scheduled_new_reqs=[new]))
        assert len(new.sampling_params.extra_args) == kept


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params", "a_processors_argument"])
def test_requests_pickled_for_the_workers_have_a_limited_depth(name):
    """Parameters of all connectors are removed, too. The prompt's other choices share them, and keep theirs."""
    extra = {"kv_transfer_params": {"hidden_states_key": "k"}, "ec_transfer_params": {}, "mine": nested_in(64)}
    shared = SamplingParams(max_tokens=8, extra_args=extra)
    extra.setdefault(name, {})["other"] = nested_in(100_000)
    scheduler = half()
    for i in range(2):
        r = Request(f"{i}_cmpl-x-0-1a2b3c4d", [1, 2, 3], shared, None)
        scheduler.new_request(r)
        new = NewRequestData.from_request(r, block_ids=())
        scheduler.build_meta(SimpleNamespace(total_num_scheduled_tokens=0, scheduled_new_reqs=[new]))
        pickle.dumps(new)
        assert new.sampling_params.extra_args == {"mine": nested_in(64)}
        assert new.sampling_params.max_tokens == 8
        assert r.kv_transfer_params["hidden_states_key"] == "k"
        r.num_computed_tokens, r.status = 3, RequestStatus.FINISHED_LENGTH_CAPPED
        assert scheduler.request_finished(r, [1])[1]["hidden_states_key"] == ("k-n1" if i else "k")
    assert shared.extra_args is extra
    assert name in extra


@pytest.mark.parametrize(
    "request_id",
    ["", "\ud800", "\n", "..", "/", "-1a2b3c4d", "x" * 1_000_000 + "-1a2b3c4d"],
    ids=lambda text: text[:9].encode("ascii", "backslashreplace").decode(),
)
@pytest.mark.parametrize("params", [{}, {"hidden_states_key": "k"}, {"hidden_states_save": False}], ids=str)
def test_no_request_id_of_a_client_ends_a_step_or_names_a_sample(request_id, params):
    scheduler = half()
    for computed in (4, 0):
        made = request(4, computed, request_id=request_id, **params)
        scheduler.new_request(made)
        before = meta(scheduler, made)
        held, _ = scheduler.request_finished(made, [1])
        after = meta(scheduler)
        assert held == (computed == 4 and params.get("hidden_states_save", True))
        assert [s.request_id for s in after.saves] == [made.request_id] * held  # vLLM needs its own unchanged
        told = [*before.expected, *((s for s in after.saves) if held else after.skipped)]
        ours = {getattr(t, "id", "") or t.request_id for t in told}
        (own,) = ours
        assert own != request_id
        assert len(own) < 200
        assert not any(t.key == request_id for t in (*after.saves, *after.skipped))
        scheduler.copies_done({made.request_id})


def test_two_requests_of_one_id_are_two_samples_to_the_worker():
    """vLLM adds rejected requests to the engine under the client's text, as of a request that is being stored."""
    scheduler = half()
    for _ in range(2):
        assert scheduler.request_finished(request(4, 4, request_id="cmpl-x-0-1a2b3c4d"), [1])[0]
    first, second = meta(scheduler).saves
    assert first.id != second.id
    assert first.key != second.key
    assert "1a2b3c4d" not in first.key


def test_the_choices_of_a_request_share_the_work_of_its_metadata(monkeypatch):
    """Each choice is a request to the scheduler half, which vLLM admits before the next step of any client."""
    loaded = []
    loads = json.loads
    monkeypatch.setattr(request_identity.json, "loads", lambda text: loaded.append(1) or loads(text))
    scheduler = half()
    sent = json.dumps({"of this test": [0] * 20_000})
    for choice in range(30):
        params = {"hidden_states_key": "k", "hidden_states_metadata": json.JSONDecoder().decode(sent)}
        made = request(4, 4, request_id=f"{choice}_cmpl-x-0-1a2b3c4d", **params)
        scheduler.new_request(made)
        assert scheduler.request_finished(made, [1])[0]
    saves = meta(scheduler).saves
    assert len({s.key for s in saves}) == 30
    assert {s.metadata for s in saves} == {sent}
    assert len({id(s.metadata) for s in saves}) == 1
    assert len(loaded) == 1


def test_the_hash_of_a_request_is_that_of_stored_samples():
    """Of objects that are stored in the format of version 0.1."""
    for metadata in (None, {"b": [1, 1.0, True], "a": {"\u00e9": None}}):
        inputs = {
            "lora": None,
            "images": [],
            "cache_salt": None,
            "layers": [2, 15],
            "outputs": False,
            "metadata": metadata,
        }
        made = request(4, 4, **({} if metadata is None else {"hidden_states_metadata": metadata}))
        _, answer = half().request_finished(made, [1])
        expected = identity_hash(np.asarray(made.prompt_token_ids, np.int64), inputs, [{}, 4], [])
        assert answer["hidden_states_meta"]["identity"]["request"] == expected


@pytest.mark.parametrize("step", ["_read", "_owner", "_skip", "_unwanted"])
def test_an_error_in_any_step_is_logged_and_not_raised(monkeypatch, caplog, step):
    def fail(*args, **kwargs):
        raise ValueError("a sample key must not be empty")

    scheduler = half()
    made = [request(4, computed, request_id=f"{computed}-1") for computed in (4, 0)]
    monkeypatch.setattr(SchedulerHalf, step, fail)
    for each in made:
        scheduler.new_request(each)
    meta(scheduler, *made)
    for each in made:
        scheduler.request_finished(each, [1])
    assert "a sample key must not be empty" in caplog.text
    monkeypatch.undo()
    assert scheduler.request_finished(request(4, 4), [1])[0]


def test_an_images_long_identifier_is_hashed():
    scheduler = half()
    told = []
    for i, image in enumerate(("x" * 1000, "x" * 1001)):
        r = request(4, 4, hidden_states_key=f"k{i}", request_id=f"r{i}-1")
        r.mm_features = [an_image(image)]
        told += scheduler.request_finished(r, [1])[1]["hidden_states_meta"]["multimodal"]
    assert len(set(told)) == 2
    assert all(len(identifier) == 64 for identifier in told)


def test_a_path_that_a_key_has_obeys_the_keys_claim_and_makes_none():
    """Programs for vLLM's connector delete samples after reading, and use the path again."""
    scheduler = half(output="/data/x", allow_custom_save_path=True)

    def ask(n: int, **params) -> dict:
        r = request(n, n, request_id=f"{n}-{len(params)}-1", **params)
        scheduler.new_request(r)
        return scheduler.request_finished(r, [1])[1]

    for n in (3, 4):
        answer = ask(n, hidden_states_path="/data/x/mine.safetensors")
        assert answer["hidden_states_path"] == "/data/x/mine.safetensors"
        assert answer["hidden_states_key"] == "mine"
    assert ask(3, hidden_states_key="row-17")["hidden_states_path"] == "/data/x/row-17.safetensors"
    answer = ask(4, hidden_states_path="row-17.safetensors")
    assert "used before" in answer["hidden_states_meta"]["reason"]
    assert ask(3, hidden_states_path="row-17.safetensors")["hidden_states_key"] == "row-17"  # the same sample
    assert all(not save.name for save in meta(scheduler).saves)  # each is stored only if absent


@pytest.mark.parametrize("step", ["_admit", "_covered", "_answer"])
def test_an_error_that_one_request_causes_does_not_affect_other_requests(monkeypatch, step):
    """An error inside the engine's step would end the engine. ``_answer`` is called after the save was queued."""
    work = getattr(SchedulerHalf, step)

    def fail_for_bad(self, first, *args):
        about = args[0] if step == "_covered" else first
        if "bad" in str(getattr(about, "key", getattr(about, "request_id", ""))):
            raise RecursionError("nested")
        return work(self, first, *args)

    monkeypatch.setattr(SchedulerHalf, step, fail_for_bad)
    scheduler = half()
    requests = [request(20, 20, request_id=name, hidden_states_key=name) for name in ("a", "bad", "b")]
    for r in requests:
        scheduler.new_request(r)
    first = meta(scheduler, *requests)
    answers = [scheduler.request_finished(r, [5, 9]) for r in requests]
    assert [held for held, _ in answers] == [True, False, True]
    assert "RecursionError: nested" in answers[1][1]["hidden_states_meta"]["reason"]
    told = meta(scheduler)
    assert [s.key for s in told.saves] == ["a", "b"]
    (skip,) = told.skipped
    assert (skip.key, skip.name, skip.quiet) == ("bad", "bad.safetensors", False)
    assert "RecursionError: nested" in skip.reason
    assert [e.name for e in first.expected] == ["a.safetensors", "bad.safetensors", "b.safetensors"]
    scheduler.copies_done({"a", "b"})
    assert scheduler.pending == 0


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("what", ["image", "salt", "lora", "lora path"])
def test_texts_of_a_client_are_bounded_before_they_are_hashed(monkeypatch, what, keyed):
    hashed = []
    sha256 = hashlib.sha256

    class Digest:
        def __init__(self, data=b""):
            self._digest = sha256()
            self.update(data)

        def update(self, data):
            hashed.append(len(data))
            self._digest.update(data)

        def hexdigest(self):
            return self._digest.hexdigest()

    monkeypatch.setattr(hashlib, "sha256", Digest)
    for length, saved in ((MAX_TEXT, True), (MAX_TEXT + 1, False), (1_000_000, False)):
        scheduler = half()
        text = "\u03b1" * length
        made = request(20, 20, **({"hidden_states_key": "row-7"} if keyed else {}))
        if what == "image":
            made.mm_features = [an_image("short"), an_image(text)]
        elif what == "salt":
            made.cache_salt = text
        else:
            name, path = (text, "/a") if what == "lora" else ("a", text)
            made.lora_request = SimpleNamespace(lora_name=name, lora_path=path)
        scheduler.new_request(made)
        held, answer = scheduler.request_finished(made, [5, 9])
        assert held is saved
        if not saved:
            assert f"of at most {MAX_TEXT} characters, got {length}" in answer["hidden_states_meta"]["reason"]
            assert [s.reason for s in meta(scheduler).skipped] == [answer["hidden_states_meta"]["reason"]]
    assert max(hashed, default=0) < 10 * MAX_TEXT


@pytest.mark.parametrize("request_id", ["", "\n", "x" * 100_000, "a/../b"])
def test_an_id_of_a_clients_choice_does_not_end_the_engine(request_id):
    """vLLM queues a request that its server rejected, with the client's id, if it has ``do_remote_prefill``."""
    scheduler = half()
    r = request(3, 0, generated=0, request_id=request_id, do_remote_prefill=True)
    scheduler.new_request(r)
    r.status = RequestStatus.FINISHED_ABORTED
    held, _ = scheduler.request_finished(r, [])
    assert not held
    assert all(skip.key for skip in meta(scheduler).skipped)


def test_an_error_that_repeats_itself_does_not_end_the_engine(monkeypatch):
    scheduler = half()
    r = request(3, 3)
    scheduler.new_request(r)
    monkeypatch.setattr(scheduler, "_owner", lambda _: 1 / 0)
    assert scheduler.request_finished(r, [0]) == (False, None)
