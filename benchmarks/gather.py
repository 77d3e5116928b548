"""Gathering cache blocks into reused host buffers, compared with memcpy: ``python benchmarks/gather.py``.

A round runs each operation of a case once, in random order, on bytes that no other operation has just read. A figure is
the median, with quartiles, of (memcpy's time / the operation's time) over the rounds, so 1 is memcpy's speed. Other
load on the machine slows both sides of a ratio.

On a CPU, memcpy is libc's copy of one contiguous run of the cache into the same ring of buffers. With CUDA it is the
device's copy of one contiguous run into pinned memory. Needs only torch and ``hsx_dist.connector.gather``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # hsx_dist of this checkout, which may not be installed

from hsx_dist.connector.gather import Order, block_runs, page_shape, row_runs  # noqa: E402

#: The connector's default page, and the limit for one layer in a page (``connector/worker.py``).
PAGE_BYTES = 8 << 20
LAYER_BYTES = 1 << 20
#: Sizes of the cache, far above a core's caches, and of the connector's reused ring.
CACHE_BYTES = 512 << 20
RING_BYTES = 64 << 20

DTYPE = torch.bfloat16
GOALS: dict[Order, float] = {"LTH": 0.75, "TLH": 0.5}
LAYOUTS: dict[Order, str] = {"LTH": "layer-major", "TLH": "token-major"}


@dataclass(frozen=True)
class Case:
    hidden: int
    layers: int
    block: int
    order: Order
    ids: str  # "random" or "consecutive" block ids

    @property
    def block_bytes(self) -> int:
        return self.block * self.layers * self.hidden * DTYPE.itemsize

    @property
    def page_blocks(self) -> int:
        """Blocks in a page, as in ``point_copier.CopyPlan``."""
        layer = self.block * self.hidden * DTYPE.itemsize
        return max(1, min(PAGE_BYTES // self.block_bytes, LAYER_BYTES // layer))


def cases() -> Iterator[Case]:
    for hidden, layers in ((576, 4), (576, 31), (576, 37), (4096, 4), (7168, 4)):
        for block in (16, 128):
            for order in GOALS:
                for ids in ("random", "consecutive"):
                    yield Case(hidden, layers, block, order, ids)


class Bench:
    """The cache and the ring of one case, and its operations by name."""

    def __init__(self, case: Case, device: torch.device):
        self.case, self.device = case, device
        self.blocks = CACHE_BYTES // case.block_bytes
        run = case.block * case.hidden
        size = run * case.layers
        # Written, not only reserved: the kernel maps untouched pages to one page of zeros.
        self.memory = torch.randint(-9999, 9999, (self.blocks * size,), dtype=torch.int16, device=device).view(DTYPE)
        strides = (run, case.hidden) if case.order == "LTH" else (case.hidden, case.layers * case.hidden)
        self.cache = self.memory.as_strided((self.blocks, case.layers, case.block, case.hidden), (size, *strides, 1))
        self.page = case.page_blocks * size
        self.ring = [
            torch.zeros(self.page, dtype=DTYPE, pin_memory=device.type == "cuda")
            for _ in range(max(2, RING_BYTES // (self.page * DTYPE.itemsize)))
        ]
        self.permutation = torch.randperm(self.blocks)
        self.uses = 0

    def operations(self) -> dict[str, Callable[[], Callable[[], None]]]:
        """Operations by name. Each prepares new ids and a buffer, and returns the function to time."""
        found = {"memcpy": self.memcpy, "gather": self.gather, "rows": self.rows}
        if self.case.order == "TLH":
            found["transpose"] = self.transpose
        return found

    def fresh(self) -> tuple[int, torch.Tensor]:
        """First block of a page of the cache without recent reads, and a buffer."""
        self.uses += 1
        first = self.uses * 7 * self.case.page_blocks % max(1, self.blocks - self.case.page_blocks)
        return first, self.ring[self.uses % len(self.ring)]

    def ids(self, first: int) -> torch.Tensor:
        stop = first + self.case.page_blocks
        ids = torch.arange(first, stop) if self.case.ids == "consecutive" else self.permutation[first:stop].clone()
        return ids.to(self.device)

    def memcpy(self) -> Callable[[], None]:
        first, out = self.fresh()
        start = first * self.page // self.case.page_blocks
        source = self.memory[start : start + self.page]
        if self.device.type == "cuda":
            return lambda: self.synchronised(lambda: out.copy_(source, non_blocking=True))
        return lambda: self.synchronised(
            lambda: ctypes.memmove(out.data_ptr(), source.data_ptr(), self.page * DTYPE.itemsize)
        )

    def gather(self) -> Callable[[], None]:
        """Gather a page in the cache's own order: the cost within an engine's step."""
        first, out = self.fresh()
        ids, order = self.ids(first), self.case.order
        page = out.view(page_shape(self.cache, self.case.page_blocks, order))
        return lambda: self.synchronised(lambda: block_runs(self.cache, ids, order).copy_to(page))

    def rows(self) -> Callable[[], None]:
        """Gather the same rows one by one into a layer-major page: the cost of a request for some of its tokens."""
        first, out = self.fresh()
        slots = (self.ids(first)[:, None] * self.case.block + torch.arange(self.case.block, device=self.device)).view(
            -1
        )
        page = out.view(page_shape(self.cache, self.case.page_blocks, "LTH"))
        layers = range(self.case.layers)
        return lambda: self.synchronised(lambda: row_runs(self.cache, slots, layers).copy_to(page))

    def transpose(self) -> Callable[[], None]:
        """Transpose a token-major page to layer-major on the host: a later cost, in the writer."""
        _, page = self.fresh()
        _, out = self.fresh()
        source = page.view(page_shape(self.cache, self.case.page_blocks, "TLH")).permute(1, 0, 2)
        target = out.view(page_shape(self.cache, self.case.page_blocks, "LTH"))
        return lambda: self.synchronised(lambda: target.copy_(source))

    def synchronised(self, work: Callable[[], Any]) -> None:
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(case: Case, device: torch.device, rounds: int, seed: int) -> dict[str, Any]:
    """Medians and quartiles of the ratios to memcpy, and memcpy's GB/s."""
    torch.manual_seed(seed)
    order = random.Random(seed)
    bench = Bench(case, device)
    operations = bench.operations()
    seconds: dict[str, list[float]] = {name: [] for name in operations}
    for turn in range(rounds + 3):
        names = list(operations)
        order.shuffle(names)
        for name in names:
            work = operations[name]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            work()
            if turn >= 3:  # the first rounds warm up
                seconds[name].append(time.perf_counter() - start)
    ratios = {}
    for name, times in seconds.items():
        if name == "memcpy":
            continue
        low, median, high = statistics.quantiles(
            [m / t for m, t in zip(seconds["memcpy"], times, strict=True)], n=4, method="inclusive"
        )
        ratios[name] = {"median": round(median, 3), "quartiles": [round(low, 3), round(high, 3)]}
    speed = bench.page * DTYPE.itemsize / statistics.median(seconds["memcpy"]) / 1e9
    return {
        **asdict(case),
        "page_blocks": case.page_blocks,
        "page_bytes": bench.page * DTYPE.itemsize,
        "memcpy_gb_per_s": round(speed, 2),
        "ratio_to_memcpy": ratios,
    }


