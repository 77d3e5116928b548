"""docs/capture.md against the code: the tables of points and presets, and the bytes of each point."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import MixtralConfig, Qwen3Config

import hsx_dist
from hsx_dist.config import ExtractConfig, load_config
from hsx_dist.jobs.capture import captured_rows
from hsx_dist.taps.points import POINTS, PRESETS
from tests.harness.snippets import Snippet, snippets

PATH = Path(hsx_dist.__file__).parents[1] / "docs" / "capture.md"
PAGE = PATH.read_text()
HEAD = "| point | what it is | row | dtype | layers | bytes |"
_ROW = {
    "hidden": "`H`",
    "q": "`heads × dim`",
    "kv": "`kv_heads × dim`",
    "mlp": "`F`",
    "experts": "`experts`",
    "top_k": "`top_k`",
}
#: The sizes of Qwen3-4B. Points of a router have those of Mixtral-8x7B.
_DENSE = Qwen3Config(
    hidden_size=2560,
    intermediate_size=9728,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
_MOE = MixtralConfig()


def rows_of_registry() -> list[tuple[str, ...]]:
    """The table's rows, generated from the code."""
    found = []
    for name, point in POINTS.items():
        text = _MOE if point.width in ("experts", "top_k") else _DENSE
        layers = [0] if point.per_layer else "all"
        config = ExtractConfig(output="o", model="m", source="taps", capture={"points": {name: layers}})
        (rows,) = captured_rows(config, text, "bfloat16").values()
        which = "0 to N" if name == "hidden_states" else "each" if point.per_layer else "once"
        dtype = point.dtype or ("the router's" if name == "router_logits" else "the model's")
        formula = f"alias of `{point.alias_of}`" if point.alias_of else f"`{point.formula}`"
        found.append((f"`{name}`", formula, _ROW[point.width], dtype, which, f"{rows.row_bytes:,}"))
    return found


def table(head: str) -> list[tuple[str, ...]]:
    """The rows of the page's table that begins with ``head``."""
    lines = PAGE.split(head + "\n", 1)[1].splitlines()[1:]
    rows = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]) for row in rows]


@pytest.mark.parametrize("block", [s for s in snippets(PATH) if s.language == "yaml"], ids=lambda s: s.where)
def test_a_runs_file_is_accepted(block: Snippet, tmp_path: Path) -> None:
    """For the model of the page's example, Qwen3-4B."""
    file = tmp_path / "run.yaml"
    file.write_text(block.text)
    config = load_config(str(file), model="m", output="o")
    assert config.source == "taps"
    assert config.capture is not None
    chosen = {p for of in config.capture.values() for p in (PRESETS[of] if isinstance(of, str) else of)}
    assert captured_rows(config, _DENSE, "bfloat16").keys() == chosen


def test_the_table_of_points_is_the_codes() -> None:
    assert table(HEAD) == rows_of_registry()


def test_the_table_of_presets_is_the_codes() -> None:
    found = {name.strip("`"): points for name, points in table("| preset | points |")}
    assert found.keys() == PRESETS.keys()
    for name, points in PRESETS.items():
        if name != "full":  # described in words
            assert tuple(re.findall(r"`(\w+)`", found[name])) == points
    stored = {name for name, point in POINTS.items() if point.alias_of is None}
    assert set(PRESETS["full"]) == stored - {"hidden_states"}
    assert found["full"] == "every point once; of the hidden states as `resid_pre` and `resid_final`"


def test_the_example_of_bytes_is_right() -> None:
    points = {"hidden_states": [2, 18, 33], "q": [15], "mlp_out": "all"}
    config = ExtractConfig(output="o", model="m", source="taps", capture={"points": points})
    total = sum(len(r.layers) * r.row_bytes for r in captured_rows(config, _DENSE, "bfloat16").values())
    assert f"{total:,} bytes a token" in PAGE
    full = ExtractConfig(output="o", model="m", source="taps", capture={"preset": "full"})
    total = sum(len(r.layers) * r.row_bytes for r in captured_rows(full, _DENSE, "bfloat16").values())
    assert f"`full` takes {total:,} bytes a token" in PAGE
