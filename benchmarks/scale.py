"""Cost of a run of a million samples for its driver and readers, with a thousand simulated replicas.

    .venv/bin/python -m benchmarks.scale [--rows 1000000] [--replicas 1000] [--folder DIR]

The driver, its ledger, attempt, receipts and manifest are real. The fleet is simulated: no engine, no Ray, no network.
Its replicas spend virtual time on tasks, and some die. Its writers seal parts of 16 samples, upload them in virtual
seconds, and lose some. They store real receipts in a folder. The driver's seconds are CPU time outside of the fleet.
Each stage is a separate process, so memory is measured for each stage. Writes benchmarks/results/scale.{md,json}.
"""

from __future__ import annotations

import argparse
import heapq
import io
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from hsx_dist.fleet.base import FleetEvent, ReplicaDied, ReplicaReady, TaskDone
from hsx_dist.fleet.tasks import Task, TaskResult
from hsx_dist.format.manifest import Manifest, Receipt, RowFate, SegmentProof
from hsx_dist.format.names import part_name, receipt_name
from hsx_dist.format.place import open_place
from hsx_dist.format.runs import load_manifest, take_attempt, write_complete
from hsx_dist.inputs.rows import Row
from hsx_dist.jobs.driver import Driver
from hsx_dist.jobs.input_identity import count_rows
from hsx_dist.jobs.ledger import RowLedger
from hsx_dist.observe.console import Console
from hsx_dist.observe.progress import Progress
from hsx_dist.page import Segment
from hsx_dist.reading import open_run
from hsx_dist.store import Store, open_store
from hsx_dist.writers.events import Lost
from tests.harness.runs import write_v1_run

RESULTS = Path(__file__).parent / "results"
#: An 8B model: three layers of 4096 values in bf16. ``STORED`` is stored ÷ raw bytes.
TOKEN_BYTES = 3 * 4096 * 2
STORED = 0.68
TOKENS_A_SECOND = 5000  # for each replica
SAMPLES_A_PART = 16  # 256 MiB of about a thousand tokens each
TEXT = "x" * 400

_CONTENT = Row("", 0, text=TEXT).content


def rows(n: int) -> Iterator[Row | RowFate]:
    """``n`` rows, of which every 200th is refused."""
    for i in range(n):
        if i % 200 == 199:
            yield RowFate(f"rows#{i:08d}", i, "refused", "expected text, got an empty string", 0)
        else:
            yield Row(f"conversation-{i:09d}", i, text=TEXT)


def tokens_of(row: int) -> int:
    """Tokens of a row: log-normal with a mean of about 1,000."""
    return max(16, min(int(random.Random(row).lognormvariate(6.7, 0.6)), 8192))