def machine(device: torch.device) -> dict[str, Any]:
    """Device, CPU, versions and commit; no host names."""
    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else ""
    git = subprocess.run(
        ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": git.stdout.strip() or "unknown",
        "dtype": str(DTYPE).removeprefix("torch."),
    }


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    about = report["machine"]

    def cell(result: dict[str, Any], name: str) -> str:
        ratio = result["ratio_to_memcpy"].get(name)
        return (
            "" if ratio is None else f"{ratio['median']:.2f} ({ratio['quartiles'][0]:.2f}-{ratio['quartiles'][1]:.2f})"
        )

    lines = [
        "# Gathering cache blocks, against memcpy",
        "",
        f"{about['device']}; {about['cpu']}, {about['cores']} cores; torch {about['torch']}, one thread; "
        f"{about['dtype']}; commit {about['commit']}; {report['rounds']} rounds. Made by `benchmarks/gather.py`, whose "
        "docstring has the method. Figures are shares of memcpy's speed: median (quartiles).",
        "",
        "- `gather`: whole blocks into a page in the cache's own order. This is the cost within an engine's step. "
        f"Goal: {GOALS['LTH']} layer-major, {GOALS['TLH']} token-major.",
        "- `rows`: the same tokens one by one, into a layer-major page (`row_runs`, every layer).",
        "- `transpose`: a token-major page transposed to layer-major. This is a later cost, in the writer.",
        "",
        "| hidden | layers | block | cache | block ids | page | memcpy | gather | rows | transpose |",
        "|---:|---:|---:|---|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r['hidden']} | {r['layers']} | {r['block']} | {LAYOUTS[r['order']]} | {r['ids']} "
        f"| {r['page_bytes'] / 1e6:.1f} MB | {r['memcpy_gb_per_s']:.1f} GB/s "
        f"| {cell(r, 'gather')} | {cell(r, 'rows')} | {cell(r, 'transpose')} |"
        for r in report["results"]
    ]
    lines.append("")
    for order, goal in GOALS.items():
        ratios = [r["ratio_to_memcpy"]["gather"]["median"] for r in report["results"] if r["order"] == order]
        verdict = "met" if min(ratios) >= goal else "missed"
        lines.append(f"- {LAYOUTS[order]}: {min(ratios):.2f} to {max(ratios):.2f}, goal {goal}: {verdict}.")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="runs of each operation in each case")
    parser.add_argument("--write", action="store_true", help="write gather.md and .json")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder to write to, with --write")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    with torch.inference_mode():
        results = [measure(case, device, args.rounds, seed) for seed, case in enumerate(cases())]
    report = {"machine": machine(device), "rounds": args.rounds, "results": results}
    text = table(report)
    print(text)
    if args.write:
        name = "gather" if device.type == "cpu" else "gather-cuda"
        (args.results / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
        (args.results / f"{name}.md").write_text(text)


if __name__ == "__main__":
    main()
