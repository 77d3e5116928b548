"""The connector in a user's ``LLM``: options of each request, all ways to end a request, and vLLM's own script."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

import hsx_dist
from hsx_dist.connector.flush import flush
from hsx_dist.errors import SampleFailed
from hsx_dist.isa import avoid_amx
from tests.harness.lora import write_adapter
from tests.harness.snippets import snippets
from tests.integration.inplace_norm import use_inplace_norm
from tests.integration.oracle import Oracle

PAGE = Path(hsx_dist.__file__).parents[1] / "docs/connector.md"
(FLUSH,) = (s.text for s in snippets(PAGE) if "flush(llm" in s.text)
LAYERS = (0, 2, 4)
RNG = np.random.default_rng(11)


def engine_arguments(model: Path, output: Path, **hsx) -> dict:
    return {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
        "block_size": 32,
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}},
        },
        "kv_transfer_config": {
            "kv_connector": "HiddenStatesConnector",  # by name: the plugin has registered the connector
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "shared_storage_path": str(output),
                "allow_custom_save_path": True,
                "hsx": {"in_flight_bytes": 1 << 20, "segment_bytes": 1 << 18, "page_bytes": 1 << 16, **hsx},
            },
        },
    }


@pytest.fixture(scope="module")
def oracle(tiny_model_path):
    return Oracle(tiny_model_path)


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("bare")


@pytest.fixture(scope="module")
def llm(tiny_model_path, output):
    avoid_amx()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import LLM

        # As with eager execution on a GPU: the model must not change captured tensors later.
        engine = LLM(
            **engine_arguments(tiny_model_path, output),
            ir_op_priority=use_inplace_norm(),
            enable_lora=True,
            max_num_seqs=16,  # vLLM with adapters: a step must have room for a token and a draft of each request
            max_lora_rank=8,
            max_loras=2,  # vLLM's CPU kernels use the last slot for requests without an adapter: it stays empty
        )
    yield engine
    engine.llm_engine.engine_core.shutdown()


def ask(llm, prompts, params: list[dict], **sampling):
    """Run one batch. ``params``: each prompt's ``kv_transfer_params``. Returns the answers' after all is stored."""
    from vllm import SamplingParams

    sampling = {"max_tokens": 1, "temperature": 0.0, **sampling}
    outputs = llm.generate(
        [{"prompt_token_ids": p} for p in prompts],
        [SamplingParams(**sampling, extra_args={"kv_transfer_params": p} if p else None) for p in params],
        use_tqdm=False,
    )
    exec(compile(FLUSH, PAGE.name, "exec"), {"llm": llm})
    return outputs


def ids(n: int) -> list[int]:
    return RNG.integers(0, 300, n).tolist()


def test_each_request_of_a_batch_gets_what_it_asked_for(llm, oracle, output):
    prompts = [ids(n) for n in (100, 70, 33, 5, 1, 40)]
    outputs = ask(
        llm,
        prompts,
        [
            {},
            {"hidden_states_key": "subset", "hidden_states_layers": [4, 0]},
            {"hidden_states_key": "window", "hidden_states_tokens": [-10, -2]},
            {"hidden_states_key": "none", "hidden_states_save": False},
            {"hidden_states_key": "../one", "hidden_states_tokens": "nonsense"},
            {"hidden_states_path": str(output / "mine" / "six.safetensors"), "hidden_states_tokens": "stride:7"},
        ],
    )
    answers = [o.kv_transfer_params for o in outputs]
    whole = hsx_dist.load_hidden_states(answers[0]["hidden_states_path"], framework="torch")
    oracle.assert_equal(prompts[0], whole["hidden_states"], LAYERS)
    assert whole["token_ids"].tolist() == prompts[0]

    subset = hsx_dist.load_hidden_states(answers[1]["hidden_states_path"], framework="torch")
    assert subset["layer_ids"].tolist() == [4, 0]
    oracle.assert_equal(prompts[1], subset["hidden_states"], (4, 0))

    window = hsx_dist.load_hidden_states(answers[2]["hidden_states_path"], framework="torch")
    assert window["token_ids"].tolist() == prompts[2][-10:-2]
    assert window["meta"]["tokens"] == {"start": 23, "step": 1, "of": 33}
    full = hsx_dist.load_hidden_states(ask(llm, [prompts[2]], [{}])[0].kv_transfer_params["hidden_states_path"])
    torch.testing.assert_close(window["hidden_states"], full["hidden_states"][23:31])

    assert answers[3]["hidden_states_meta"]["saved"] is False
    assert not list(output.glob("none*"))

    assert "hidden_states_tokens" in answers[4]["hidden_states_meta"]["refused"]
    inside = Path(answers[4]["hidden_states_path"])
    assert inside.parent == output  # a key cannot leave the prefix
    assert hsx_dist.load_hidden_states(str(inside))["token_ids"].tolist() == prompts[4]

    strided = hsx_dist.load_hidden_states(str(output / "mine" / "six.safetensors"), framework="torch")
    assert strided["token_ids"].tolist() == prompts[5][::7]


def test_an_adapters_states_are_those_of_the_model_with_it_merged(llm, oracle, tiny_model_path, tmp_path):
    """In one batch with requests of the base model for the same prompt. A prefix hit must not return their states."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    adapter, merged = write_adapter(tiny_model_path, tmp_path)
    prompt = ids(100)
    for hit in (0, 96):
        outputs = llm.generate(
            [{"prompt_token_ids": prompt}] * 2,
            SamplingParams(max_tokens=1),
            use_tqdm=False,
            lora_request=[None, LoRARequest("tuned", 1, str(adapter))],
        )
        flush(llm, 60)
        assert [o.num_cached_tokens for o in outputs] == [hit, hit]
        samples = [
            hsx_dist.load_hidden_states(o.kv_transfer_params["hidden_states_path"], framework="torch") for o in outputs
        ]
        oracle.assert_equal(prompt, samples[0]["hidden_states"], LAYERS)
        Oracle(merged).assert_equal(prompt, samples[1]["hidden_states"], LAYERS)
        assert [s["meta"].get("lora") for s in samples] == [None, "tuned"]
        assert (samples[0]["hidden_states"][:, 1:] - samples[1]["hidden_states"][:, 1:]).abs().max() > 0.01


