"""What ``benchmarks.engine`` found: ratios of windows of the same turn, and tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.engine_loads import (
    BOUND,
    DIRECT,
    FILES,
    KINDS,
    LOADS,
    SERVED,
    SINKS,
    STORING,
    STRANGERS,
    TAPS,
    WRITTEN,
    Load,
)
from benchmarks.goals import verdict

#: (what, figure, of which sinks, against what, goal); against nothing the figure itself is told. Goals are for engines
#: that have a core of their own, and stores that keep up; against vLLM's own for the thin model alone, whose bytes a
#: second are those on a GPU. Where a store does not keep up, throughput is its own, and nothing may grow but what fills
#: the ring. The engine's CPU time leaves out what others of the machine take from it, what its thread waits (for the
#: interpreter's lock, or for the store), and copies, which run on a thread of their own.
RATIOS: tuple[tuple[str, str, tuple[str, ...], str, str], ...] = (
    ("vLLM's own path: null ÷ none, tokens/s", "tokens_per_s", ("null",), "none", ""),
    ("vLLM's own path: null ÷ none, by CPU time", "tokens_per_cpu_s", ("null",), "none", ""),
    ("ours, durable ÷ no extraction, tokens/s", "tokens_per_s", STORING, "none", ""),
    ("ours, durable ÷ no extraction, until all is durable", "durable_tokens_per_s", STORING, "none", ""),
    ("direct: durable ÷ no extraction, tokens/s", "tokens_per_s", ("direct",), "none", ""),
    ("direct: durable ÷ no extraction, until all is durable", "durable_tokens_per_s", ("direct",), "none", ""),
    ("vLLM's own ÷ no extraction, tokens/s", "tokens_per_s", ("vllm",), "none", ""),
    ("vLLM's own ÷ no extraction, until all is on the disk", "synced_tokens_per_s", ("vllm",), "none", ""),
    ("ours: null sink ÷ null, tokens/s", "tokens_per_s", ("null-sink",), "null", "≥ 0.97"),
    ("ours: null sink ÷ null, by CPU time", "tokens_per_cpu_s", ("null-sink",), "null", ""),
    ("direct: null sink ÷ null, tokens/s", "tokens_per_s", ("direct-sink",), "null", "≥ 0.97"),
    ("direct: null sink ÷ null, by CPU time", "tokens_per_cpu_s", ("direct-sink",), "null", ""),
    ("null sink beside a stranger ÷ alone, tokens/s", "tokens_per_s", tuple(STRANGERS), "null-sink", ""),
    ("null sink beside a stranger ÷ alone, by CPU time", "tokens_per_cpu_s", tuple(STRANGERS), "null-sink", ""),
    ("durable ÷ null sink, tokens/s", "tokens_per_s", STORING, "null-sink", "≥ 0.97"),
    ("durable ÷ null sink, by CPU time", "tokens_per_cpu_s", STORING, "null-sink", ""),
    ("durable ÷ null sink, until all is durable", "durable_tokens_per_s", STORING, "null-sink", ""),
    ("durable ÷ null sink beside a stranger that copies, tokens/s", "tokens_per_s", STORING, "busy", ""),
    ("a server ÷ null sink beside a stranger that sends, tokens/s", "tokens_per_s", SERVED, "traffic", ""),
    ("files ÷ null sink beside a stranger that writes files, tokens/s", "tokens_per_s", WRITTEN, "disk", ""),
    ("direct: durable ÷ null sink, tokens/s", "tokens_per_s", ("direct",), "direct-sink", "≥ 0.97"),
    ("direct: durable ÷ null sink, by CPU time", "tokens_per_cpu_s", ("direct",), "direct-sink", ""),
    ("direct: durable ÷ null sink, until all is durable", "durable_tokens_per_s", ("direct",), "direct-sink", ""),
    ("direct: into the cache alone ÷ nothing captured, tokens/s", "tokens_per_s", ("direct-cache",), "none", ""),
    ("direct: into the cache alone ÷ nothing captured, by CPU time", "tokens_per_cpu_s", ("direct-cache",), "none", ""),
    ("taps: requests that do not ask ÷ nothing captured, tokens/s", "tokens_per_s", ("taps-cache",), "none", "≥ 0.98"),
    ("taps: requests that do not ask ÷ nothing captured, by CPU time", "tokens_per_cpu_s", ("taps-cache",), "none", ""),
    ("taps: to host memory ÷ nothing captured, tokens/s", "tokens_per_s", ("taps-sink",), "none", "≥ 0.95"),
    ("taps: to host memory ÷ nothing captured, by CPU time", "tokens_per_cpu_s", ("taps-sink",), "none", ""),
    ("taps: to host memory ÷ vLLM's extraction alone, tokens/s", "tokens_per_s", ("taps-sink",), "null", "≥ 1.0"),
    ("taps: durable ÷ nothing captured, tokens/s", "tokens_per_s", ("taps",), "none", "≥ 0.9"),
    ("taps: durable ÷ nothing captured, by CPU time", "tokens_per_cpu_s", ("taps",), "none", ""),
    ("taps: durable ÷ nothing captured, until all is durable", "durable_tokens_per_s", ("taps",), "none", ""),
    ("taps: time to first token ÷ without capture, median", "ttft_median", ("taps-sink", "taps"), "none", ""),
    ("SeaweedFS on the writers' core ÷ null sink, tokens/s", "tokens_per_s", ("seaweedfs",), "null-sink", ""),
    ("a store of 60 MB/s: durable bytes a second ÷ its own", "rate_share", ("slow",), "", "≥ 0.95"),
    ("a store of 60 MB/s: that it takes no more", "rate_share", ("slow",), "", "≤ 1.05"),
    ("a store of 60 MB/s: answers, once the cache is full ÷ its own", "answers_share", ("slow",), "", "≤ 1.1"),
    ("more to encode than the writers' core can: its share of that core", "core_share", ("zstd",), "", "≥ 0.9"),
    ("store or core the limit: memory's growth ÷ bytes that may be in flight", "growth_share", BOUND, "", "≤ 0.1"),
    ("durable ÷ vLLM's own, until all is written", "durable_tokens_per_s", FILES, "vllm", "≥ 1.3"),
    ("durable ÷ vLLM's own, until all is on the disk", "synced_tokens_per_s", FILES, "vllm", ""),
    ("time to first token ÷ null's, median", "ttft_median", ("null-sink", *STORING, *DIRECT), "null", "≤ 1.03"),
    ("vLLM's own: time to first token ÷ null's, median", "ttft_median", ("vllm",), "null", ""),
)  # fmt: skip


def ratios(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every load, the medians of the ratios of windows of the same turn."""
    by = {(c["load"], c["sink"], c["round"]): c for c in cells}
    found = []
    for load in dict.fromkeys(c["load"] for c in cells):
        turns = sorted({c["round"] for c in cells if c["load"] == load})
        for what, figure, sinks, against, goal in RATIOS:
            for sink in sinks:
                pairs = [(by.get((load, sink, t)), by.get((load, against, t))) for t in turns]
                both = [w for a, b in pairs if a and b for w in zip(a["each"], b["each"], strict=True)]
                values = [ours[figure] / theirs[figure] for ours, theirs in both]
                count = len(values)
                if not against:
                    whole = [a for a, _ in pairs if a and figure in a]
                    values, count = [a[figure] for a in whole], sum(a["windows"] for a in whole)
                if values:
                    found.append(
                        {
                            "load": load,
                            "what": what,
                            "sink": sink,
                            "goal": goal if is_meant(LOADS[load], sink, against) else "",
                            "median": statistics.median(values),
                            "range": [min(values), max(values)],
                            "interval": interval(values),
                            "pairs": count,
                        }
                    )
    return found


