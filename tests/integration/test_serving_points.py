"""vLLM's own server with taps: requests of one batch choose different points, and each object and answer has these."""

from __future__ import annotations

import base64
import json
import shlex
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import safetensors.torch
import torch

import hsx_dist
from hsx_dist.models.tiny import write_tiny_tokenizer
from hsx_dist.taps.capture_config import KEY
from tests.harness.hooked_model import HookedModel, tiny_model, worst_row
from tests.harness.snippets import snippets
from tests.harness.vllm_server import API_KEY, GUIDE, Served, server
from tests.integration.exact import prompts

CAPTURE = {
    "hidden_states": [0, -1],
    "q": [0, 2],
    "k_norm": [3],
    "z": [2],
    "mlp_in": [1],
    "mlp_out": "all",
    "topk_ids": [2],
    "final_ln": "all",
}
STORED = {
    "hidden_states": (0, 5),
    "q": (0, 2),
    "k_norm": (3,),
    "z": (2,),
    "ln2": (1,),
    "mlp_out": (0, 1, 2, 3, 4),
    "topk_ids": (2,),
    "final_ln": (0,),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tiny_model("qwen3_moe", tmp_path_factory.mktemp("model") / "m")
    write_tiny_tokenizer(found, 512, 512)
    return found


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("server")
    arguments = {
        "--speculative-config": None,
        "--max-model-len": "512",
        "--additional-config": json.dumps({KEY: {"capture": {"points": CAPTURE}}}),
    }
    with server(model, f"file://{folder}/states", folder / "log", arguments=arguments) as running:
        yield running


@pytest.fixture(scope="module")
def hooked(model: Path) -> HookedModel:
    return HookedModel(model)


def complete(served: Served, prompt: list[int], tokens: int = 2, inline: bool = False, **params: Any) -> Any:
    body = {"kv_transfer_params": params, "ignore_eos": True, **({"hidden_states_inline": True} if inline else {})}
    return served.client.completions.create(
        model="tiny", prompt=prompt, max_tokens=tokens, temperature=0, extra_body=body
    )


def check(hooked: HookedModel, ids: list[int], states: dict[str, Any], layers: dict[str, Any]) -> None:
    """Compare the points in ``states``, name → ``[n, L, ...]``, with the model's."""
    right = hooked.rows(ids)
    assert states.keys() == layers.keys()
    for name, chosen in layers.items():
        assert states[name].shape[1] == len(chosen)
        for at, layer in enumerate(chosen):
            assert worst_row(states[name][:, at], right[name, layer]) < 2e-5, (name, layer)


#: What requests ask for, and what they receive.
ASKED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"hidden_states": (0, 5)}),
    ({"hidden_states_points": {"q": [2]}}, {"q": (2,)}),
    ({"hidden_states_points": {"z": "all", "topk_ids": [2]}}, {"z": (2,), "topk_ids": (2,)}),
    ({"hidden_states_points": "all"}, STORED),
    (
        {"hidden_states_points": {"mlp_out": [4, 1]}, "hidden_states_layers": [5]},
        {"mlp_out": (4, 1), "hidden_states": (5,)},
    ),
    ({"hidden_states_save": False}, {}),
]


def ask_concurrently(served: Served, long: list[int], mine: list[list[int]], keys: str) -> tuple[list[Any], bool]:
    """The answers to ``mine`` while ``long`` generates, and whether all came before its end, so in its batches."""
    asked = {"hidden_states_key": f"{keys}long", "hidden_states_points": {"q": [0]}}
    body = {"kv_transfer_params": asked, "ignore_eos": True}
    stream = iter(
        served.client.completions.create(model="tiny", prompt=long, max_tokens=460, stream=True, extra_body=body)
    )
    next(stream)

    def rest() -> float:
        list(stream)
        return time.monotonic()

    with ThreadPoolExecutor(len(mine) + 1) as pool:
        ends = pool.submit(rest)
        futures = [
            pool.submit(complete, served, prompt, hidden_states_key=f"{keys}r{i}", **ASKED[i][0])
            for i, prompt in enumerate(mine)
        ]
        answers = [future.result().kv_transfer_params for future in futures]
        answered = time.monotonic()
        return answers, answered < ends.result()