def test_a_prefix_hit_that_covers_all_but_one_token(llm, oracle):
    prompt = ids(97)  # three whole blocks of 32, and one token
    for _ in range(2):
        (output,) = ask(llm, [prompt], [{}])
    assert output.num_cached_tokens == 96
    data = hsx_dist.load_hidden_states(output.kv_transfer_params["hidden_states_path"], framework="torch")
    oracle.assert_equal(prompt, data["hidden_states"], LAYERS)


def test_n_choices_are_stored_under_keys_that_can_be_computed(llm, oracle, output):
    prompt = ids(20)
    (answer,) = ask(
        llm,
        [prompt],
        [{"hidden_states_key": "choices", "include_output_tokens": True}],
        n=3,
        temperature=1.0,
        seed=5,
        max_tokens=6,
        ignore_eos=True,
    )
    for choice in answer.outputs:
        key = hsx_dist.sample_key("choices", choice=choice.index)
        data = hsx_dist.load_hidden_states(f"{output}/{key}.safetensors", framework="torch")
        tokens = [*prompt, *choice.token_ids[:-1]]
        assert data["token_ids"].tolist() == tokens
        oracle.assert_equal(tokens, data["hidden_states"], LAYERS)


def test_a_key_used_again_for_other_tokens_is_refused(llm, output):
    first, second = ask(llm, [ids(8), ids(9)], [{"hidden_states_key": "twice"}] * 2)
    told = [o.kv_transfer_params["hidden_states_meta"].get("refused", {}) for o in (first, second)]
    assert sum("hidden_states_key" in t for t in told) == 1
    with pytest.raises(SampleFailed, match="used before"):
        hsx_dist.load_hidden_states(f"{output}/twice.safetensors")


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_a_request_aborted_at_any_step_is_stored_whole_or_not_at_all(llm, oracle, output, steps):
    """Before the request is scheduled, during prefill (64 tokens per step), at its end, and during decode."""
    from vllm import SamplingParams

    engine, prompt, key = llm.llm_engine, ids(150), f"aborted-{steps}"
    params = {"hidden_states_key": key, "include_output_tokens": True}
    engine.add_request(
        key,
        {"prompt_token_ids": prompt},
        SamplingParams(max_tokens=50, ignore_eos=True, temperature=0, extra_args={"kv_transfer_params": params}),
    )
    seen: list[int] = []
    for _ in range(steps):
        for o in engine.step():
            seen = list(o.outputs[0].token_ids)
    engine.abort_request([key])
    flush(llm, 60)
    path = f"{output}/{key}.safetensors"
    if not seen:
        with pytest.raises(SampleFailed, match="expected 150 computed tokens"):
            hsx_dist.load_hidden_states(path)
        return
    data = hsx_dist.load_hidden_states(path, framework="torch")
    tokens = data["token_ids"].tolist()
    assert data["meta"]["finish_reason"] == "abort"
    assert tokens == [*prompt, *seen][: len(tokens)]
    assert len(tokens) >= len(prompt)
    oracle.assert_equal(tokens, data["hidden_states"], LAYERS)


