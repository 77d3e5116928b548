"""The benchmarks' results from their cells, and the summary table from their results."""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import bench, engine, engine_cell, engine_loads, engine_report, engine_toggles, processes
from benchmarks.goals import verdict
from benchmarks.processes import descendants
from benchmarks.provenance import ROOT

RESULTS = Path(bench.__file__).parent / "results"


FIGURES = ("tokens_per_s", "tokens_per_cpu_s", "durable_tokens_per_s", "synced_tokens_per_s", "ttft_median")


def cell(sink: str, turn: int, *figures: float, **more) -> dict:
    """``figures``: one per window."""
    return {
        "load": "thin/5/prefill/pinned", "sink": sink, "round": turn, "windows": len(figures), "window_s": 20.0,
        "each": [dict.fromkeys(FIGURES, f) for f in figures], "durable_s": 21.0, "durable_bytes_per_s": 1e8,
        "held_blocks_peak": 3, "memory_peak": 1 << 30, "memory_growth": 0, "server_cpu_s": 1.0,
        "cpu_s": {"engine": 20.0, "hsx-encode": 5.0}, **more,
    }  # fmt: skip


def test_ratios_compare_windows_of_one_round():
    cells = [cell("null-sink", 1, 90, 100, 110), cell("file", 1, 90, 50, 55)]
    cells += [cell("null-sink", 2, 90), cell("seaweedfs", 2, 18), cell("file", 3, 1)]
    found = {r["sink"]: r for r in engine_report.ratios(cells) if r["what"].endswith("÷ null sink, tokens/s")}
    assert (found["file"]["median"], found["file"]["range"], found["file"]["pairs"]) == (0.5, [0.5, 1.0], 3)
    assert (found["seaweedfs"]["median"], found["seaweedfs"]["pairs"]) == (0.2, 1)


def test_ratios_of_several_rounds_are_one_median():
    cells = [cell("null", t, 100.0 * t) for t in (1, 2, 3)] + [cell("null-sink", t, 100.0 * t * t) for t in (1, 2, 3)]
    (found,) = [r for r in engine_report.ratios(cells) if r["what"] == "ours: null sink ÷ null, tokens/s"]
    assert (found["median"], found["range"], found["pairs"]) == (2.0, [1.0, 3.0], 3)


def test_goals_are_for_loads_that_they_were_made_for():
    loads = ("thin/5/prefill/pinned", "thin/5/decode/pinned", "thin/5/prefill/unpinned", "smollm2/4/prefill/pinned")
    cells = [cell(sink, 1, 1.0, rate_share=0.1) | {"load": load} for load in loads for sink in ("slow", "file", "vllm")]
    found = {(r["load"], r["sink"], r["goal"]) for r in engine_report.ratios(cells) if r["goal"]}
    assert found == {
        ("thin/5/prefill/pinned", "slow", "≥ 0.95"),
        ("thin/5/prefill/pinned", "slow", "≤ 1.05"),
        ("thin/5/prefill/pinned", "file", "≥ 1.3"),
        ("thin/5/decode/pinned", "file", "≥ 1.3"),
    }


@pytest.mark.parametrize(
    ("count", "ranks"), [(1, (0, 0)), (5, (0, 4)), (6, (0, 5)), (9, (1, 7)), (15, (3, 11)), (27, (7, 19))]
)
def test_the_interval_of_a_median(count, ranks):
    """Against the sign test's tables."""
    assert engine_report.interval([*range(count)][::-1]) == list(ranks)


def test_each_window_of_a_toggled_load_has_a_switch_and_a_kind():
    assert {"thin/5/prefill/host", "smollm2/full/decode/host", "thin/5/decode/cache-files"} <= engine_loads.LOADS.keys()
    for name, load in engine_loads.LOADS.items():
        if load.toggled is not None:
            assert set(load.toggled.modes) <= engine_toggles.MODES.keys() & set(engine_loads.SINKS), name
            assert load.toggled.modes[0] == "none"


@pytest.mark.parametrize(
    ("load", "sink", "meant"),
    [
        ("thin/5/prefill/host", "taps-sink", True),
        ("thin/5/prefill/host", "taps-cache", False),  # five states are many for its little computation
        ("smollm2/4/decode/host", "taps-cache", True),
        ("smollm2/31/decode/host", "taps-cache", False),
        ("smollm2/full/decode/host", "taps-sink", False),
        ("thin/5/prefill/compiled", "taps-sink", False),  # two processes
        ("thin/5/prefill/pinned", "null-sink", True),
    ],
)
def test_goals_apply_to_their_loads_alone(load, sink, meant):
    assert engine_report.is_meant(engine_loads.LOADS[load], sink, "none") is meant


def test_names_of_ratios_are_unique():
    names = [what for what, *_ in engine_report.RATIOS]
    assert len(set(names)) == len(names)


