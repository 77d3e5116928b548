"""The Python and shell blocks of the guides, run as written."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tokenizers import Tokenizer

from hsx_dist import HiddenStatesDataset, Run, open_run
from hsx_dist.cli import main
from hsx_dist.config import load_config
from hsx_dist.format.place import start_run
from hsx_dist.models.builtin import SMOLLM2, resolve_model
from hsx_dist.observe.report.prompt_attention import gather_attention
from hsx_dist.reading.statistics import read_statistics
from hsx_dist.store import open_store
from hsx_dist.testing.samples import RandomSample, random_sample
from tests.harness.activations import HIDDEN, SAMPLES, compute, store, write_model
from tests.harness.hooked_model import HookedModel
from tests.harness.points import computed_sample, point_sample, run_of
from tests.harness.runs import RunWriter, store_run
from tests.harness.snippets import Snippet, snippets

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
GUIDE = GUIDES / "training.md"


def run_python(blocks: Sequence[Snippet], names: dict[str, Any]) -> list[Snippet]:
    """Run the Python blocks in order with these ``names``. Returns the blocks."""
    python = [block for block in blocks if block.language == "python"]
    names["__name__"] = "__main__"  # as a reader's script
    for block in python:
        exec(compile(block.text, block.where, "exec"), names)
    return python


def run_commands(block: Snippet, variables: Mapping[str, str]) -> None:
    """Run each line, a ``hsx`` command, in this process."""
    for line in block.text.splitlines():
        program, *words = shlex.split(line)
        assert program == "hsx"
        with pytest.raises(SystemExit, match="0"):
            main([variables.get(word, word) for word in words])


@pytest.mark.slow
def test_the_guide_goes_from_a_run_to_a_training_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path / "run")
    store_run(open_store(url), [random_sample(f"s{i}", 9 + i, seed=i, odd=False) for i in range(10)])
    loop, merge, follow = (s for s in snippets(GUIDE) if s.language == "python")
    assert len([line for line in loop.text.splitlines() if line.strip()]) <= 25
    text, changed = re.subn(r"^(RUN|LAYER, LAST, HIDDEN) = .*$", "", loop.text, flags=re.MULTILINE)
    assert changed == 2
    names: dict[str, Any] = {"RUN": url, "LAYER": 2, "LAST": 30, "HIDDEN": 24}
    run_python([replace(loop, text=text)], names)
    assert names["loss"].item() > 0
    dataset = HiddenStatesDataset(url, shuffle=True)
    items = iter(dataset)
    for _ in range(3):
        next(items)
    names |= {"dataset": HiddenStatesDataset(url, shuffle=True), "states": [dataset.state_dict()]}
    run_python([merge], names)
    assert [item["key"] for item in names["dataset"]] == [item["key"] for item in items]
    assert list(Path(url).glob("*/data/*"))
    text, changed = re.subn(r"^RUN = .*$", "", follow.text, flags=re.MULTILINE)
    assert changed == 1  # the run of the other commands stays
    run_python([replace(follow, text=text)], names)
    assert not list(Path(url).glob("*/data/*"))  # the only consumer has used all samples


def test_the_guide_on_sparse_autoencoders_gives_batches(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    store_run(open_store(url), [random_sample(f"s{i}", 60 + i, seed=i, odd=False) for i in range(10)])
    blocks = [s for s in snippets(GUIDES / "sparse-autoencoders.md") if s.run_by is None]
    assert [s.language for s in blocks if s.language != "python"] == ["sh"]
    run_commands(blocks[0], {"$RUN": url})
    assert read_statistics(open_run(url), [15]).layers[15].skip_first == 1
    names: dict[str, Any] = {"RUN": url, "LAYER": 15}
    python = run_python(blocks, names)
    assert len(python) == 4
    assert names["batch"]["hidden_states"].shape == (256, 24)
    assert names["state"]["batches"] > 0
    assert names["packed"]["hidden_states"].shape == (4, 32, 24)
    expected = next(islice(names["batches"], 10, None))
    assert names["eleventh"]["hidden_states"].equal(expected["hidden_states"])
    norms = names["batch"]["hidden_states"].norm(dim=1)
    assert norms.mean().item() == pytest.approx(24**0.5, rel=0.1)


def labelled_run(url: str) -> None:
    """Layer 15 holds the label of a sample's last token in one channel, and the reward of each token in another."""
    root = open_store(url)
    start_run(root, {"meaning": {"model": "tiny", "layers": [2, 15]}, "settings": {}})
    writer = RunWriter(root, attached=lambda s: {"loss_mask": (np.arange(len(s.token_ids)) >= 4).astype(np.uint8)})
    rng = np.random.default_rng(0)
    stored = []
    for i in range(160):
        tokens, positive, reward = 8 + i % 5, int(rng.integers(2)), float(rng.normal())
        states = rng.standard_normal((tokens, 2, 24)).astype(np.float32)
        states[-1, 1, 3] += 6 * positive - 3
        states[:, 1, 5] = 2 * reward
        sample = RandomSample(f"r{i}", states.view(np.uint32), np.arange(tokens), (2, 15), "float32", 16)
        meta = {"metadata": {"positive": positive, "reward": reward}}
        stored.append((sample, replace(sample.segments()[0], meta=meta), i))
    writer.put(stored)
    writer.complete()


