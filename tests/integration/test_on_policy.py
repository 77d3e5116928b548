"""The guide on on-policy distillation: all its blocks in order, in one engine with an adapter."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from hsx_dist.config import load_config
from tests.harness.lora import write_adapter
from tests.harness.snippets import as_program, snippets
from tests.integration.oracle import Oracle

pytestmark = [pytest.mark.integration, pytest.mark.slow]

GUIDE = Path(__file__).parents[2] / "docs/guides/on-policy.md"
LAYERS = (2, 4)
PROMPTS = [[7, 8, 9, 10, 11], list(range(20, 60))]
#: The guide's engine compiles the model and uses bfloat16. Compiling takes minutes, and bfloat16 hides errors. The
#: engine runs in this process, so that a timeout leaves no process behind.
_ENGINE = '    MODEL,\n    dtype="float32",\n    enforce_eager=True,\n    distributed_executor_backend="uni",\n'
_GIVEN = """
import torch
from transformers import AutoModelForCausalLM

MODEL, ADAPTER, STATES, PROMPTS, MIDDLE, LAST = {model!r}, {adapter!r}, {states!r}, {prompts!r}, 2, 4
train_model = AutoModelForCausalLM.from_pretrained({merged!r}, dtype=torch.float32)
"""
_KEPT = """
llm.llm_engine.engine_core.shutdown()
torch.save(dict(answers=answers, rollout=rollout, key=key, losses=losses, found=found), {result!r})
"""


@pytest.fixture(scope="module")
def shown(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of the guide's blocks, and the paths that they used."""
    folder = tmp_path_factory.mktemp("on-policy")
    adapter, merged = write_adapter(tiny_model_path, folder)
    paths = {"model": str(tiny_model_path), "adapter": str(adapter), "merged": str(merged)}
    paths |= {"states": str(folder / "states"), "result": str(folder / "result.pt")}
    engine, *blocks = (s for s in snippets(GUIDE) if s.language == "python")
    given, kept = (
        replace(engine, text=text) for text in (_GIVEN.format(prompts=PROMPTS, **paths), _KEPT.format(**paths))
    )
    engine = replace(engine, text=engine.text.replace("    MODEL,\n", _ENGINE))
    done = subprocess.run(
        [sys.executable, "-c", as_program([given, engine, *blocks, kept])],
        env={**os.environ, "PYTHONPATH": str(Path.cwd()), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "nats a token from the teacher" in done.stdout
    return {**paths, **torch.load(paths["result"], weights_only=False)}


def test_the_students_states_are_those_of_its_adapter(shown: dict[str, Any]) -> None:
    sample = shown["rollout"]
    prompt, answer = shown["answers"][1]
    tokens = [*prompt, *answer[:-1]]
    assert shown["key"] == "student-3/0-n1"
    assert sample["token_ids"].tolist() == tokens
    Oracle(shown["merged"]).assert_equal(tokens, sample["hidden_states"], LAYERS)
    assert sample["loss_mask"].tolist() == [0] * len(prompt) + [1] * (len(answer) - 1)
    meta = sample["meta"]
    assert (meta["lora"], meta["metadata"], meta["prompt_tokens"]) == ("student-3", {"step": 3}, len(prompt))


def test_the_loss_is_the_divergence_of_the_two_models(shown: dict[str, Any]) -> None:
    """Divergence of the student from the teacher on the generated tokens, both computed by transformers."""
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(shown[name], dtype=torch.float32).eval() for name in ("merged", "model")
    )
    assert len(shown["losses"]) == len(shown["answers"]) == 2 * len(PROMPTS)
    for (prompt, answer), loss in zip(shown["answers"], shown["losses"], strict=True):
        ids = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            own, target = (m(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for m in (student, teacher))
        assert len(own) == len(answer)
        expected = (own.exp() * (own - target)).sum(-1).mean()
        assert loss == pytest.approx(float(expected), rel=1e-3)
        assert loss > 0.01
    assert all("lora" not in given["hidden_states_meta"] for given in shown["found"])


def test_a_run_takes_the_rollouts_as_rows() -> None:
    [block] = [s for s in snippets(GUIDE) if s.language == "yaml"]
    config = load_config(None, (), output="/x", model="m", **yaml.safe_load(block.text))
    assert (config.input.token_ids, config.input.loss_mask) == ("token_ids", "loss_mask")