class SimulatedFleet:
    """Replicas and writers in virtual time. ``seconds``: CPU time spent in this class."""

    def __init__(self, store: Store, replicas: int, replicas_a_node: int = 8):
        self._folder = Path(store.url.removeprefix("file://"))
        self._random = random.Random(0)
        self._now = 0.0
        self._order = count()
        self._heap: list[tuple[float, int, Callable[[], list[FleetEvent]]]] = []
        self._numbers = count()
        self._start = replicas
        self._nodes = [_Node(n) for n in range(max(replicas // replicas_a_node, 1))]
        self._node_of: dict[int, _Node] = {}
        self.seconds = 0.0
        self.deaths = self.lost_parts = 0

    def start(self) -> None:
        for i in range(self._start):
            self._start_replica(self._nodes[i % len(self._nodes)], self._random.uniform(0, 30))

    def submit(self, replica: int, task: Task) -> None:
        began = time.process_time()
        tokens = [tokens_of(row.row) for row in task.rows]
        took = sum(tokens) / TOKENS_A_SECOND * self._random.uniform(0.8, 1.3)
        if self._random.random() < 5e-4:
            self._after(took * self._random.random(), lambda: self._die(replica, blameless=self._random.random() < 0.5))
        else:
            self._after(took, lambda: self._done(replica, task, tokens))
        self.seconds += time.process_time() - began

    def poll(self, timeout: float) -> list[FleetEvent]:
        began = time.process_time()
        self._now = max(self._now, self._heap[0][0] if self._heap else 0.0)
        events = self._until(self._now + timeout)
        self.seconds += time.process_time() - began
        return events

    def waits_for(self) -> str:
        return "nothing"

    def flush(
        self,
        timeout: float | None = None,  # noqa: ARG002
        *,
        hurry: Callable[[], bool] | None = None,  # noqa: ARG002
    ) -> list[FleetEvent]:
        began = time.process_time()
        for node in self._nodes:
            self._seal(node)
        events = self._until(float("inf"))
        self.seconds += time.process_time() - began
        return events

    def close(self, *, quickly: bool = False) -> None:
        pass

    def _after(self, seconds: float, what: Callable[[], list[FleetEvent]]) -> None:
        heapq.heappush(self._heap, (self._now + seconds, next(self._order), what))

    def _until(self, end: float) -> list[FleetEvent]:
        events: list[FleetEvent] = []
        while self._heap and self._heap[0][0] <= end:
            self._now, _, what = heapq.heappop(self._heap)
            events += what()
        return events

    def _start_replica(self, node: _Node, seconds: float) -> None:
        number = next(self._numbers)
        self._node_of[number] = node
        self._after(seconds, lambda: [ReplicaReady(number)])

    def _die(self, replica: int, *, blameless: bool) -> list[FleetEvent]:
        node = self._node_of.pop(replica, None)
        if node is None:
            return []
        self.deaths += 1
        self._start_replica(node, 60.0)
        return [ReplicaDied(replica, "simulated", blameless=blameless)]

    def _done(self, replica: int, task: Task, tokens: list[int]) -> list[FleetEvent]:
        node = self._node_of.get(replica)
        if node is None:
            return []  # the replica died meanwhile
        for row, n in zip(task.rows, tokens, strict=True):
            node.open.append((row.key, row.row, n))
            if len(node.open) >= SAMPLES_A_PART:
                self._seal(node)
        result = TaskResult(task.number, shipped=[row.key for row in task.rows], tokens=sum(tokens))
        return [TaskDone(replica, result)]

    def _seal(self, node: _Node) -> None:
        part, node.open = node.open, []
        if part:
            self._after(self._random.uniform(1, 5), lambda: self._stored(node, part))

    def _stored(self, node: _Node, part: list[tuple[str, int, int]]) -> list[FleetEvent]:
        if self._random.random() < 1e-3:
            self.lost_parts += 1
            return [Lost(tuple(Segment(key, 0, 0, n, n) for key, _, n in part), "simulated")]
        node.seq += 1
        proofs = tuple(
            SegmentProof(
                Segment(key, 0, 0, n, n),
                slot,
                f"{row:016x}",
                n * TOKEN_BYTES,
                int(n * TOKEN_BYTES * STORED),
                row,
                f"{row:016x}",
                content=_CONTENT,
            )
            for slot, (key, row, n) in enumerate(part)
        )
        raw = sum(p.raw_bytes for p in proofs)
        writer = f"n{node.number}w0-00000000"
        name = part_name(1, writer, node.seq)
        size = sum(p.stored_bytes for p in proofs)
        receipt = Receipt(1, writer, node.seq, name, size, "00000000", 4096, raw, proofs, (), "2026-01-01T00:00:00")
        # Not through the store, which would sync the disk 60,000 times.
        path = self._folder / receipt_name(1, writer, node.seq)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(receipt.to_json())
        return [receipt]


class _Node:
    """A node's writer."""

    def __init__(self, number: int):
        self.number = number
        self.open: list[tuple[str, int, int]] = []
        self.seq = 0


def resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Clock:
    """Wall and CPU seconds since the last lap. They differ on a shared machine."""

    def __init__(self) -> None:
        self._last = time.perf_counter(), time.process_time()

    def lap(self) -> dict[str, float]:
        now = time.perf_counter(), time.process_time()
        (wall, cpu), self._last = self._last, now
        return {"wall": now[0] - wall, "cpu": now[1] - cpu}


class Watched(Progress):
    """Records the driver's memory while rows are stored."""

    def __init__(self, total: int, *, points: int = 10):
        super().__init__(total, console=Console(file=io.StringIO()))
        self.every = total // points
        self.memory: list[tuple[int, int]] = [(0, resident())]

    def stored(self, *, rows: int, raw_bytes: int, stored_bytes: int) -> None:
        super().stored(rows=rows, raw_bytes=raw_bytes, stored_bytes=stored_bytes)
        if self.rows // self.every > self.memory[-1][0] // self.every:
            self.memory.append((self.rows, resident()))


def drive(store: Store, n: int, replicas: int) -> dict[str, Any]:
    """A whole run by the real driver."""
    write_v1_run(store, {})
    attempt = take_attempt(store, {})
    fleet, manifest, progress = SimulatedFleet(store, replicas), Manifest(), Watched(n)
    driver = Driver(fleet, manifest, RowLedger(store, attempt, manifest), progress, task_rows=64, max_tries=3)
    began = time.process_time()
    driver.run(rows(n))
    seconds = time.process_time() - began - fleet.seconds
    assert len(manifest.samples) + len(manifest.refused) == n, "a row was lost"
    (first, low), (last, high) = progress.memory[len(progress.memory) // 4], progress.memory[-1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {
        "rows_a_second": n / seconds,
        "virtual_rows_a_second": n / fleet._now,
        "memory": progress.memory,
        "bytes_a_row": (high - low) / (last - first),
        "peak_bytes": peak,
        "receipts": len(manifest.receipts),
        "retries": progress.retries,
        "deaths": fleet.deaths,
        "lost_parts": fleet.lost_parts,
    }


def resume(store: Store, n: int) -> dict[str, Any]:
    """Work before the first task of a resumed run: load the receipts, and compare every input row with them."""
    base = resident()
    clock = Clock()
    manifest = load_manifest(store)
    loaded = clock.lap()
    held = resident() - base
    total, todo = count_rows(open_place(store), lambda: rows(n), manifest)
    assert (total, todo) == (n, 0)
    return {"load": loaded, "count": clock.lap(), "bytes_a_sample": held / n}


def complete(store: Store, n: int) -> dict[str, Any]:
    manifest = load_manifest(store)
    clock = Clock()
    write_complete(store, 1, manifest, {"rows": n})
    took = clock.lap()
    (size,) = (info.size for info in store.list("manifest/") if info.name.startswith("manifest/compacted-"))
    return {"write": took, "compacted_bytes": size}


def open_it(store: Store, n: int) -> dict[str, Any]:
    """A reader of the complete run: open, list the keys, look one up."""
    base = resident()
    clock = Clock()
    run = open_run(store.url)
    opened = clock.lap()
    held = resident() - base
    keys = run.keys()
    listed = clock.lap()
    some = keys[:: max(n // 10_000, 1)]
    for key in some:
        assert key in run
    return {
        "open": opened,
        "keys": listed,
        "look_up_microseconds": clock.lap()["cpu"] / len(some) * 1e6,
        "bytes_a_sample": held / len(keys),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


STAGES: dict[str, Callable[[Store, int], dict[str, Any]]] = {"resume": resume, "complete": complete, "open": open_it}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--folder", help="folder for receipts (default: a temporary folder)")
    parser.add_argument("--stage", choices=["drive", *STAGES], help="run one stage and print its figures")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    args = parser.parse_args()
    if args.stage is not None:
        store = open_store(args.folder)
        found = (
            drive(store, args.rows, args.replicas) if args.stage == "drive" else STAGES[args.stage](store, args.rows)
        )
        print(json.dumps(found))
        return
    about = provenance("numpy", "zstandard")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        figures = {stage: run_stage(stage, folder, args) for stage in ("drive", *STAGES)}
    result = {"about": about, "rows": args.rows, "replicas": args.replicas, **figures}
    (args.results / "scale.json").write_text(json.dumps(result, indent=1) + "\n")
    text = table(result)
    (args.results / "scale.md").write_text(text)
    print(text)


def run_stage(stage: str, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    argv = [sys.executable, "-m", "benchmarks.scale", "--stage", stage, "--folder", folder]
    argv += ["--rows", str(args.rows), "--replicas", str(args.replicas)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{stage}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def table(r: dict[str, Any]) -> str:
    a, d = r["about"], r["drive"]
    needed = r["replicas"] * TOKENS_A_SECOND / 1000
    mib = 1 << 20

    def took(lap: dict[str, float]) -> str:
        return f"{lap['wall']:.1f} s, {lap['cpu']:.1f} s of CPU"

    memory = ", ".join(f"{size / mib:.0f} MiB at {n:,}" for n, size in d["memory"][:: max(len(d["memory"]) // 4, 1)])
    return f"""# A million samples, a thousand replicas

{a["cpu"]}, {a["cores"]} cores, load {a["load_average"]}; {a["system"]}, Python {a["python"]}, numpy \
{a["versions"]["numpy"]}; commit {a["commit"]}. Made by `python -m benchmarks.scale --rows {r["rows"]} --replicas \
{r["replicas"]}`.

Driver, ledger, receipts and manifest are real. Replicas, writers and their delays are simulated, and their time does
not count. The driver's time is CPU time. {r["rows"]:,} rows (half a percent refused), {d["receipts"]:,} receipts on a
local disk, {d["deaths"]} dead replicas, {d["lost_parts"]} lost parts, {d["retries"]:,} retried rows. No row is missing
at the end.

| | |
|---|---:|
| driver: rows a second of CPU time | {d["rows_a_second"]:,.0f} |
| … needed by {r["replicas"]:,} replicas of {TOKENS_A_SECOND:,} tokens/s, at 1,000 tokens a row | {needed:,.0f} |
| driver's memory | {memory} |
| … bytes a row | {d["bytes_a_row"]:.0f} |
| resume: read all receipts | {took(r["resume"]["load"])} |
| resume: compare every input row | {took(r["resume"]["count"])} |
| manifest in memory, bytes a sample | {r["resume"]["bytes_a_sample"]:.0f} |
| complete: write the compacted manifest | {took(r["complete"]["write"])}, \
{r["complete"]["compacted_bytes"] / mib:.0f} MiB |
| reader: open the complete run | {took(r["open"]["open"])} |
| … list its keys in the order of the rows | {took(r["open"]["keys"])} |
| … look up one key | {r["open"]["look_up_microseconds"]:.1f} µs |
| … peak memory | {r["open"]["peak_bytes"] / mib:.0f} MiB |
"""


if __name__ == "__main__":
    main()