def test_requests_of_one_batch_store_other_points(served: Served, hooked: HookedModel) -> None:
    """Six requests while a seventh generates. Each gets the points that it selects, and their rows are the model's."""
    (long,), mine = prompts(70, 40), prompts(71, 20, 64, 9, 140, 33, 12)
    for attempt in range(8):  # on a busy machine the seventh may end before the six have started
        answers, together = ask_concurrently(served, long, mine, f"{attempt}-")
        if together:
            break
    else:
        pytest.fail("expected the six to be answered while the seventh generates, got none in eight attempts")
    for prompt, answer, (_, layers) in zip(mine, answers, ASKED, strict=True):
        if not layers:
            assert answer["hidden_states_meta"]["saved"] is False
            continue
        found = served.load(answer["hidden_states_path"], points=list(layers), wait=30)
        assert found["token_ids"].tolist() == prompt
        check(hooked, prompt, found["points"], layers)
        assert {name: tuple(ids.tolist()) for name, ids in found["layer_ids"].items()} == layers
    check(hooked, long, served.load(served.at(f"{attempt}-long"), points=["q"], wait=30)["points"], {"q": (0,)})


def test_answers_and_the_servers_route_have_points(served: Served, hooked: HookedModel) -> None:
    """An answer has all points of its request. A GET returns the points that it names."""
    (ids,) = prompts(72, 50)
    points = {"q": [2], "mlp_out": [1, 3]}
    choice = complete(served, ids, inline=True, hidden_states_points=points).choices[0]
    found = safetensors.torch.load(base64.b64decode(choice.hidden_states["safetensors"]))
    assert found["q"].shape == (50, 1, 4, 32)
    assert found["mlp_out.layer_ids"].tolist() == [1, 3]
    check(hooked, ids, {name: found[name] for name in points}, points)
    plain = complete(served, ids, inline=True).choices[0]
    states = safetensors.torch.load(base64.b64decode(plain.hidden_states["safetensors"]))
    check(hooked, ids, {"hidden_states": states["hidden_states"]}, {"hidden_states": (0, 5)})
    asked = {"hidden_states_points": points, "hidden_states_tokens": [10, None, 20]}
    few = complete(served, ids, inline=True, **asked).choices[0]
    rows = safetensors.torch.load(base64.b64decode(few.hidden_states["safetensors"]))
    assert rows["token_ids"].tolist() == ids[10::20]
    assert torch.allclose(rows["q"], found["q"][10::20], atol=1e-5)
    url, mine = f"{served.url}/v1/hidden_states", {"Authorization": f"Bearer {API_KEY}"}
    got = httpx.get(f"{url}/{choice.hidden_states['key']}?points=mlp_out&layers=3&tokens=-2:", headers=mine)
    tensors = safetensors.torch.load(got.raise_for_status().content)
    assert torch.equal(tensors["mlp_out"], found["mlp_out"][-2:, 1:])
    for wrong in ({"q": [1]}, {"nose": "all"}):
        with pytest.raises(openai.BadRequestError, match="captured") as refused:
            complete(served, ids, inline=True, hidden_states_points=wrong)
        assert refused.value.param == "kv_transfer_params.hidden_states_points"


def test_the_guides_snippets_say_how(served: Served) -> None:
    found = {s.language: s.text for s in snippets(GUIDE) if "additional-config" in s.text or "row-18" in s.text}
    table = json.loads(shlex.split(found["text"])[1])
    assert table == {KEY: {"capture": {"points": {"hidden_states": [2, 15, 27], "q": [15], "mlp_out": "all"}}}}
    asking = found["python"].replace("MODEL", "tiny").replace("[15]", "[2]")
    exec(compile(asking, GUIDE.name, "exec"), shown := {"client": served.client, "hsx_dist": hsx_dist})
    assert shown["points"]["q"].shape[1:] == (1, 4, 32)
    assert shown["points"]["mlp_out"].shape[1:] == (5, 64)
