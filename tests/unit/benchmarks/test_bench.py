"""What the benchmarks make of their cells, and what the one table makes of their results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import bench, engine, engine_report

RESULTS = Path(bench.__file__).parent / "results"


def cell(sink: str, turn: int, tokens_per_s: float, **more) -> dict:
    return {
        "load": "thin/5/prefill/pinned", "sink": sink, "round": turn, "windows": 4, "window_s": 20.0, "durable_s": 21.0,
        "tokens_per_s": tokens_per_s, "durable_tokens_per_s": tokens_per_s / 1.05, "synced_tokens_per_s": 1.0,
        "tokens_per_cpu_s": tokens_per_s,
        "durable_bytes_per_s": 1e8, "ttft_median": 0.1, "held_blocks_peak": 3, "memory_peak": 1 << 30,
        "memory_growth": 0, "server_cpu_s": 1.0, "cpu_s": {"engine": 20.0, "hsx-encode": 5.0}, **more,
    }  # fmt: skip


def test_ratios_are_of_windows_that_followed_one_another():
    def windows(*figures: float) -> dict:
        names = ("tokens_per_s", "tokens_per_cpu_s", "durable_tokens_per_s", "synced_tokens_per_s", "ttft_median")
        return {"each": [dict.fromkeys(names, f) for f in figures]}

    cells = [
        cell("null-sink", 1, 1.0, **windows(90, 100, 110)),
        cell("file", 1, 1.0, **windows(90, 50, 55)),
        cell("null-sink", 2, 100.0, **windows(90, 110)),
        cell("seaweedfs", 2, 20.0, **windows(20)),
    ]
    found = {r["sink"]: r for r in engine_report.ratios(cells) if "÷ null sink, tokens/s" in r["what"]}
    assert (found["file"]["median"], found["file"]["range"], found["file"]["pairs"]) == (0.5, [0.5, 1.0], 3)
    assert (found["seaweedfs"]["median"], found["seaweedfs"]["pairs"]) == (0.2, 1)  # not as many: all together


def test_ratios_are_medians_within_rounds():
    cells = [cell("null", t, 100.0 * t) for t in (1, 2, 3)] + [cell("null-sink", t, 100.0 * t * t) for t in (1, 2, 3)]
    (found,) = [r for r in engine_report.ratios(cells) if "null sink ÷ null" in r["what"]]
    assert (found["median"], found["range"], found["pairs"]) == (2.0, [1.0, 3.0], 3)


def test_what_the_table_of_an_engine_says():
    about = {"cpu": "c", "cores": 2, "load_average": 0, "system": "s", "python": "3", "versions": {}, "commit": "abc"}
    cells = [cell("null", 1, 1000.0), cell("null-sink", 1, 970.0, ttft_median=0.102)]
    cells.append(cell("slow", 1, 200.0, rate_share=0.98, growth_share=0.01))
    abouts = {"thin/5/prefill/pinned": about}
    text = engine_report.table({"about": abouts, "cells": cells, "ratios": engine_report.ratios(cells)})
    assert "| null-sink | 970 | 970 | 924 | 102 | 3 | 1,024 (+0) | 20.0, 5.0, 1.0 | 29% | – |" in text
    assert "commit abc. A cell: 20 s in 4 windows." in text
    assert "| a store of 60 MB/s: durable bytes a second ÷ its own | slow | 0.980 (0.980–0.980) | 1 | ≥ 0.95 |" in text
    assert "| time to first token ÷ null's, median | null-sink | 1.020 (1.020–1.020) | 1 | ≤ 1.03 |" in text


@pytest.mark.parametrize(
    ("row", "met"),
    [
        (bench.Row("a", 0.98, "≥ 0.97"), True),
        (bench.Row("a", 0.96, "≥ 0.97"), False),
        (bench.Row("a", 1.02, "≤ 1.03"), True),
        (bench.Row("a", 1.02), None),
    ],
)
def test_goals(row, met):
    assert row.met is met


@pytest.mark.parametrize("name", sorted(bench.BENCHMARKS))
def test_every_result_that_is_kept_can_be_told(name):
    file = RESULTS / f"{name}.json"
    rows = list(bench.BENCHMARKS[name][3](json.loads(file.read_text()))) if file.exists() else []
    assert all(row.what and isinstance(row.measured, float | int) for row in rows)
    if file.exists() and name != "gpu":
        assert rows


def test_every_benchmark_is_a_module_with_help():
    for module, *_ in bench.BENCHMARKS.values():
        assert Path(*module.split(".")).with_suffix(".py").exists(), module
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.engine", "--help"], capture_output=True, text=True, check=True
    )
    assert "--choice" in done.stdout


def test_the_loads_and_sinks_that_a_choice_names_exist():
    for pattern, sinks, rounds, seconds in (*engine.SHORT, *engine.FULL):
        assert seconds >= 20
        assert set(sinks) <= set(engine.SINKS)
        assert rounds >= 1
        assert pattern == "*" or pattern in engine.LOADS


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "either --choice or --loads"),
        (["--choice", "short", "--loads", "thin*"], "either --choice or --loads"),
        (["--choice", "full", "--sinks", "file"], "expected with --loads"),
        (["--loads", "thin*", "--sinks", "nope"], "came nope"),
        (["--loads", "thin*", "--rounds", "0"], "at least 1"),
        (["--loads", "nope"], "came 'nope'"),
    ],
)
def test_the_engines_benchmark_refuses_what_it_would_not_do(argv, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["engine", *argv])
    with pytest.raises(SystemExit):
        engine.main()
    assert said in capsys.readouterr().err
