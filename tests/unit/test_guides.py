"""The guide's code, as it stands there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tokenizers import Tokenizer

from hsx_dist import Run, open_run
from hsx_dist.cli import main
from hsx_dist.config import load_config
from hsx_dist.models.builtin import SMOLLM2, resolve_model
from hsx_dist.observe.report.prompt_attention import gather_attention
from hsx_dist.reading.statistics import compute_statistics, store_statistics
from hsx_dist.store import open_store
from hsx_dist.testing.samples import random_sample
from tests.harness.hooked_model import HookedModel
from tests.harness.points import computed_sample, point_sample, run_of
from tests.harness.runs import store_run
from tests.harness.snippets import snippets

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
GUIDE = GUIDES / "training.md"


@pytest.mark.slow
def test_the_guide_goes_from_a_run_to_a_training_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path / "run")
    store_run(open_store(url), [random_sample(f"s{i}", 9 + i, seed=i, odd=False) for i in range(10)])
    code = GUIDE.read_text().split("```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    names = {"RUN": url, "LAYER": 2, "LAST": 30, "HIDDEN": 24, "__name__": "guide"}
    exec(compile(code, "training.md", "exec"), names)
    assert float(names["loss"]) > 0  # type: ignore[arg-type]


def test_the_guide_on_sparse_autoencoders_gives_batches(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    store_run(open_store(url), [random_sample(f"s{i}", 60 + i, seed=i, odd=False) for i in range(10)])
    store_statistics(open_run(url), compute_statistics(open_run(url), [15], skip_first=1))
    names = {"RUN": url, "LAYER": 15, "__name__": "guide"}
    blocks = [s for s in snippets(GUIDES / "sparse-autoencoders.md") if s.language == "python"]
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block.text, block.where, "exec"), names)
    assert names["batch"]["hidden_states"].shape == (256, 24)  # type: ignore[index]
    assert names["state"]["batches"] > 0  # type: ignore[index]
    assert names["packed"]["hidden_states"].shape == (4, 32, 24)  # type: ignore[index]


def test_the_guide_on_routing_replay_reads_what_is_exported(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    run_of(*(point_sample(f"s{i}", 9 + i, seed=i).segments(i) for i in range(3)), store=open_store(url))
    (config, command, *_) = blocks = snippets(GUIDES / "routing-replay.md")
    assert load_config(None, (), **yaml.safe_load(config.text)).capture == {
        "points": {"topk_ids": "all", "topk_weights": "all"}
    }
    words = command.text.split()
    assert words[:2] == ["hsx", "export"]
    with pytest.raises(SystemExit, match="0"):
        main(["export", url, str(tmp_path / "routes"), *words[4:]])
    said = json.loads((tmp_path / "routes" / "export.json").read_text())
    assert said["routed_experts"].startswith("[T, 2, 4], decoder layers [3, 7]")
    assert said["routed_weights"] == "not stored"
    names = {"RUN": url, "ROUTES": str(tmp_path / "routes"), "__name__": "guide"}
    for block in blocks:
        if block.language == "python":
            exec(compile(block.text, block.where, "exec"), names)
    expected = point_sample("s0", 9, seed=0).points["topk_ids"].astype("int32")
    assert names["experts"].tolist() == expected.tolist()  # type: ignore[attr-defined]
    assert names["chosen"].tolist() == expected[:, 0].tolist()  # type: ignore[attr-defined]
    assert names["weights"].shape == (9, 4)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_the_guide_on_looking_inside_sees_the_answer_and_the_sentiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its code on what transformers computes; `make pages` runs the page with vLLM."""
    folder = Path(resolve_model(SMOLLM2))
    hooked, tokenizer = HookedModel(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))

    def extract(prompts: list[str], *, model: str, source: str, capture: Any, output: str, **_: Any) -> Run:
        assert source == "taps"
        layers = {name: range(31) if of == "all" else of for name, of in capture["points"].items()}
        parts = []
        for i, prompt in enumerate(prompts):
            ids = tokenizer.encode(prompt).ids
            rows = hooked.rows(ids)
            rows |= {("hidden_states", k): rows["resid_pre", k] for k in range(30)}
            rows["hidden_states", 30] = rows["resid_final", 0]
            parts.append(computed_sample(f"{i:08d}", ids, rows, layers, 64).segments(i))
        return run_of(*parts, store=open_store(str(tmp_path / "look")), meaning={"model": model})

    monkeypatch.setattr("hsx_dist.extract", extract, raising=False)
    names: dict[str, Any] = {"__name__": "guide"}
    blocks = snippets(GUIDES / "interpretability.md")
    for block in blocks:
        if block.language == "python":
            exec(compile(block.text, block.where, "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    lens, probe = (block.text.splitlines() for block in blocks if block.language == "text")
    # The page shows what is printed. The last digits are of the arithmetic.
    printed = [line.rpartition(" ")[0] for line in lines if line.startswith("layer ")]
    assert len(printed) == 31
    assert printed[-len(lens) :] == [line.rpartition(" ")[0] for line in lens]
    assert printed[-1] == "layer 30: ' Paris'"
    (shares,) = ([int(share) for share in re.findall(r"(\d+)%", x)] for x in lines if x.startswith("unseen words"))
    assert probe == [f"unseen words: {shares[0]}%; learnt from shuffled labels: 50%"]
    assert shares[0] == 100
    assert 45 <= shares[1] <= 55
    attention = names["attention"]
    with torch.inference_mode():
        ids = names["sample"].token_ids("torch")[None]
        right = hooked.model(ids, output_attentions=True).attentions[15][0].numpy()
    np.testing.assert_allclose(attention, right, atol=1e-5)
    drawn = gather_attention(names["run"], [names["sample"].key], None)  # of the built-in model without --model
    assert drawn is not None
    assert [layer.layer for layer in drawn.layers] == [0, 15]
    np.testing.assert_array_equal(drawn.layers[1].patterns, attention)
