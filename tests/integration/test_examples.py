"""The examples learn: on SmolLM2's states, read from a run and computed on the fly."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.linear_probe import train_probe
from examples.train_draft import from_run, main, on_the_fly, train
from hsx_dist.store import open_store
from hsx_dist.testing.samples import RandomSample
from tests.harness.runs import store_run
from tests.harness.snippets import snippets

pytestmark = [pytest.mark.integration, pytest.mark.slow]

TOPICS = ("rain", "bread", "a lighthouse", "winter", "trains", "honey", "the moon", "chess", "salt", "rivers")


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def run(smollm2_path: Path, model: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """States of layers 1 and 30 (before the norm), in float32, so that states computed on the fly are equal."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    samples = []
    before: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: before.append(inputs[0]))
    for i, topic in enumerate(TOPICS * 2):
        text = (
            f"Write about {topic}. It was once said that {topic} {'can' if i < 10 else 'cannot'} change a life, and so "
        )
        ids = tokenizer(text + text.lower())["input_ids"]
        before.clear()
        with torch.inference_mode():
            streams = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        states = torch.stack([streams[1][0], before[0][0]], 1)
        samples.append(
            RandomSample(f"t{i:02d}", states.numpy().copy().view(np.uint32), np.array(ids), (1, 30), "float32", 64)
        )
    hook.remove()
    url = str(tmp_path_factory.mktemp("draft") / "run")
    store_run(open_store(url), samples)
    return url


def test_a_draft_head_learns_the_same_as_from_states_on_the_fly(run: str, model: Any) -> None:
    stored = train(model, from_run(run, 30, 2), steps=25)
    computed = train(model, on_the_fly(model, from_run(run, 30, 2)), steps=25)
    assert np.mean(stored[-5:]) < 0.8 * np.mean(stored[:5])
    assert np.allclose(stored, computed, rtol=2e-3)


def test_the_command_of_the_training_page_runs(
    run: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(__file__).parents[2] / "docs/guides/training.md"
    (block,) = (s for s in snippets(page) if s.language == "sh")
    python, _, module, *arguments = shlex.split(block.text.replace("runs/demo", run))
    assert (python, module) == ("python", "examples.train_draft")
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    main()
    first, last = re.findall(r"\d+\.\d+", capsys.readouterr().out)
    assert float(last) < float(first)


def test_a_probe_learns(run: str) -> None:
    assert train_probe(run, 1, epochs=40) > 0.8
