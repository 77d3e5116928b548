"""Attention patterns from stored queries and keys, against transformers' ``output_attentions`` in float32."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hsx_dist import AttentionPatterns
from hsx_dist.errors import ConfigError
from hsx_dist.model_parts import attention
from hsx_dist.model_parts.attention import ATTENTION_RULES
from hsx_dist.reading import Sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.points import computed_sample, run_of
from tests.unit.model_parts.test_model_end import SMALL

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = list(range(3, 43))
QUERIES, KEYS, DIM = 6, 2, 16
#: Bases and scalings of rotary positions. A wrong one shows within 40 tokens.
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 50.0},
    "partial": {"rope_theta": 50.0, "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 1000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1000.0},
    "yarn, untruncated, scaled": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 1000.0,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "truncate": False,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
}


class Attended:
    """A tiny model with hooks on its queries and keys, and its attention ``[layers, heads, T, T]``."""

    def __init__(self, family: str, folder: Path, rope: dict[str, Any] | None = None, **changes: Any) -> None:
        kind = CONFIG_MAPPING[family]
        usual = dir(kind())
        sizes = {name: value for name, value in SMALL.items() if name in usual and name != "final_logit_softcapping"}
        sizes |= {"num_attention_heads": QUERIES, "num_key_value_heads": KEYS, "max_position_embeddings": 256}
        sizes |= {"hidden_size": QUERIES * DIM, **({"head_dim": DIM} if "head_dim" in usual else {})}
        sizes |= {"attention_multiplier": 0.4} if "attention_multiplier" in usual else {}
        sizes |= {"rope_parameters": {"rope_type": "default", **rope}} if rope else {}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = kind(**sizes | changes)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
            for name, parameter in model.named_parameters():
                if "_proj" in name or "embed" in name:  # with the usual 0.02 all scores would be almost equal
                    parameter.data.normal_(0, 1 if "embed" in name else 0.3)
                elif name.endswith(("q_norm.weight", "k_norm.weight")):
                    parameter.data.uniform_(0.5, 2)
        self.rows: dict[tuple[str, int], torch.Tensor] = {}
        for i, layer in enumerate(model.model.layers):
            for name, module in layer.self_attn.named_children():
                module.register_forward_hook(self._hook(name, i))
        with torch.inference_mode():
            out = model(torch.tensor([IDS]), output_attentions=True, use_cache=False)
        self.attention = torch.stack(out.attentions)[:, 0].numpy()
        self.folder = folder
        model.save_pretrained(folder)

    def _hook(self, name: str, layer: int) -> Any:
        def hook(_: Any, __: Any, out: Any) -> None:
            if name == "qkv_proj":
                q, k, _ = out[0].split([QUERIES * DIM, KEYS * DIM, KEYS * DIM], -1)
                self.rows["q", layer], self.rows["k", layer] = q.clone(), k.clone()
            elif name in ("q_proj", "k_proj", "q_norm", "k_norm"):
                # transformers applies head norms after it has split heads and, in some families, swapped axes.
                rows = out[0].transpose(0, 1) if out[0].dim() == 3 and out.shape[1] != len(IDS) else out[0]
                self.rows[name.removesuffix("_proj"), layer] = rows.reshape(len(IDS), -1).clone()

        return hook

    def sample(self, points: Sequence[str] = ("q", "k"), layers: Sequence[int] = (0, 1), head: int = DIM) -> Sample:
        return run_of(computed_sample("a", IDS, self.rows, dict.fromkeys(points, layers), head).segments(0))["a"]

    def check(self, points: Sequence[str] = ("q", "k")) -> None:
        patterns, sample = AttentionPatterns(str(self.folder)), self.sample(points)
        assert patterns.layers(sample) == (0, 1)
        for layer in (0, 1):
            got = patterns.pattern(sample, layer)
            assert (got.shape, got.dtype) == ((QUERIES, len(IDS), len(IDS)), np.float32)
            np.testing.assert_allclose(got, self.attention[layer], atol=1e-5)
            np.testing.assert_allclose(patterns.pattern(sample, layer, 7), self.attention[layer][:, :7, :7], atol=1e-5)


@pytest.mark.parametrize("family", sorted(ATTENTION_RULES))
def test_patterns_are_the_models_own(family: str, tmp_path: Path) -> None:
    rule = ATTENTION_RULES[family]
    made = Attended(family, tmp_path, {"rope_theta": 50.0})
    # With equal patterns a wrong scale or a wrong position would not show.
    assert np.abs(made.attention[0][0] - made.attention[0][1]).max() > 0.05
    made.check()
    if rule.head_norm:
        made.check(("q_norm", "k_norm"))
    assert CONFIG_MAPPING[family]().rope_parameters["rope_theta"] == rule.theta


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_every_kind_of_rotary_positions(rope: dict[str, Any], tmp_path: Path) -> None:
    made = Attended("phi3" if "partial_rotary_factor" in rope else "llama", tmp_path, rope)
    made.check()
    # With the names of configurations from before transformers 5.
    config = json.loads((tmp_path / "config.json").read_text())
    new = config.pop("rope_parameters")
    config |= {name: new.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in new}
    new["type"] = new.pop("rope_type")
    config["rope_scaling"] = None if new["type"] == "default" else new
    (tmp_path / "config.json").write_text(json.dumps(config))
    made.check()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Attended:
    return Attended("llama", tmp_path_factory.mktemp("model"))


def change(made: Attended, folder: Path, **changes: Any) -> str:
    """The model with another configuration."""
    config = json.loads((made.folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "one of the types arcee, .* got model_type 'gemma2'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "linear, llama3 or yarn, got 'dynamic'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor: expected a number from 1e-30 to 1e30, got None"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta: expected a number .* got -1"),
        ({"num_attention_heads": 4}, "expected points of 4 query and 2 key heads, of one size, got 6 heads in 96"),
        ({"num_hidden_layers": 7}, "which has 7 layers, got one of a model with 2"),
        ({"sliding_window": 8}, "at most the model's attention window of 8, got 40"),
    ],
)
def test_a_model_whose_patterns_would_be_wrong_is_refused(
    made: Attended, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    stored = computed_sample("a", IDS, made.rows, dict.fromkeys(("q", "k"), (0, 1)), DIM)
    sample = run_of(stored.segments(0), about={"num_hidden_layers": 2})["a"]
    with pytest.raises(ConfigError, match=message):
        AttentionPatterns(change(made, tmp_path, **changes)).pattern(sample, 0)


def test_a_sample_that_lacks_keys_is_refused(made: Attended, monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = AttentionPatterns(str(made.folder))
    with pytest.raises(ConfigError, match="got 'k'"):
        patterns.pattern(made.sample(("q",)), 0)
    with pytest.raises(ConfigError, match=r"expected layers of point 'q' among \[0\], got \[1\]"):
        patterns.pattern(made.sample(layers=(0,)), 1)
    with pytest.raises(ConfigError, match="got 12 heads in 96 numbers and 4 in 32"):
        patterns.pattern(made.sample(head=8), 0)
    with pytest.raises(ConfigError, match="max_tokens: expected at least 1, got 0"):
        patterns.pattern(made.sample(), 0, 0)
    assert patterns.layers(made.sample(("q",))) == ()
    for chosen, fine in (
        ({"start": 0, "step": 1, "of": 90}, True),
        ({"start": 1, "step": 1, "of": 90}, False),
        ({"start": 0, "step": 2, "of": 90}, False),
        ({"loss_mask": True, "of": 90}, False),
        ({"mean": True, "of": 90}, False),
    ):
        points = dict.fromkeys(("q", "k"), (0,))
        stored = computed_sample("a", IDS, made.rows, points, DIM).segments(0)
        selected = [(sample, replace(segment, meta={"tokens": chosen}), row) for sample, segment, row in stored]
        sample = run_of(selected)["a"]
        if fine:
            patterns.pattern(sample, 0)
        else:
            with pytest.raises(ConfigError, match="expected a whole sample, got a selection of its tokens"):
                patterns.pattern(sample, 0)


def test_a_run_names_no_folder_of_its_reader_and_no_other_positions(made: Attended) -> None:
    stored = computed_sample("a", IDS, made.rows, dict.fromkeys(("q", "k"), (0,)), DIM).segments(0)
    overridden = {"model": "org/name", "engine_kwargs": {"hf_overrides": {"rope_theta": 5}}}
    with pytest.raises(ConfigError, match="got engine_kwargs with hf_overrides"):
        AttentionPatterns(run_of(stored, meaning=overridden))
    with pytest.raises(ConfigError, match="expected an id of the Hugging Face hub as the run's model"):
        AttentionPatterns(run_of(stored, meaning={"model": str(made.folder)}))


def test_rows_that_are_not_finite_spoil_no_other_row(made: Attended) -> None:
    rows = {key: x.clone() for key, x in made.rows.items()}
    rows["q", 0][5] = float("nan")
    stored = computed_sample("a", IDS, rows, dict.fromkeys(("q", "k"), (0,)), DIM)
    got = AttentionPatterns(str(made.folder)).pattern(run_of(stored.segments(0), store=MemoryStore())["a"], 0)
    assert np.isnan(got[:, 5, :6]).all()
    np.testing.assert_allclose(np.delete(got, 5, 1), np.delete(made.attention[0], 5, 1), atol=1e-5)


def test_heads_that_no_model_has_are_refused_before_their_weights_are_allocated(
    made: Attended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may name a model on the hub whose configuration has as many heads as the run's rows."""
    monkeypatch.setattr(attention, "_MOST_HEADS", QUERIES - 1)
    with pytest.raises(ConfigError, match="got 6 heads in 96 numbers"):
        AttentionPatterns(str(made.folder)).pattern(made.sample(), 0)
