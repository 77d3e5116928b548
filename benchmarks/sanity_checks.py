"""Cost of the check for bad rows in a writer: encode pages with the sink's check of every row, and without.

    .venv/bin/python -m benchmarks.sanity_checks [--tokens 6000] [--rounds 31]

Pages of real SmolLM2 states. Both variants and memcpy take turns in every round. Encoding is the codec and crc32c. The
share is the median over rounds of (time with the check / time without) - 1. Writes
benchmarks/results/sanity_checks.{md,json}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import provenance
from benchmarks.states import LAYERS, smollm2_states
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.format.container import SegmentEncoder
from hsx_dist.memory.blocks import BlockPool
from hsx_dist.page import Page, Segment
from hsx_dist.writers.sanity_checks import SanityChecks

RESULTS = Path(__file__).parent / "results"
PAGE_TOKENS = 896  # of 1152 bytes a layer: one frame of at most 1 MiB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=6_000)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    args = parser.parse_args()
    about = provenance("numpy", "zstandard", "crc32c")
    rows = []
    for dtype in ("bfloat16", "float32"):
        pages = pages_of(smollm2_states(dtype, args.tokens), dtype)
        rows += [{"dtype": dtype, "codec": c, **measure(pages, c, args.rounds)} for c in ("none", "split")]
    (args.results / "sanity_checks.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    text = table(about, rows)
    (args.results / "sanity_checks.md").write_text(text)
    print(text)


def pages_of(states: np.ndarray[Any, Any], dtype: str) -> list[Page]:
    """Layer-major pages, as the connector gathers them, of ``states`` ``[L, T, H]``."""
    pages = []
    for start in range(0, states.shape[1] - PAGE_TOKENS + 1, PAGE_TOKENS):
        data = np.ascontiguousarray(states[:, start : start + PAGE_TOKENS])
        segment = Segment(f"s{start}", 0, 0, PAGE_TOKENS, PAGE_TOKENS)
        ids = np.arange(PAGE_TOKENS, dtype=np.int64)
        pages.append(Page(segment, 0, PAGE_TOKENS, PAGE_TOKENS, LAYERS, dtype, data.shape, "LTH", ids, data))
    return pages


def measure(pages: list[Page], codec: str, rounds: int) -> dict[str, Any]:
    spare = np.empty_like(pages[0].data)
    blocks = BlockPool(1 << 30)  # as writers have

    def encode(page: Page) -> None:
        encoder = SegmentEncoder(resolve_codec(codec), blocks.take)
        encoder.add(page)
        encoder.finish()

    def encode_and_look(page: Page) -> None:
        scan = SanityChecks.empty(len(page.layer_ids))
        encoder = SegmentEncoder(resolve_codec(codec), blocks.take)
        encoder.add(page, partial(scan.look, page.dtype))
        encoder.finish()

    work: dict[str, Callable[[Page], None]] = {
        "encode": encode,
        "both": encode_and_look,
        "memcpy": lambda page: np.copyto(spare, page.data),
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    names = list(work)
    for turn in range(rounds + 1):
        for name in names[turn % 3 :] + names[: turn % 3]:
            before = time.perf_counter()
            for page in pages:
                work[name](page)
            if turn:  # the first round warms up
                seconds[name].append(time.perf_counter() - before)
    nbytes = sum(p.nbytes for p in pages)
    shares = [both / encode - 1 for both, encode in zip(seconds["both"], seconds["encode"], strict=True)]
    low, middle, high = statistics.quantiles(shares, n=4)
    return {
        **{f"{name}_gbps": nbytes / statistics.median(values) / 1e9 for name, values in seconds.items()},
        "share": middle,
        "quartiles": [low, high],
    }


def table(about: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in about["versions"].items())
    lines = [
        "# Cost of the check for bad rows",
        "",
        f"{about['cpu']}, {about['cores']} cores, load {about['load_average']}; {about['system']}, Python "
        f"{about['python']}, {versions}; commit {about['commit']}. Made by `python -m benchmarks.sanity_checks`.",
        "",
        "Time of the check for non-finite rows and all-zero layers ÷ time of encoding (codec and crc32c), on the "
        "writer's core: median (quartiles) of the ratios within a round. GB/s are medians.",
        "",
        "| dtype | codec | memcpy | encode | encode and check | added |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for r in rows:
        low, high = r["quartiles"]
        lines.append(
            f"| {r['dtype']} | {r['codec']} | {r['memcpy_gbps']:.1f} GB/s | {r['encode_gbps']:.1f} GB/s | "
            f"{r['both_gbps']:.1f} GB/s | {r['share']:.0%} ({low:.0%}-{high:.0%}) |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