def interval(values: Sequence[float]) -> list[float]:
    """Of the median, by order statistics: with 95 % from six values on; with fewer, all that was seen."""
    ordered, below, k = sorted(values), 0.0, 0
    while (below := below + math.comb(len(ordered), k) / 2 ** len(ordered)) <= 0.025:
        k += 1
    k = max(k - 1, 0)
    return [ordered[k], ordered[-1 - k]]


def is_meant(load: Load, sink: str, against: str) -> bool:
    """Whether goals are meant for it."""
    if sink == "taps-cache":  # requests that do not ask, where little is captured for what the model computes
        return load.toggled is not None and not load.gpu_like and load.points in ("", "qkvz") and len(load.layers) < 5
    if sink in TAPS:  # two processes differ by more than a goal; and what all points of a model cost is no promise
        return load.toggled is not None and load.points != "full"
    if sink in BOUND:
        # Of the others' states all that is made is less than the store takes, or not much more.
        return load.pinned and load.gpu_like and load.phase == "prefill"
    return load.pinned and (against != "vllm" or load.gpu_like)


def busy(cell: dict[str, Any]) -> float:
    """The share of one core that everything beside the engine's own threads took."""
    others = sum(s for name, s in cell["cpu_s"].items() if name != "engine") + cell["server_cpu_s"]
    return float(others / cell["durable_s"])


def line(cell: dict[str, Any]) -> str:
    return (
        f"{cell['load']} {cell['sink']} round {cell['round']}: {cell['tokens_per_s']:,.0f} tokens/s, until durable "
        f"{cell['durable_tokens_per_s']:,.0f}, first token {cell['ttft_median'] * 1e3:.0f} ms, "
        f"{cell['durable_bytes_per_s'] / 1e6:.0f} MB/s, others' core {busy(cell):.0%}"
    )


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    middle = format(statistics.median(values), form)
    return middle if len(values) == 1 else f"{middle} ({format(min(values), form)}–{format(max(values), form)})"


