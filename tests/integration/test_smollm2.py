"""A real language model: SmolLM2-135M through the command line, in bf16 and in float32, compared with transformers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.train_sae import train_sae
from hsx_dist.config import load_config
from hsx_dist.inputs.rows import read_rows
from hsx_dist.jobs.plan import make_plan
from hsx_dist.reading import load_hidden_states, open_run
from tests.integration.oracle import Oracle

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
LAYERS = (2, 15, 27, 30)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """Every eleventh row of the demo: about two dozen, with chats."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = (ROOT / "configs" / "demo" / "prompts.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join(lines[::11]))
    return path


def extract(rows: Path, output: Path, dtype: str) -> str:
    settings = [f"engine_kwargs.dtype={dtype}", "engine_kwargs.enforce_eager=true", "engine_kwargs.max_model_len=2048"]
    flags = ["--model", "builtin:smollm2-135m-instruct", "--input", str(rows), "--layers", "2,15,27,last"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "hsx_dist.cli",
            "extract",
            *flags,
            "--output",
            str(output),
            "--pool",
            "threads",
            *settings,
            "check_samples=4",
        ],
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def plan(rows: Path, output: Path, dtype: str) -> dict[str, Any]:
    """The output of ``hsx plan`` for the same run, before the run starts."""
    config = load_config(
        None,
        model="builtin:smollm2-135m-instruct",
        output=str(output),
        layers="2,15,27,last",
        input={"path": str(rows)},
        engine_kwargs={"dtype": dtype, "max_model_len": 2048},
    )
    return make_plan(config, lambda: read_rows(config.input)).to_dict()


@pytest.mark.timeout(900)  # an engine, transformers and 400 steps of training, on two loaded cores
@pytest.mark.parametrize(
    ("dtype", "layer_limit", "norm_limit"),
    # In float32 the stored runs below have this model's states, and tests with exact numbers have all others.
    [pytest.param("float32", 1e-3, 1e-3, marks=pytest.mark.soak), ("bfloat16", 0.05, 0.08)],
)
def test_stored_states_are_those_of_transformers(rows, smollm2_path, tmp_path, dtype, layer_limit, norm_limit):
    said = extract(rows, tmp_path / "run", dtype)
    assert "4 samples against transformers" in said
    run = open_run(str(tmp_path / "run"))
    wanted = [json.loads(line)["id"] for line in rows.read_text().splitlines()]
    assert run.keys() == wanted  # samples are in the order of their rows
    planned = plan(rows, tmp_path / "run", dtype)
    assert planned["tokens"] == sum(record.num_tokens for record in run.manifest.samples.values())
    stored = sum(receipt.size for receipt in run.manifest.parts.values())
    assert abs(planned["stored_bytes"] - stored) < 0.1 * stored
    oracle = Oracle(smollm2_path, getattr(torch, dtype))
    for sample in run:
        data = load_hidden_states(str(tmp_path / "run"), sample.key)
        assert tuple(data["layer_ids"].tolist()) == LAYERS
        assert data["hidden_states"].dtype == getattr(torch, dtype)
        errors = oracle.errors(data["token_ids"].tolist(), data["hidden_states"], LAYERS)
        for layer, (whole, worst_row) in errors.items():
            error = worst_row if dtype == "float32" else whole
            assert error < (norm_limit if layer == 30 else layer_limit), (sample.key, layer, error)

    if dtype == "float32":
        losses, shuffled = (train_sae(str(tmp_path / "run"), 15, steps=200, shuffled=s) for s in (False, True))
        assert np.mean(losses[-20:]) < 0.6 * np.mean(losses[:5])
        assert np.mean(losses[-20:]) < 0.6 * np.mean(shuffled[-20:])


@pytest.mark.parametrize("version", [1, 2])
def test_a_run_that_a_stored_version_began_is_finished(version: int, tmp_path: Path) -> None:
    """The driver was killed after six of nine rows. Proven rows stay, and the rest equals an undisturbed run."""
    output = tmp_path / "run"
    shutil.copytree(GOLDEN / f"v{version}-unfinished", output)
    settings = ["enforce_eager=true", "max_model_len=256", "dtype=float32"]
    flags = ["--model", "builtin:smollm2-135m-instruct", "--input", str(GOLDEN / "rows.jsonl"), "--layers", "2,15"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "hsx_dist.cli", "extract", *flags, "--output", str(output)),
            *("--pool", "threads", "resume=must"),
            *(f"engine_kwargs.{setting}" for setting in settings),
        ],
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "attempt 2: 9 rows, 6 of them done" in done.stdout
    run, whole = open_run(str(output)), open_run(str(GOLDEN / f"v{version}-complete"))
    assert run.complete
    assert (list(run.keys()), set(run.refused)) == (list(whole.keys()), set(whole.refused))
    attempts = {key: run.index.parts[run.index.part_of[i]].attempt for i, key in enumerate(run.keys())}
    assert attempts == {f"row-{i}": 1 if i < 6 else 2 for i in range(8)}
    for key in whole.keys():  # noqa: SIM118
        ours, theirs = (r[key].load(framework="numpy")["hidden_states"] for r in (run, whole))
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)