def test_an_abort_after_the_end_of_a_request_does_not_affect_its_sample(llm, oracle, output):
    from vllm import SamplingParams

    engine, prompt = llm.llm_engine, ids(70)
    params = {"hidden_states_key": "late-abort"}
    engine.add_request(
        "late-abort",
        {"prompt_token_ids": prompt},
        SamplingParams(max_tokens=2, ignore_eos=True, extra_args={"kv_transfer_params": params}),
    )
    answers: list = []
    while not answers:
        answers = [o for o in engine.step() if o.finished]
    core = engine.engine_core.engine_core
    assert core.scheduler.connector.pending  # the worker half has not received the save yet
    engine.abort_request(["late-abort"])
    core.abort_requests([answers[0].request_id])  # also a request that the front end has already dropped
    core.abort_requests(list(core.scheduler.requests))
    flush(llm, 60)
    data = hsx_dist.load_hidden_states(f"{output}/late-abort.safetensors", framework="torch")
    oracle.assert_equal(prompt, data["hidden_states"], LAYERS)
    assert not core.scheduler.requests  # no block is still held


def held(llm) -> int:
    return llm.llm_engine.engine_core.engine_core.scheduler.connector.pending


@pytest.mark.parametrize("reset", ["plain", "running", "sleep"])
def test_a_reset_after_the_last_answer_copies_its_states_first(llm, oracle, reset):
    from vllm import SamplingParams

    prompt = ids(100)
    for _ in range(2):
        (output,) = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=1), use_tqdm=False)
        assert held(llm)
        assert output.num_cached_tokens == 0  # the second time: nothing from before the reset is reused
        if reset == "sleep":
            llm.sleep(1)
            llm.wake_up()
        else:
            assert llm.reset_prefix_cache(reset_running_requests=reset == "running")
        assert not held(llm)
        flush(llm, 60)
        data = hsx_dist.load_hidden_states(output.kv_transfer_params["hidden_states_path"], framework="torch")
        oracle.assert_equal(prompt, data["hidden_states"], LAYERS)


def test_a_reset_under_way_recomputes_running_requests_and_keeps_finished_ones(llm, oracle, output):
    from vllm import SamplingParams

    engine, prompts = llm.llm_engine, {"short": ids(40), "long": ids(150)}
    for key, tokens in (("short", 8), ("long", 20)):
        params = {"hidden_states_key": f"reset-{key}", "include_output_tokens": True}
        engine.add_request(
            key,
            {"prompt_token_ids": prompts[key]},
            SamplingParams(
                max_tokens=tokens, ignore_eos=True, temperature=0, extra_args={"kv_transfer_params": params}
            ),
        )
    answers: dict = {}
    while engine.has_unfinished_requests():
        answers |= {o.request_id: o for o in engine.step()}
        if "long" in answers and held(llm):
            assert not answers["long"].finished
            assert not llm.reset_prefix_cache()  # a request is running
            assert not held(llm)
            assert llm.reset_prefix_cache(reset_running_requests=True)
            break
    else:
        pytest.fail("expected the short request to end before the long one")
    while engine.has_unfinished_requests():
        answers |= {o.request_id: o for o in engine.step()}
    flush(llm, 60)
    for key, prompt in prompts.items():
        data = hsx_dist.load_hidden_states(f"{output}/reset-{key}.safetensors", framework="torch")
        tokens = [*prompt, *answers[key].outputs[0].token_ids[:-1]]
        assert data["token_ids"].tolist() == tokens
        oracle.assert_equal(tokens, data["hidden_states"], LAYERS)


