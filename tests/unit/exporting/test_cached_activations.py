"""SAELens' cached activations, read back with ``datasets``: hooks of points, and of the stream by its other names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import load_from_disk

from hsx_dist.errors import ConfigError
from hsx_dist.exporting import ExportOptions, export_run
from hsx_dist.reading import Run
from tests.harness.points import computed_sample, run_of

HEAD, CONTEXT, N = 8, 16, 5
TOKENS = {"a": 37, "b": 16, "c": 15}
#: A hook, and the point and layer that store it.
HOOKS = {
    "blocks.0.hook_resid_pre": ("resid_pre", 0),
    "blocks.3.hook_resid_post": ("resid_pre", 4),
    "blocks.4.hook_resid_post": ("resid_final", 0),
    "blocks.3.hook_mlp_out": ("mlp_out", 3),
    "blocks.1.attn.hook_q": ("q", 1),
}
LAYERS = {"resid_pre": (0, 4), "resid_final": (0,), "mlp_out": (1, 3), "q": (1,)}


def rows_of(key: str) -> dict[tuple[str, int], Any]:
    rng = np.random.default_rng(ord(key))
    width = {"q": 3 * HEAD}
    return {
        (point, layer): rng.standard_normal((TOKENS[key], width.get(point, 20))).astype(np.float32)
        for point, of in LAYERS.items()
        for layer in of
    }


@pytest.fixture(scope="module")
def run() -> Run:
    made = [computed_sample(key, range(n), rows_of(key), LAYERS, HEAD) for key, n in TOKENS.items()]
    return run_of(*(sample.segments(i) for i, sample in enumerate(made)), about={"num_hidden_layers": N})


def check_rows(folder: Path, hook: str) -> None:
    """All whole contexts of ``a`` and ``b``, in order."""
    data = load_from_disk(str(folder)).with_format("numpy")
    expected = [rows_of(key)[HOOKS[hook]][: n // CONTEXT * CONTEXT] for key, n in TOKENS.items()]
    assert data.column_names == [hook, "token_ids"]
    assert len(data) == 3
    assert np.array_equal(np.concatenate(data[:][hook]), np.concatenate(expected))
    assert data[:]["token_ids"].tolist() == [[*range(16)], [*range(16, 32)], [*range(16)]]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_exported_from_its_point(hook: str, run: Run, tmp_path: Path) -> None:
    options = ExportOptions(hook=hook, context=CONTEXT, samples_per_file=2)
    assert export_run(run, "saelens", tmp_path, options).finished
    check_rows(tmp_path, hook)
    said = json.loads((tmp_path / "export.json").read_text())
    point, layer = HOOKS[hook]
    assert (said["hook_name"], said["layer"]) == (hook, f"{layer} of the point {point}")


@pytest.mark.parametrize(("layer", "hook"), [(0, "blocks.0.hook_resid_pre"), (N, "blocks.4.hook_resid_post")])
def test_a_layer_is_exported_from_the_streams_points(layer: int, hook: str, run: Run, tmp_path: Path) -> None:
    assert export_run(run, "saelens", tmp_path, ExportOptions(aux_layers=(layer,), context=CONTEXT)).finished
    check_rows(tmp_path, hook)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"expected one layer, got \[\]. Name one \(--layers 15\), or a hook"),
        ({"aux_layers": (0, 4)}, r"expected one layer, got \[0, 4\]"),
        ({"aux_layers": (2,)}, r"expected layer 2 of resid_pre \(blocks.1.hook_resid_post\), got \[0, 4\]"),
        ({"aux_layers": (4,), "hook": "blocks.3.hook_mlp_out"}, "expected a hook or a layer, got both"),
        ({"hook": "blocks.2.hook_mlp_out"}, r"expected layer 2 of mlp_out .*, got \[1, 3\]"),
        ({"hook": "blocks.2.attn.hook_z"}, "expected layer 2 of z .*, got none of this point; the run has resid_pre"),
        ({"hook": "blocks.1.hook_mlp_out", "context": 1000}, "expected samples of 1000 tokens, got shorter ones"),
        ({"hook": "blocks.2.hook_mlp_in"}, "hook_name: expected blocks.K. and one of"),
    ],
)
def test_other_choices_are_refused(options: dict[str, Any], message: str, run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        export_run(run, "saelens", tmp_path / "out", ExportOptions(**options))
    assert not (tmp_path / "out").exists()
