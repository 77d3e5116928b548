"""Copies of finished requests' states from a GPU's cache to the host: ours, vLLM's reference, and the bus's limit.

    python -m benchmarks.gpu.copies [--rounds 5] [--results FOLDER]

Needs torch and a CUDA device; without a device the result says that nothing was measured. The three ways take turns.
Figures are medians of ratios within a round. Also measured: how much a concurrent matrix product slows down, and the
device memory of each way beyond the cache. ``page_us`` is the time of one of our pages. ``page_host_us`` is the part
that the steps' thread takes to start its copy. Writes benchmarks/results/gpu.{md,json}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.ways import BLOCK, Cache, Shape, Ways
from benchmarks.provenance import provenance

RESULTS = Path(__file__).parents[1] / "results"
#: (model, states, hidden size, tensor parallel size, tokens of a request).
MODELS = (
    ("Qwen3-4B", 37, 2560, 1, (512, 8192)),
    ("Llama-8B", 33, 4096, 1, (512, 8192)),
    ("Llama-8B, 4 layers", 4, 4096, 1, (512, 8192, 65536)),
    ("Llama-70B", 81, 8192, 8, (512, 4096)),
    ("Llama-70B, 4 layers", 4, 8192, 8, (512, 8192, 65536)),
)
RING_BYTES = 128 << 20
#: Least bytes to copy in one measurement.
LEAST_BYTES = 2 << 30
MIB = 1 << 20
#: (figure, goal, whether more is better)
GOALS = (
    ("of_limit", 0.9, True),
    ("over_reference", 2.0, True),
    ("product_slowed", 0.03, False),
    ("device_mib", 64, False),
)


def shapes() -> list[Shape]:
    return [
        Shape(model, layers, hidden, tokens, order, tp)
        for model, layers, hidden, tp, lengths in MODELS
        for tokens in lengths
        for order in ("LTH", "TLH")  # type: ignore[misc]
    ]


def measure(shape: Shape, device: torch.device, rounds: int, least_bytes: int = LEAST_BYTES) -> dict[str, Any]:
    """Figures of one shape: rates, ratios and device memory."""
    torch.manual_seed(0)
    cache = Cache(shape, max(shape.blocks + shape.blocks // 4, 512 * MIB // shape.block_bytes + 1), device)
    with closing(Ways(cache, RING_BYTES)) as ways:
        return _measure(ways, rounds, least_bytes)


def _measure(ways: Ways, rounds: int, least_bytes: int) -> dict[str, Any]:
    cache, shape, device = ways.cache, ways.cache.shape, ways.cache.device
    count = max(1, -(-least_bytes // shape.request_bytes))
    nbytes = count * shape.request_bytes
    names: dict[str, Callable[[list[torch.Tensor]], Any]] = {
        "ours": ways.ours,
        "reference": ways.reference,
        "limit": lambda _: ways.limit(nbytes),
    }
    seconds: dict[str, list[float]] = {name: [] for name in names}
    memory: dict[str, float] = {}
    host = pages = 0.0
    for turn in range(rounds + 1):
        if turn == 1:
            host, pages = ways.host_seconds
        for name, way in names.items():
            requests = list(cache.requests(count))
            base = reset_peak(device)
            before = time.perf_counter()
            way(requests)
            if turn:  # the first round warms up
                seconds[name].append(time.perf_counter() - before)
            memory[name] = max(memory.get(name, 0.0), peak(device) - base)

    host, pages = (now - before for now, before in zip(ways.host_seconds, (host, pages), strict=True))

    def ratios(a: str, b: str) -> list[float]:
        return [x / y for x, y in zip(seconds[a], seconds[b], strict=True)]

    found: dict[str, Any] = {
        "model": shape.model,
        "layers": shape.layers,
        "hidden": shape.hidden,
        "tp": shape.tp,
        "tokens": shape.tokens,
        "order": shape.order,
        "block": BLOCK,
        "gb_per_s": {name: nbytes / statistics.median(s) / 1e9 for name, s in seconds.items()},
        "of_limit": statistics.median(ratios("limit", "ours")),
        "over_reference": statistics.median(ratios("reference", "ours")),
        "page_us": sum(seconds["ours"]) / pages * 1e6,
        "page_host_us": host / pages * 1e6,
        "device_mib": memory["ours"] / MIB,
        "reference_device_mib": memory["reference"] / MIB,
    }
    if device.type == "cuda":
        found["product_slowed"], bytes_per_s = slowed(ways, rounds)
        found["gb_per_s"]["beside the product"] = bytes_per_s / 1e9
    return found


def reset_peak(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def slowed(ways: Ways, rounds: int, side: int = 8192, repeats: int = 300) -> tuple[float, float]:
    """Slowdown of matrix products during copies.

    Returns:
        Median of (time during copies / time alone) - 1, and median bytes a second copied meanwhile.
    """
    a = torch.randn(side, side, dtype=torch.bfloat16, device=ways.cache.device)
    out = torch.empty_like(a)

    def products() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            torch.matmul(a, a, out=out)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    products()
    shares, speeds = [], []
    for _ in range(rounds):
        alone = products()
        with copying(ways):
            before = ways.copied_bytes
            beside = products()
            nbytes = ways.copied_bytes - before
        shares.append(beside / alone - 1)
        speeds.append(nbytes / beside)
    return statistics.median(shares), statistics.median(speeds)


@contextmanager
def copying(ways: Ways) -> Iterator[None]:
    """Copy requests in a loop on another thread. Enters after the first copy; raises that thread's errors."""
    stop, begun = threading.Event(), threading.Event()

    def copy() -> None:
        # Inference mode and current stream are thread-local. As in an engine, the stream must not wait for the product.
        with torch.inference_mode(), ways.apart():
            while not stop.is_set():
                ways.ours(list(ways.cache.requests(1)))
                begun.set()

    with ThreadPoolExecutor(1) as pool:
        copies = pool.submit(copy)
        copies.add_done_callback(lambda _: begun.set())
        begun.wait()
        try:
            if not copies.done():
                yield
        finally:
            stop.set()
        copies.result()


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    a = report["about"]
    head = ["# From a GPU's cache to the host", ""]
    where = f"{a['cpu']}; torch {a['versions']['torch']}; commit {a['commit']}. Made by `benchmarks.gpu.copies`."
    if not report["results"]:
        said = "**Not measured on a GPU**: this machine has no CUDA device. The tests run this code on a CPU."
        return "\n".join([*head, where, "", said, ""])
    lines = [
        *head,
        f"{report['device']}; {where}",
        "",
        "Goals: ≥ 0.9 of the pinned copy's limit, ≥ 2 times the reference's speed, a matrix product slowed by ≤ 3 %, "
        "≤ 64 MiB of device memory beyond the cache. A row is one rank on one device. Under tensor parallelism (TP) "
        "every rank has all the states, and copies each TP-th request whole.",
        "",
        "| model | TP | states | tokens | cache | ours, GB/s | of the limit | × reference "
        "| product slowed | copied meanwhile, GB/s "
        "| device MiB (reference's) |",
        "|---|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r['model']} | {r['tp']} | {r['layers']} × {r['hidden']} | {r['tokens']:,} "
        f"| {'layer' if r['order'] == 'LTH' else 'token'}-major | {r['gb_per_s']['ours']:.1f} | {r['of_limit']:.2f} "
        f"| {r['over_reference']:.2f} | {r['product_slowed']:.1%} | {r['gb_per_s']['beside the product']:.1f} "
        f"| {r['device_mib']:.0f} ({r['reference_device_mib']:,.0f}) |"
        for r in report["results"]
    ]
    lines.append("")
    for figure, goal, more in GOALS:
        values = [r[figure] for r in report["results"]]
        met = min(values) >= goal if more else max(values) <= goal
        lines.append(f"- {figure}: {min(values):.3g} to {max(values):.3g}, goal {goal}: {'met' if met else 'missed'}.")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {args.rounds}")
    report: dict[str, Any] = {"about": provenance("torch"), "rounds": args.rounds, "device": None, "results": []}
    report["about"]["versions"]["torch"] = torch.__version__  # torch built from source has no package metadata
    if torch.cuda.is_available():
        device = torch.device("cuda")
        report["device"] = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
        with torch.inference_mode():
            for shape in shapes():
                report["results"].append(measure(shape, device, args.rounds))
                torch.cuda.empty_cache()
                print(json.dumps(report["results"][-1]), flush=True)
                write(args.results, report)  # a later crash loses no figures
    write(args.results, report)
    print(table(report))


def write(results: Path, report: dict[str, Any]) -> None:
    results.mkdir(parents=True, exist_ok=True)
    (results / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    (results / "gpu.md").write_text(table(report))


if __name__ == "__main__":
    main()