def test_wrong_parameters_affect_only_their_own_request(llm, oracle, output):
    """In one batch with others: metadata 600 deep, thousands of names, paths in a run, and another request's key."""
    deep: object = 1
    for _ in range(600):
        deep = [deep]
    prompts = [ids(20) for _ in range(7)]
    outputs = ask(
        llm,
        prompts,
        [
            {"hidden_states_key": "row-17"},
            {"hidden_states_metadata": {"a": deep}},
            {f"hidden_states_{i}": i for i in range(20_000)},
            {"hidden_states_path": str(output / "run.json")},
            {"hidden_states_path": str(output / "ROW-17.safetensors."), "hidden_states_loss_mask": [1] * 100_000},
            {"hidden_states_metadata": {"source": ["web", {"page": 3}]}, "hidden_states_path": "own.safetensors"},
            {"hidden_states_path": "row-17.safetensors"},
        ],
        skip_clone=True,  # as the server does: copying so deep an object fails before the engine receives it
    )
    answers = [o.kv_transfer_params for o in outputs]
    for prompt, answer in list(zip(prompts, answers, strict=True))[1:6]:
        data = hsx_dist.load_hidden_states(answer["hidden_states_path"], framework="torch")
        oracle.assert_equal(prompt, data["hidden_states"], LAYERS)
    assert data["meta"]["metadata"] == {"source": ["web", {"page": 3}]}
    assert (output / "own.safetensors").is_file()
    assert not (output / "run.json").exists()
    refused = [set(answer["hidden_states_meta"].get("refused", {})) for answer in answers]
    assert refused[1] == {"hidden_states_metadata"}
    assert len(refused[2]) < 20
    assert refused[3] == {"hidden_states_path"}
    assert refused[4] == {"hidden_states_path", "hidden_states_loss_mask"}
    # One of the two was stored and the other did not replace it. A reader gets an error.
    assert "used before" in answers[6]["hidden_states_meta"]["reason"]
    with pytest.raises(SampleFailed, match="used before"):
        hsx_dist.load_hidden_states(f"{output}/row-17.safetensors")
    (output / "row-17.safetensors.conflict.json").unlink()
    data = hsx_dist.load_hidden_states(f"{output}/row-17.safetensors", framework="torch")
    oracle.assert_equal(prompts[0], data["hidden_states"], LAYERS)


def test_requests_longer_than_the_ring_and_of_the_longest_length(llm, oracle):
    prompts = [ids(255), ids(254), ids(1)]
    for prompt, out in zip(prompts, ask(llm, prompts, [{}] * 3), strict=True):
        data = hsx_dist.load_hidden_states(out.kv_transfer_params["hidden_states_path"], framework="torch")
        oracle.assert_equal(prompt, data["hidden_states"], LAYERS)


SCRIPT = """
    import sys, tempfile
    from vllm import LLM, SamplingParams
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        cleanup_hidden_states, load_hidden_states)

    def main():
        llm = LLM(
            model=sys.argv[1], max_model_len=128, enforce_eager=True, dtype="float32", block_size=32,
            speculative_config={
                "method": "extract_hidden_states", "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}},
            },
            kv_transfer_config={
                "kv_connector": "HiddenStatesConnector",
                "kv_connector_module_path": "hsx_dist.connector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {
                    "shared_storage_path": sys.argv[2], "num_writer_threads": 4,
                    "allow_custom_save_path": True, "use_synchronization_lock": True,
                },
            },
        )
        mine = sys.argv[2] + "/of/my/choice.safetensors"
        outputs = llm.generate(["Hello, world.", "A second prompt."], [
            SamplingParams(max_tokens=1),
            SamplingParams(max_tokens=6, ignore_eos=True, extra_args={
                "kv_transfer_params": {"hidden_states_path": mine, "include_output_tokens": True}}),
        ])
        assert outputs[1].kv_transfer_params["hidden_states_path"] == mine
        for output in outputs:
            path = output.kv_transfer_params["hidden_states_path"]
            data = load_hidden_states(path)
            tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
            assert data["token_ids"].tolist() == tokens, data
            assert data["hidden_states"].shape == (len(tokens), 2, 64)
            assert data["hidden_states"].abs().sum() > 0
            cleanup_hidden_states(path)
        print("fine")

    if __name__ == "__main__":
        main()
"""


def test_a_script_for_vllms_own_connector_runs_with_two_strings_changed(tiny_model_path, tmp_path):
    """vLLM's default: the engine runs in a child process, and vLLM's loader in the parent waits for the lock."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    env = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    done = subprocess.run(
        [sys.executable, str(script), str(tiny_model_path), str(tmp_path / "states")],
        env=env,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("fine")
    assert [p for p in (tmp_path / "states").rglob("*") if p.is_file()] == []
