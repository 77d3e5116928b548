"""The captured points of a run, from its settings and a model's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from hsx_dist.config import ExtractConfig, load_config
from hsx_dist.errors import ConfigError
from hsx_dist.fleet.replica import engine_arguments
from hsx_dist.fleet.tasks import EngineSpec
from hsx_dist.jobs.capture import (
    CapturedRows,
    capture_of_run,
    captured_rows,
    column_bytes,
    mean_bytes,
    rank_bytes,
    token_bytes,
)
from hsx_dist.taps.capture_config import KEY
from hsx_dist.taps.points import PRESETS
from tests.harness.hooked_model import tiny_model

DENSE = SimpleNamespace(
    num_hidden_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=96,
)
EXPERTS = SimpleNamespace(**vars(DENSE), num_local_experts=8, num_experts_per_tok=2)


def config(**settings: Any) -> ExtractConfig:
    return ExtractConfig.model_validate({"output": "out", "model": "m", **settings})


def rows(text: Any = DENSE, dtype: str = "bfloat16", **settings: Any) -> dict[str, CapturedRows]:
    return captured_rows(config(**settings), text, dtype)


def test_layers_are_hidden_states_by_whichever_source() -> None:
    for source in ("cache", "taps"):
        given = config(layers=[0, "last"], source=source)
        found = captured_rows(given, DENSE, "float32")
        assert found == {"hidden_states": CapturedRows((0, 4), 64 * 4)}
        expected = None if source == "cache" else {"points": {"hidden_states": [0, 4]}}
        assert capture_of_run(given, found) == expected


def test_rows_are_as_long_as_the_points() -> None:
    wanted = {"hidden_states": "all", "q": [-1], "k": 1, "mlp_post": [0, 1], "topk_ids": [2], "router_logits": [2]}
    found = rows(EXPERTS, source="taps", capture={"points": wanted})
    assert {name: (r.layers, r.row_bytes) for name, r in found.items()} == {
        "hidden_states": ((0, 1, 2, 3, 4), 128),
        "q": ((3,), 256),
        "k": ((1,), 128),
        "mlp_post": ((0, 1), 192),
        "router_logits": ((2,), 16),
        "topk_ids": ((2,), 8),
    }
    assert token_bytes(found) == 5 * 128 + 256 + 128 + 2 * 192 + 16 + 8
    assert column_bytes(found, 1) == column_bytes(found, 8) == 5 * 128
    assert column_bytes({"q": CapturedRows((1, 2), 256)}, 4) == 128
    # A rank has a fourth of q, one of two heads of k, and the whole of all others.
    assert rank_bytes(found, 4, kv_heads=2) == 5 * 128 + 64 + 64 + 2 * 48 + 16 + 8
    # A mean is float32, and ids have none.
    assert mean_bytes(found, 2) == 5 * 256 + 512 + 256 + 2 * 384 + 32


def test_two_ways_to_say_the_same_are_one_run_and_presets_keep_their_name() -> None:
    ways = [{"q": "last", "mlp_in": [0], "embed": "all"}, {"ln2": [0], "q": [3], "embed": "all"}]
    found = []
    for way in ways:
        given = config(source="taps", capture={"points": way})
        found.append(capture_of_run(given, captured_rows(given, DENSE, "bfloat16")))
    assert found == [{"points": {"embed": "all", "q": [3], "ln2": [0]}}] * 2
    preset = config(source="taps", capture={"preset": "mlp"})
    assert capture_of_run(preset, captured_rows(preset, DENSE, "bfloat16")) == {"preset": "mlp"}
    assert "router_logits" not in captured_rows(preset, DENSE, "bfloat16")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"capture": {"points": {"q": [1]}}, "source": "cache"}, "expected source taps, got source cache"),
        ({"capture": {"points": {"q": [1]}, "preset": "full"}, "source": "taps"}, "either points or preset"),
        ({"capture": {"points": {"q": [1]}}, "source": "taps", "layers": [1]}, "layers: expected it to be absent"),
        ({"engine_kwargs": {"additional_config": {KEY: {}}}}, "the extraction sets it"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(**settings)


def test_capture_without_a_source_is_by_taps(tmp_path: Path) -> None:
    """By a file, by the command line and in Python, the same settings as with ``source: taps``."""
    capture = {"points": {"q": [1]}}
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({"model": "m", "output": "out", "capture": capture}))
    written = load_config(None, (), model="m", output="out", capture=capture, source="taps")
    for config in (
        load_config(str(file)),
        load_config(None, (), model="m", output="out", capture=capture),
        load_config(None, ["capture.points.q=[1]"], model="m", output="out"),
        ExtractConfig(model="m", output="out", capture=capture),
    ):
        assert (config, config.public()) == (written, written.public())
        assert config.source == "taps"
    for settings in ({}, {"capture": None}, {"layers": [1]}):
        assert ExtractConfig(model="m", output="out", **settings).source == "cache"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"capture": {"points": {"q": [4]}}}, "expected layers 0 to 3"),
        ({"capture": {"points": {"topk_ids": [1]}}}, "a point that it lacks"),
        ({"capture": {"points": {"nose": [1]}}}, "expected names among"),
        ({"capture": {"preset": "attention"}, "layout": "sample"}, "got sample with q, k, v, z, attn_out"),
    ],
)
def test_captures_that_the_model_or_the_layout_lacks_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rows(source="taps", **settings)


def spec(**given: Any) -> EngineSpec:
    kwargs = given.pop("engine_kwargs", {})
    return EngineSpec("m", None, (1,), kwargs, {}, {}, 9, 9, "out", "none", "part", 1, 1, 1, **given)


def test_an_engine_with_taps_has_no_drafter_and_its_capture_in_the_compile_hash() -> None:
    user = {"additional_config": {"theirs": 1}}
    arguments = engine_arguments(spec(engine_kwargs=user, capture={"points": {"q": [1]}}), "inline", "a")
    assert "speculative_config" not in arguments
    assert arguments["additional_config"]["theirs"] == 1
    assert arguments["additional_config"][KEY]["capture"] == {"points": {"q": [1]}}
    without = engine_arguments(spec(), "inline", "a")
    assert without["speculative_config"]["method"] == "extract_hidden_states"
    assert "additional_config" not in without


@pytest.mark.parametrize(
    ("kind", "lacking", "dense"),
    [
        ("llama", {"q_norm", "k_norm", "router_logits", "topk_ids", "topk_weights"}, range(5)),
        ("qwen3", {"router_logits", "topk_ids", "topk_weights"}, range(5)),
        ("qwen3_moe", set(), [1]),
        ("mixtral", {"q_norm", "k_norm", "mlp_post"}, []),
    ],
)
def test_a_preset_is_what_the_model_has(kind: str, lacking: set[str], dense: Sequence[int], tmp_path: Path) -> None:
    """The tiny models as transformers configures them. Only the configuration says which layers have experts."""
    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(tiny_model(kind, tmp_path))
    found = rows(text, source="taps", capture={"preset": "full"})
    assert found.keys() == set(PRESETS["full"]) - lacking
    assert set(found["mlp_post"].layers if "mlp_post" in found else ()) == set(dense)
    experts = tuple(sorted(set(range(5)) - set(dense)))
    assert ("topk_ids" in found) == bool(experts)
    assert not experts or found["topk_ids"].layers == experts
    if "mlp_post" in lacking:
        with pytest.raises(ConfigError, match=r"mlp_post: expected a point of this model"):
            rows(text, source="taps", capture={"points": {"mlp_post": "all"}})
