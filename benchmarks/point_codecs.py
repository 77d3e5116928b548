"""Stored size and speed of the lossless codecs for each point.

    .venv/bin/python -m benchmarks.point_codecs [--tokens 6000] [--rounds 7]

Rows of SmolLM2-135M-Instruct in an early, a middle and the last layer, from transformers' modules in float32, rounded
to bfloat16. The router's points come from a random mixture of experts, so its ids are as hard to compress as possible.
Writes benchmarks/results/point_codecs.md.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.codec import RESULTS, chunks_of, ratio
from benchmarks.provenance import provenance
from benchmarks.states import distinct_prompts
from hsx_dist.format.codecs import Codec, SplitCodec, ZstdCodec, codec_for
from hsx_dist.format.codecs.base import encode_into
from hsx_dist.models.builtin import smollm2
from hsx_dist.page import CARRIER
from hsx_dist.taps.points import POINTS
from tests.harness.hooked_model import HookedModel, tiny_model

LAYERS = (2, 15, 29)
ROUTER = ("router_logits", "topk_ids", "topk_weights")
CODECS: dict[str, Codec] = {"zstd": ZstdCodec(1), "split": SplitCodec()}


def rows_of(hooked: HookedModel, prompts: Iterable[Sequence[int]], tokens: int) -> dict[str, torch.Tensor]:
    """Rows ``[layers, tokens, width]`` of each point."""
    found: dict[str, list[torch.Tensor]] = {}
    have = 0
    for ids in prompts:
        rows = hooked.rows(ids)
        for name, point in POINTS.items():
            layers = [k for k in (LAYERS if point.per_layer else (0,)) if (name, k) in rows]
            if layers:
                found.setdefault(name, []).append(torch.stack([rows[name, k] for k in layers]))
        have += len(ids)
        if have >= tokens:
            break
    return {name: torch.cat(parts, 1)[:, :tokens] for name, parts in found.items()}


def in_dtype(name: str, rows: torch.Tensor) -> tuple[str, np.ndarray[Any, Any]]:
    """The point's dtype in an engine of bfloat16, and the rows in that dtype's carrier."""
    dtype = POINTS[name].dtype or "bfloat16"
    data = rows.to(getattr(torch, dtype)).contiguous().view(torch.uint8).numpy()
    return dtype, data.view(CARRIER[dtype])


def measured(codec: Codec, chunks: Sequence[np.ndarray[Any, Any]], dtype: str, rounds: int) -> tuple[float, float]:
    """The ratio, and the median over rounds of MB/s of input while encoding."""
    room = np.empty(2 * chunks[0].nbytes + 4096, np.uint8)
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for chunk in chunks:
            encode_into(codec, chunk, dtype, lambda n: room[:n])
        seconds.append(time.perf_counter() - begin)
    return ratio(codec, chunks, dtype), sum(c.nbytes for c in chunks) / statistics.median(seconds) / 1e6


def line(name: str, rows: torch.Tensor, rounds: int) -> str:
    dtype, data = in_dtype(name, rows)
    chunks = chunks_of(data) or [np.ascontiguousarray(layer) for layer in data]
    found = {key: measured(codec, chunks, dtype, rounds) for key, codec in CODECS.items()}
    stored = "zstd" if codec_for(SplitCodec(), dtype) != SplitCodec() else "split"
    cells = [f"{r:.2f} | {speed:,.0f}" for r, speed in found.values()]
    return f"| `{name}` | {dtype} | {' | '.join(cells)} | {stored} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    from transformers import AutoTokenizer

    folder = smollm2()
    prompts = distinct_prompts(AutoTokenizer.from_pretrained(folder))
    points = rows_of(HookedModel(folder), prompts, args.tokens)
    with tempfile.TemporaryDirectory() as name:
        experts = HookedModel(tiny_model("mixtral", Path(name) / "m"))
        random = np.random.default_rng(0).integers(0, 512, (args.tokens // 250, 250)).tolist()
        points |= {k: v for k, v in rows_of(experts, random, args.tokens).items() if k in ROUTER}
    lines = [line(name, points[name], args.rounds) for name in POINTS if name in points]
    about = provenance("numpy", "zstandard", "torch", "transformers")
    page = "\n".join(
        [
            "# Codecs by point",
            "",
            f"`python -m benchmarks.point_codecs`: {args.tokens:,} tokens of SmolLM2-135M-Instruct, layers {LAYERS}; a "
            "random router of 8 experts. Ratio is raw ÷ stored bytes; MB/s of input on one thread, median of "
            f"{args.rounds} rounds. {about['cpu']}, {about['cores']} cores, load {about['load_average']}, commit "
            f"{about['commit']}.",
            "",
            "| point | dtype | zstd | MB/s | split | MB/s | codec used with `codec: split` |",
            "|---|---|---:|---:|---:|---:|---|",
            *lines,
            "",
        ]
    )
    (RESULTS / "point_codecs.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
