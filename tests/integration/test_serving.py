"""vLLM's own OpenAI server with the connector, the ``openai`` client, and states in a real S3 server or a folder.

Runs the client's blocks of serving.md; test_serving_points.py runs the block with points.
"""

from __future__ import annotations

import base64
import json
import re
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch

import hsx_dist
from hsx_dist.connector.flush import flush
from hsx_dist.errors import SampleFailed
from hsx_dist.format.container import Part
from hsx_dist.observe.metrics import METRICS
from hsx_dist.serving import HiddenStatesMiddleware
from hsx_dist.store import open_store
from hsx_dist.tokenizers import tokenizer_hash
from tests.harness.snippets import snippets
from tests.harness.vllm_server import API_KEY, GUIDE, LAYERS, Served, server
from tests.integration.oracle import Oracle


@pytest.fixture(scope="module")
def served(s3, tiny_model_path, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with server(tiny_model_path, f"{s3.url}/served", log, env=s3.env, storage_options=s3.storage_options) as running:
        yield running


@pytest.fixture(scope="module")
def oracle(tiny_model_path):
    return Oracle(tiny_model_path)


@pytest.fixture(scope="module")
def tokenizer(tiny_model_path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_path)


def wait_for_the_end(call: Callable[[], object], seconds: float = 30) -> None:
    """Call repeatedly until it raises, for at most that time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        call()
        time.sleep(0.1)


def params(**kwargs: Any) -> dict[str, Any]:
    return {"kv_transfer_params": kwargs}


def test_a_completion_and_a_chat_answer_with_a_path(served, oracle, tokenizer):
    prompt = "Reading is what paths are for."
    answer = served.client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
    path = answer.kv_transfer_params["hidden_states_path"]
    data = served.load(path, wait=30)
    assert data["token_ids"].tolist() == tokenizer(prompt).input_ids
    oracle.assert_equal(data["token_ids"].tolist(), data["hidden_states"], LAYERS)
    assert data["meta"]["expires"] > time.time()
    folder, _, name = path.rpartition("/")
    about = Part.open(open_store(folder, served.storage_options), name).about
    assert about["tokenizer_sha256"] == tokenizer_hash(tokenizer)
    assert about["num_hidden_layers"] == oracle.last

    messages = [{"role": "user", "content": "Hello"}]
    chat = served.client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=4, extra_body=params(hidden_states_key="chat/1")
    )
    assert chat.kv_transfer_params["hidden_states_path"] == served.at("chat/1")
    data = served.load(served.at("chat/1"), wait=30)
    assert data["token_ids"].tolist() == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    oracle.assert_equal(data["token_ids"].tolist(), data["hidden_states"], LAYERS)


def test_clients_can_compute_every_path_of_a_batch_and_n_choices(served, oracle, tokenizer):
    prompts = ["The first.", "And the second one."]
    answer = served.client.completions.create(
        model="tiny", prompt=prompts, n=2, max_tokens=3, temperature=1.0, extra_body=params(hidden_states_key="batch")
    )
    assert len(answer.choices) == 4
    for i, prompt in enumerate(prompts):
        for j in range(2):
            data = served.load(served.at(hsx_dist.sample_key("batch", prompt=i, choice=j)), wait=30)
            assert data["token_ids"].tolist() == tokenizer(prompt).input_ids
            oracle.assert_equal(data["token_ids"].tolist(), data["hidden_states"], LAYERS)


def test_streams_and_stop_strings_return_no_path_but_samples_are_stored(served, oracle, tokenizer):
    prompt = "Streams carry no parameters."
    ask = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0}
    streamed = list(served.client.completions.create(**ask, stream=True, extra_body=params(hidden_states_key="stream")))
    text = "".join(chunk.choices[0].text for chunk in streamed if chunk.choices)
    assert all(getattr(chunk, "kv_transfer_params", None) is None for chunk in streamed)
    # Two characters from the middle: they span tokens, so only the front end finds them.
    middle = text[len(text) // 2 : len(text) // 2 + 2]
    stopped = served.client.completions.create(**ask, stop=[middle], extra_body=params(hidden_states_key="stop"))
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.kv_transfer_params is None
    for key in ("stream", "stop"):
        data = served.load(served.at(key), wait=30)
        assert data["token_ids"].tolist() == tokenizer(prompt).input_ids
        oracle.assert_equal(data["token_ids"].tolist(), data["hidden_states"], LAYERS)


def test_a_disconnected_client_leaves_the_whole_prompt_or_a_marker(served, tokenizer):
    stream = served.client.completions.create(
        model="tiny",
        prompt="Good bye.",
        max_tokens=200,
        stream=True,
        extra_body={**params(hidden_states_key="hung-up"), "ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    data = served.load(served.at("hung-up"), wait=30)
    assert data["token_ids"].tolist() == tokenizer("Good bye.").input_ids


def test_wrong_values_and_used_keys_are_reported_in_the_answer_and_by_a_marker(served):
    first = served.client.completions.create(
        model="tiny", prompt="One.", max_tokens=1, extra_body=params(hidden_states_key="k", hidden_states_layers=[99])
    )
    assert "hidden_states_layers" in first.kv_transfer_params["hidden_states_meta"]["refused"]
    served.load(served.at("k"), wait=30)
    second = served.client.completions.create(
        model="tiny", prompt="Another.", max_tokens=1, extra_body=params(hidden_states_key="k")
    )
    assert "used before" in second.kv_transfer_params["hidden_states_meta"]["refused"]["hidden_states_key"]
    with pytest.raises(SampleFailed, match="used before"):
        wait_for_the_end(lambda: served.load(served.at("k")))  # the marker is written after the answer is sent


def test_no_request_id_reaches_a_path_outside_of_the_prefix(served):
    answer = served.client.completions.create(
        model="tiny", prompt="Id.", max_tokens=1, extra_headers={"X-Request-Id": "my/../../id"}
    )
    path = answer.kv_transfer_params["hidden_states_path"]
    assert "/" not in path.removeprefix(f"{served.prefix}/")
    served.load(path, wait=30)


@pytest.mark.parametrize("route", ["/v1/completions", "/invocations"])
def test_a_rejected_request_ends_no_engine_and_no_other_request(served, route):
    """vLLM adds a rejected request with ``do_remote_prefill`` to the engine, under the client's own text as its id."""
    answer = served.client.completions.create(model="tiny", prompt=list(range(5, 205)), max_tokens=1)
    held = answer.kv_transfer_params["hidden_states_key"]
    for name in ("", held, held[:-33], "free"):
        body = {"model": "tiny", "prompt": "x", "stream": True, "use_beam_search": True, "request_id": name}
        params = {"do_remote_prefill": True}
        headers = {} if route == "/invocations" else {"Authorization": f"Bearer {API_KEY}"}
        refused = httpx.post(f"{served.url}{route}", json={**body, "kv_transfer_params": params}, headers=headers)
        assert refused.status_code == 400
    served.load(answer.kv_transfer_params["hidden_states_path"], wait=30)
    assert served.client.completions.create(model="tiny", prompt="Hello.", max_tokens=1).kv_transfer_params


def test_wrong_parameters_affect_only_their_own_request(served, tokenizer):
    deep: Any = 1
    for _ in range(600):
        deep = [deep]
    asked = [
        params(hidden_states_metadata={"a": deep}),
        params(**{f"hidden_states_{i}": i for i in range(10_000)}),
        params(hidden_states_key="next-to-them"),
    ]

    def ask(body: dict[str, Any]) -> Any:
        return served.client.completions.create(model="tiny", prompt="Next to others.", max_tokens=4, extra_body=body)

    with ThreadPoolExecutor(len(asked)) as pool:
        answers = [answer.kv_transfer_params for answer in pool.map(ask, asked)]
    for answer in answers:
        data = served.load(answer["hidden_states_path"], wait=30)
        assert data["token_ids"].tolist() == tokenizer("Next to others.").input_ids
    assert "deep" in answers[0]["hidden_states_meta"]["refused"]["hidden_states_metadata"]
    assert len(json.dumps(answers[1])) < 5000
    assert answers[2]["hidden_states_key"] == "next-to-them"


def decoded(states: dict[str, str]) -> dict[str, Any]:
    return safetensors.torch.load(base64.b64decode(states["safetensors"], validate=True))


def test_the_guides_snippets_have_states_without_the_store(served, oracle, tokenizer):
    inline, by_key = (
        s.text.replace("http://127.0.0.1:8000", served.url)
        .replace("MODEL", "tiny")
        .replace("SECRET", API_KEY)
        .replace("2,27", "4,1")
        for s in snippets(GUIDE)
        if s.language == "python" and "safetensors.torch" in s.text
    )
    exec(compile(inline, GUIDE.name, "exec"), shown := {})
    assert shown["states"].shape[:2] == (1, len(LAYERS))
    exec(compile(by_key, GUIDE.name, "exec"), shown)
    assert shown["tensors"]["layer_ids"].tolist() == [4, 1]
    assert torch.equal(shown["tensors"]["hidden_states"], shown["states"].flip(1))
    command = next(s.text for s in snippets(GUIDE) if s.language == "text" and "--middleware" in s.text).split()
    assert command[:3:2] == ["--middleware", "--api-key"]
    assert command[1] == f"{HiddenStatesMiddleware.__module__.rpartition('.')[0]}.{HiddenStatesMiddleware.__name__}"


def test_sampling_parameters_that_vllms_rejection_sampler_cannot_handle_leave_the_engine_running(served):
    """Extraction makes vLLM use its rejection sampler. With these requests it ended the engine."""
    ask = {"model": "tiny", "prompt": "Sampled.", "max_tokens": 3, "temperature": 1.0}
    sampled = [served.client.completions.create(**ask, extra_body={"top_k": 5, "seed": 1}) for _ in range(2)]
    assert sampled[0].choices[0].text == sampled[1].choices[0].text
    body = {"model": "tiny", "query": [5, 6], "items": [[9, 10], [11]], "label_token_ids": [3, 4]}
    scored = httpx.post(f"{served.url}/generative_scoring", json=body, timeout=60)
    assert scored.status_code < 500, scored.text
    assert httpx.get(f"{served.url}/health", timeout=10).status_code == 200


def test_every_choice_of_batches_and_streams_has_states_that_are_exact(served, oracle, tokenizer):
    prompts = ["Inline, the first.", "And inline the second one."]
    ask = {"model": "tiny", "max_tokens": 3, "extra_body": {"hidden_states_inline": True}, "temperature": 1.0}

    def check(prompt_ids: list[int], states: dict[str, str]) -> None:
        found = decoded(states)
        assert found["token_ids"].tolist() == prompt_ids
        oracle.assert_equal(prompt_ids, found["hidden_states"], LAYERS)

    answer = served.client.completions.create(prompt=prompts, n=2, **ask)
    assert len(answer.choices) == 4
    for choice in answer.choices:
        check(tokenizer(prompts[choice.index // 2]).input_ids, choice.hidden_states)
    streamed = list(served.client.completions.create(prompt=prompts, stream=True, **ask))
    chunks = [choice for chunk in streamed for choice in chunk.choices if hasattr(choice, "hidden_states")]
    assert [choice.index for choice in chunks] == [0, 1]
    for choice in chunks:
        check(tokenizer(prompts[choice.index]).input_ids, choice.hidden_states)
    messages = [{"role": "user", "content": "Hello, inline."}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    chat = served.client.chat.completions.create(messages=messages, n=2, **ask)
    streamed = list(served.client.chat.completions.create(messages=messages, stream=True, **ask))
    chunks = [choice for chunk in streamed for choice in chunk.choices if hasattr(choice, "hidden_states")]
    assert len(chunks) == 1
    for choice in [*chat.choices, *chunks]:
        check(list(ids), choice.hidden_states)


def test_an_answer_holds_the_mean_of_one_layer_and_wrong_parameters_are_refused(served, oracle, tokenizer):
    import openai

    def ask(**params: Any) -> Any:
        body = {"hidden_states_inline": True, "kv_transfer_params": params}
        return served.client.completions.create(model="tiny", prompt="The mean.", max_tokens=1, extra_body=body)

    mean = decoded(ask(hidden_states_tokens="mean", hidden_states_layers=[4]).choices[0].hidden_states)
    whole = decoded(ask().choices[0].hidden_states)["hidden_states"]
    assert mean["layer_ids"].tolist() == [4]
    assert torch.allclose(mean["hidden_states"][0, 0], whole[:, 1].mean(0), atol=1e-5)
    for wrong in ({"hidden_states_layers": [99]}, {"hidden_states_key": "k"}, {"hidden_states_loss_mask": [1]}):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(**wrong)
        assert refused.value.param == f"kv_transfer_params.{next(iter(wrong))}"


def test_without_the_servers_key_no_states_are_answered(served):
    url = f"{served.url}/v1"
    served.client.completions.create(
        model="tiny", prompt="Mine.", max_tokens=1, extra_body=params(hidden_states_key="mine/1")
    )
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1, "hidden_states_inline": True}
    for headers in ({}, {"Authorization": "Bearer none"}):
        assert httpx.get(f"{url}/hidden_states/mine%2F1", headers=headers).status_code == 401
        assert httpx.post(f"{url}/completions", json=body, headers=headers).status_code == 401
    mine = {"Authorization": f"Bearer {API_KEY}"}
    got = httpx.get(f"{url}/hidden_states/mine%2F1?wait=30", headers=mine, timeout=60)
    assert got.status_code == 200
    loaded = served.load(served.at("mine/1"))
    assert torch.equal(safetensors.torch.load(got.content)["hidden_states"], loaded["hidden_states"])
    unknown = httpx.get(f"{url}/hidden_states/unknown", headers=mine)
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "NotFound")


def metrics(served: Served, wanted: Sequence[str]) -> dict[str, str]:
    """The server's hidden-states counters, after all ``wanted`` ones have counted something."""
    end = time.monotonic() + 60
    while True:  # the next step reports the samples stored since the last one
        served.client.completions.create(model="tiny", prompt="Count.", max_tokens=1)
        with urllib.request.urlopen(f"{served.url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = dict(re.findall(r"^vllm:hidden_states_(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE))
        if all(float(found.get(name, 0)) >= 1 for name in wanted):
            return found
        assert time.monotonic() < end, found


def test_metrics_count_stored_samples(served):
    found = metrics(served, ["stored_total", "skipped_total"])
    assert float(found["page_bytes_total"]) > 0
    assert float(found["pages_total"]) >= float(found["samples_total"]) >= float(found["stored_total"])
    assert float(found["tokens_total"]) >= float(found["samples_total"])
    # The writers run in the server's process. Their metrics have a job's names.
    assert float(found["puts_total"]) >= float(found["parts_total"]) >= float(found["stored_total"]) > 0
    assert float(found["put_seconds_total"]) > 0
    assert set(found) >= {m.in_vllm.removeprefix("vllm:hidden_states_") for m in METRICS if m.served}


class Workers:
    """A server's workers for ``flush``, called over vLLM's development route as an ``LLM`` calls its workers."""

    llm_engine = SimpleNamespace(engine_core=None)

    def __init__(self, url: str):
        self._url = url

    def collective_rpc(self, method: str) -> list[int]:
        body = json.dumps({"method": method}).encode()
        request = urllib.request.Request(f"{self._url}/collective_rpc", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return [int(n) for n in json.load(answer)["results"]]


def test_into_a_folder_with_another_connector(tiny_model_path, tmp_path, oracle, tokenizer):
    """Inside vLLM's MultiConnector both connectors hold blocks. This one ships, and the other keeps its blocks longer.

    In a folder a reader never finds another request's sample. vLLM's own loader and clean-up work on the same files.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as vllms

    other = {
        "kv_connector": "OtherConnector",
        "kv_connector_module_path": "tests.integration.other_connector",
        "kv_role": "kv_producer",
    }
    states = tmp_path / "states"
    extension = {"--worker-extension-cls": "hsx_dist.connector.flush.HiddenStatesWorkerExtension"}
    env = {"PYTHONPATH": str(Path.cwd()), "VLLM_SERVER_DEV_MODE": "1"}
    more = {"beside": [other], "arguments": extension, "env": env, "hsx": {"codec": "none"}}
    with server(tiny_model_path, f"file://{states}", tmp_path / "log", **more) as served:
        prompts = [f"{i}. " + "Many words of one prompt. " * i for i in (0, 1, 3, 5)]
        answers = []
        for prompt in prompts * 2:
            answer = served.client.completions.create(model="tiny", prompt=prompt, max_tokens=2)
            answers.append((prompt, answer.kv_transfer_params))
        flush(Workers(served.url), 60)
        for prompt, told in answers:
            assert told["other"] == "was here"
            path = told["hidden_states_path"]
            assert path.startswith(f"file://{states}/")
            data = served.load(path)  # without waiting
            assert data["token_ids"].tolist() == tokenizer(prompt).input_ids
            oracle.assert_equal(data["token_ids"].tolist(), data["hidden_states"], LAYERS)

        messages = [{"role": "user", "content": "Hello"}]
        chat = served.client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
        path = chat.kv_transfer_params["hidden_states_path"].removeprefix("file://")
        theirs = vllms.load_hidden_states(path)  # sleeps on the lock until the object is there
        oracle.assert_equal(theirs["token_ids"].tolist(), theirs["hidden_states"], LAYERS)
        vllms.cleanup_hidden_states(path)
        assert not list(states.glob(f"{Path(path).name}*"))

        (asking,) = (s.text for s in snippets(GUIDE) if s.language == "python" and '"row-17"' in s.text)
        asking = asking.replace("http://127.0.0.1:8000", served.url).replace("MODEL", "tiny")
        exec(compile(asking.replace('"none"', f'"{API_KEY}"'), GUIDE.name, "exec"), shown := {})
        assert shown["path"] == served.at("row-17")
        (comparing,) = (s for s in snippets(GUIDE) if "identity=" in s.text)
        first = shown["states"]
        exec(compile(comparing.text, GUIDE.name, "exec"), shown)
        assert torch.equal(shown["states"], first)
        assert shown["states"].shape[1] == len(LAYERS)

        inline = served.client.completions.create(
            model="tiny", prompt=prompts[1], max_tokens=1, extra_body={"hidden_states_inline": True}
        )
        found = decoded(inline.choices[0].hidden_states)  # MultiConnector passes the child's settings
        oracle.assert_equal(tokenizer(prompts[1]).input_ids, found["hidden_states"], LAYERS)

        for i in range(5):
            ask = {"model": "tiny", "max_tokens": 1, "extra_body": params(hidden_states_key=f"k{i}")}
            served.client.completions.create(prompt="One.", **ask)
            assert served.load(served.at(f"k{i}"), wait=30)["token_ids"].tolist() == tokenizer("One.").input_ids
            served.client.completions.create(prompt="Another.", **ask)
            with pytest.raises(SampleFailed, match="used before"):
                served.load(served.at(f"k{i}"), wait=30)  # on the first try: a reader never gets "One."
        metrics(served, ["stored_total", "skipped_total"])  # MultiConnector passes them on, too
        last = served.client.completions.create(model="tiny", prompt="The end.", max_tokens=1)
    data = served.load(last.kv_transfer_params["hidden_states_path"])  # the server received SIGTERM right after it
    assert data["token_ids"].tolist() == tokenizer("The end.").input_ids