def test_memory_and_cpu_time_are_measured_within_the_windows():
    watch = processes.Watch(os.getpid(), None)
    watch._seen = [(t, m, t / 2) for t, m in ((0, 9), (1, 5), (2, 6), (3, 99), (4, 7), (5, 8), (6, 50), (7, 60))]
    windows = [{"start": 1, "full": 1, "answered": 2, "durable": 2.5}]
    windows.append({"start": 4, "full": 4, "answered": 5, "durable": 6})
    assert watch.within(windows) == {"memory_peak": 50, "memory_growth": 1, "server_cpu_s": 1.5}
    with pytest.raises(RuntimeError, match="got none"):
        watch.within([*windows, {"start": 10, "full": 10, "answered": 11, "durable": 12}])
    # Growth until vLLM's cache is full does not count, if there are enough samples after it.
    watch._seen = [(t, min(t, 30) * 100, 0.0) for t in range(60)]
    assert watch.within([{"start": 0, "full": 31, "answered": 59, "durable": 59}])["memory_growth"] == 0
    assert watch.within([{"start": 0, "full": 58, "answered": 59, "durable": 59}])["memory_growth"] == 100


def test_an_ended_process_does_not_stop_the_measurement():
    watch = processes.Watch(os.getpid(), None)
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its status is not yet collected
    start = time.monotonic()
    with watch.looking():
        pass
    now = time.monotonic()
    zombie.wait()
    assert watch.within([{"start": start, "full": start, "answered": now, "durable": now}])["memory_peak"] > 1 << 20


def test_the_time_at_which_the_cache_is_full_is_found():
    held = [(1.0, 0), (2.0, 50), (3.0, 95), (4.0, 99), (5.0, 98)]
    assert engine_cell.full_since(held, 0.5) == 3.0
    assert engine_cell.full_since([(1.0, 0)], 0.5) == 0.5
    assert engine_cell.full_since([], 0.5) == 0.5


def test_figures_of_several_windows():
    spec = engine_cell.CellSpec("m", (1, 2), 4, 10, 8, 1, 2, seconds=1, sink="vllm")
    one = {"start": 10.0, "answered": 12.0, "durable": 13.0, "synced": 14.0, "requests": 10, "waits": [1.0, 3.0]}
    one |= {"cpu_s": {"engine": 1.0, "x": 0.5}, "held_requests_peak": 1, "held_blocks_peak": 2}
    two = one | {"start": 20.0, "answered": 22.0, "durable": 22.0, "synced": 22.0, "requests": 30, "waits": [2.0]}
    found = engine_cell.together(spec, [one, two])
    assert (found["tokens"], found["tokens_per_s"], found["tokens_per_cpu_s"]) == (320, 80.0, 160.0)
    assert (found["durable_tokens_per_s"], found["synced_tokens_per_s"], found["ttft_median"]) == (64.0, 320 / 6, 2.0)
    assert found["durable_bytes_per_s"] == 320 * 2 * 4 * 2 / 6  # vLLM's own: until it is on the disk
    assert [w["tokens_per_s"] for w in found["each"]] == [40.0, 120.0]
    for sink in ("none", "null", "null-sink"):
        assert engine_cell.together(replace(spec, sink=sink), [one])["durable_bytes_per_s"] == 0
    with pytest.raises(ValueError, match="expected answers in each window"):
        engine_cell.together(spec, [one, two | {"waits": []}])


def test_the_table_of_an_engine_lists_its_figures():
    about = {"cpu": "c", "cores": 2, "load_average": 0, "system": "s", "python": "3", "versions": {}, "commit": "abc"}
    cells = [cell("null", 1, 1000.0, 1100.0), cell("null-sink", 1, 900.0, 1100.0)]
    cells.append(cell("slow", 1, 200.0, 200.0, rate_share=0.98, growth_share=0.01))
    abouts = {"thin/5/prefill/pinned": about}
    text = engine_report.table({"about": abouts, "cells": cells, "ratios": engine_report.ratios(cells)})
    three = " | ".join(["1,000 (900–1,100)"] * 3)
    assert (
        f"| null-sink | 2 | {three} | 1,000,000 (900,000–1,100,000) | 3 | 1,024 (+0) | 10.0, 2.5, 0.5 | 29% | – |"
        in text
    )
    assert "commit abc. A cell of a round: 2 windows of 20 s." in text
    of_slow = "durable bytes a second ÷ the store's rate | slow | 0.980 (0.980–0.980) |  | 2 | ≥ 0.95 | met |"
    assert f"| a store of 60 MB/s: {of_slow}" in text
    assert "| time to first token ÷ null's, median | null-sink | 0.950 (0.900–1.000) |  | 2 | ≤ 1.03 | met |" in text
    assert "| ours: null sink ÷ null, tokens/s | null-sink | 0.950 (0.900–1.000) |  | 2 | ≥ 0.97 | missed |" in text