def stored(sink: str, rows: Sequence[dict[str, Any]]) -> str:
    """MB/s that are durable, of sinks that store."""
    return spread([r["durable_bytes_per_s"] / 1e6 for r in rows]) if KINDS.get(sink) in (None, "vllm") else "–"


def bounds(ratio: dict[str, Any]) -> str:
    """The median's interval, where there are enough pairs for one."""
    return "–".join(f"{v:.3f}" for v in ratio["interval"]) if ratio["pairs"] > 5 and "interval" in ratio else ""


def table(found: dict[str, Any]) -> str:
    """As Markdown."""
    cells = found["cells"]
    lines = [
        "# What extraction costs an engine",
        "",
        "Made by `python -m benchmarks.engine`, which says what the sinks are. Figures are medians (least–most) of "
        "windows, ratios of pairs of windows of one turn. What a model computes on a CPU is no measure of a GPU; "
        "ratios within a load are. By the engine's CPU time: that of its own thread, so without our copies, which "
        "have a thread, and with those of vLLM's own connector, which are within the step on a CPU (it has no "
        "streams). Durable is what is on the disk or with the server, of vLLM's own as well, which leaves that to "
        "the kernel: its files are synced. Blocks held: requests that are held, times the blocks of one. Host memory: "
        "its growth from the first half of a window to the second. Others' core: the share of one that all but the "
        "engine's own threads took, the server among them. Strangers: `busy`, `traffic`, `disk`; direct: with "
        "`cache_writes: direct`. vLLM's own is subclassed on a CPU: pinned memory and streams are plain ones, it takes "
        "the layout that there is, and, as ours, it verifies no drafts. Cells take their windows in the order of the "
        "command, then backwards: what is compared may lie some windows apart. Pairs of one round are of the same two "
        "processes, which differ as long as they live: the range of few rounds is narrower than what is known. Loads "
        "that end in `host`, `files` and `cache-files` are of one engine whose captures are switched on and off "
        "between windows. Intervals are of the median, with 95 %, and take windows as independent.",
        "",
    ]
    for load in dict.fromkeys(c["load"] for c in cells):
        a = found["about"][load]
        spans = {(c["windows"], c["window_s"]) for c in cells if c["load"] == load}
        windows = " or ".join(f"{count} window{'s' * (count > 1)} of {span:g} s" for count, span in sorted(spans))
        lines += [
            f"## {load}",
            "",
            f"{a['cpu']}, {a['cores']} cores, load before {a['load_average']}; {a['system']}, Python {a['python']}; "
            + ", ".join(f"{k} {v}" for k, v in a["versions"].items())
            + f"; commit {a['commit']}. A cell of a round: {windows}.",
            "",
            "| sink | windows | tokens/s until the last answer | by the engine's CPU s "
            "| until the last sample is durable | first token, ms "
            "| hidden-state cache blocks held, most | host memory, most (growth), MiB "
            "| CPU s a window: engine, writers, server | others' core | durable MB/s |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for sink in SINKS:
            rows = [c for c in cells if c["load"] == load and c["sink"] == sink]
            if not rows:
                continue
            mib = 1 << 20
            each = [w for r in rows for w in r["each"]]
            engine = [r["cpu_s"]["engine"] / r["windows"] for r in rows]
            writers = [sum(s for n, s in r["cpu_s"].items() if n != "engine") / r["windows"] for r in rows]
            server = [r["server_cpu_s"] / r["windows"] for r in rows]
            lines.append(
                f"| {sink} | {len(each)} | {spread([w['tokens_per_s'] for w in each])} "
                f"| {spread([w['tokens_per_cpu_s'] for w in each])} "
                f"| {spread([w['synced_tokens_per_s' if sink == 'vllm' else 'durable_tokens_per_s'] for w in each])} "
                f"| {spread([w['ttft_median'] * 1e3 for w in each])} "
                f"| {max(r['held_blocks_peak'] for r in rows)} "
                f"| {max(r['memory_peak'] for r in rows) / mib:,.0f} "
                f"({max(r['memory_growth'] for r in rows) / mib:+,.0f}) "
                f"| {statistics.median(engine):.1f}, {statistics.median(writers):.1f}, {statistics.median(server):.1f} "
                f"| {statistics.median(busy(r) for r in rows):.0%} "
                f"| {stored(sink, rows)} |"
            )
        lines += [
            "",
            "| ratio | sink | median (range) | its interval | pairs | goal | |",
            "|---|---|---|---|---:|---|---|",
        ]
        lines += [
            f"| {r['what']} | {r['sink']} | {r['median']:.3f} ({r['range'][0]:.3f}–{r['range'][1]:.3f}) "
            f"| {bounds(r)} "
            f"| {r['pairs']} | {r['goal']} | {verdict(r['goal'], r['median'], r['pairs'])} |"
            for r in found["ratios"]
            if r["load"] == load
        ]
        lines.append("")
    return "\n".join(lines)