def test_the_guide_on_probes_finds_the_layer_that_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = str(tmp_path / "run")
    labelled_run(url)
    blocks = snippets(GUIDES / "probes.md")
    config = load_config(None, (), output="/x", model="m", **yaml.safe_load(blocks[0].text))
    assert (config.select, config.input.metadata) == ("last", ["positive"])
    torch.manual_seed(0)
    labels = {sample.key: np.zeros(sample.num_tokens) for sample in open_run(url)}
    names: dict[str, Any] = {"RUN": url, "LAYER": 15, "HIDDEN": 24, "token_labels": labels}
    assert len(run_python(blocks, names)) == 3
    found, control = names["found"], names["control"]
    assert found[15] > 0.9
    assert max(found[2], control[2], control[15]) < 0.8
    assert f"layer 15: {found[15]:.2f}, with" in capsys.readouterr().out
    assert np.mean(names["losses"][-5:]) < 0.2 * names["losses"][0]


def test_the_guide_on_other_tools_writes_each_trainers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_model(tmp_path / "target")
    url = str(tmp_path / "run")
    store(compute(target), Path(url))
    monkeypatch.chdir(tmp_path)
    commands, python = snippets(GUIDES / "other-tools.md")
    run_commands(commands, {"$RUN": url, "$MODEL": str(target)})
    for name, files in (("modelopt", "*.pt"), ("specforge", "**/*.ckpt"), ("speculators", "**/hs_*.safetensors")):
        assert len(list((tmp_path / "trainers" / name).glob(files))) == SAMPLES, name
        assert (tmp_path / "trainers" / name / "export.json").is_file()
    names: dict[str, Any] = {"RUN": url, "LAYER": 5}
    run_python([python], names)
    assert names["batch"]["hidden_states"].shape == (8, HIDDEN)


def test_the_guide_on_routing_replay_reads_the_exported_files(tmp_path: Path) -> None:
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
    """The guide's code on states from transformers. `make pages` runs the page with vLLM."""
    folder = Path(resolve_model(SMOLLM2))
    hooked, tokenizer = HookedModel(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))

    def extract(prompts: list[str], *, model: str, capture: Any, output: str, **_: Any) -> Run:
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
    # The page shows the printed lines. Their last digits depend on the arithmetic.
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
    drawn = gather_attention(names["run"], [names["sample"].key], None)  # of the built-in model if --model is left out
    assert drawn is not None
    assert [layer.layer for layer in drawn.layers] == [0, 15]
    np.testing.assert_array_equal(drawn.layers[1].patterns, attention)
