"""The engine benchmark runs: one short round of its main comparison, and one of an engine that is toggled."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.provenance import ROOT

LOAD = "thin/5/prefill/pinned"


@pytest.mark.soak
def test_a_short_round_of_ours_and_of_vllms_own(tmp_path):
    short = ["--rounds", "1", "--windows", "2", "--seconds", "1"]
    argv = ["--loads", LOAD, "--sinks", "direct,vllm", *short, "--results", str(tmp_path)]
    argv = [sys.executable, "-m", "benchmarks.engine", *argv]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "engine.json").read_text())
    assert [(c["load"], c["sink"]) for c in found["cells"]] == [(LOAD, "direct"), (LOAD, "vllm")]
    assert all(c["requests"] > 0 and c["tokens_per_s"] > 0 for c in found["cells"])  # each cell checks what it stored
    assert {r["what"] for r in found["ratios"]} >= {"durable ÷ vLLM's own, until all is written"}
    assert LOAD in (tmp_path / "engine.md").read_text()


@pytest.mark.soak
def test_captures_are_switched_within_one_engine(tmp_path):
    """Each cell checks by the counters of taps and drafter that each window captured what its mode says."""
    load = "thin/5/prefill/host"
    argv = ["--loads", load, "--rounds", "1", "--windows", "2", "--seconds", "4", "--results", str(tmp_path)]
    argv = [sys.executable, "-m", "benchmarks.engine", *argv]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "engine.json").read_text())
    assert [c["sink"] for c in found["cells"]] == ["none", "null", "direct-cache", "taps-cache", "taps-sink"]
    ratios = {r["what"]: r for r in found["ratios"]}
    ratio = ratios["taps: to host memory ÷ nothing captured, tokens/s"]
    assert ratio["goal"] == "≥ 0.95"
    assert ratio["pairs"] == 2