@pytest.mark.parametrize(
    ("goal", "measured", "windows", "said"),
    [
        ("≥ 0.97", 0.98, None, "met"),
        ("≥ 0.97", 0.96, 3, "missed"),
        ("≤ 1.03", 1.02, 1, "met, one window"),
        ("≤ 1.03", 1.04, 2, "missed"),
        ("", 1.02, 1, ""),
    ],
)
def test_goals(goal, measured, windows, said):
    assert verdict(goal, measured, windows) == said
    with pytest.raises(ValueError, match="expected a goal such as"):
        verdict("> 1", 2.0)


def test_engines_that_exceed_the_memory_are_not_started(monkeypatch):
    engine.enough_memory(0)
    monkeypatch.setattr(engine, "ENGINE_BYTES", 1 << 50)
    with pytest.raises(SystemExit, match="GiB of free memory for 2 engines at once, got"):
        engine.enough_memory(2)
    sinks = engine.FULL[0][1]
    assert engine.most_engines((("thin/5/prefill/host", sinks, 1, 2),)) == 1  # one engine is toggled
    assert engine.most_engines((("thin/5/prefill/host", (), 1, 2), ("thin/5/prefill/pinned", sinks, 1, 2))) == 7


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: there is nothing to choose from")
def test_threads_that_run_elsewhere_are_found_and_pinned():
    script = """
import os, sys, threading, time
from benchmarks import processes
engine, others = sorted(os.sched_getaffinity(0))[0], sorted(os.sched_getaffinity(0))[-1]
waits = threading.Event()
stray = threading.Thread(target=waits.wait)
stray.start()
assert stray.native_id in processes.strays(engine, others)
threading.Thread(target=processes.pin, args=(engine, others), daemon=True).start()
end = time.monotonic() + 60
while processes.strays(engine, others):
    assert time.monotonic() < end
    time.sleep(0.05)
processes.check_pinned(engine, others)
os.sched_setaffinity(stray.native_id, {engine, others})  # as one does that was starting another one
while processes.strays(engine, others):
    assert time.monotonic() < end
    time.sleep(0.05)
waits.set()
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_a_file_that_is_smaller_than_its_sample_ends_the_cell(tmp_path):
    spec = engine_cell.CellSpec("m", (1,), 4, 10, 8, 1, 2, seconds=1, sink="vllm", output=str(tmp_path))
    cell = object.__new__(engine_cell.Cell)
    cell.spec, cell._files = spec, 0
    (tmp_path / "a.safetensors").write_bytes(bytes(64))
    cell.clear()
    assert cell._files == 1
    assert not list(tmp_path.iterdir())
    (tmp_path / "b.safetensors").write_bytes(bytes(63))
    with pytest.raises(RuntimeError, match="at least 64 bytes, got 63"):
        cell.clear()


@pytest.mark.parametrize("listed", [processes.LISTED, False])
def test_processes_that_a_process_started(listed, monkeypatch):
    monkeypatch.setattr(processes, "LISTED", listed)
    script = "import subprocess, sys; subprocess.run(['sh', '-c', 'echo $$; read end']) and None"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        inner = int(started.stdout.readline())
        found = set(descendants(os.getpid()))
        assert {started.pid, inner} <= found
        assert inner in descendants(started.pid)
        started.stdin.close()
    assert descendants(started.pid) == []


@pytest.mark.parametrize("name", sorted(bench.BENCHMARKS))
def test_every_stored_result_makes_rows_with_numbers(name):
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
    assert engine.SECONDS >= 20
    for pattern, sinks, rounds, windows in (*engine.SHORT, *engine.FULL):
        assert windows >= 1
        assert set(sinks) <= set(engine.SINKS)
        assert rounds >= 1
        assert fnmatch.filter(engine.LOADS, pattern)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "either --choice or --loads"),
        (["--choice", "short", "--loads", "thin*"], "either --choice or --loads"),
        (["--choice", "full", "--sinks", "file"], "expected --loads, got --choice"),
        (["--loads", "thin*", "--results", "x", "--sinks", "nope"], "got nope"),
        (["--loads", "thin*", "--results", "x", "--rounds", "0"], "at least 1"),
        (["--loads", "thin*", "--results", "x", "--windows", "0"], "at least 1"),
        (["--choice", "short", "--seconds", "0"], "at least 1"),
        (["--loads", "thin*"], "expected --results FOLDER, got none"),
        (["--choice", "short", "--profile", "x"], "expected --results FOLDER, got none"),
        (["--loads", "nope", "--results", "x"], "got 'nope'"),
        (["--loads", "thin*", "--results", "x", "--sinks", "file,file"], "each sink once"),
        (["--loads", "thin*", "--results", __file__], "expected a folder"),
        (
            ["--loads", "thin/5/*/host", "--results", "x", "--sinks", "none"],
            "expected none with loads that end in",
        ),
    ],
)
def test_the_engines_benchmark_refuses_options_that_it_would_ignore(argv, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["engine", *argv])
    with pytest.raises(SystemExit):
        engine.main()
    assert said in capsys.readouterr().err
