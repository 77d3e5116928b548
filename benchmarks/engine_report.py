"""Report of ``benchmarks.engine``: ratios of windows of the same turn, and tables."""

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

#: (label, figure, sinks, baseline, goal). Without a baseline the row has the figure itself.
#:
#: - Goals are for engines on a separate core, and for stores that keep up. Goals against vLLM's own connector are for
#:   the thin model only, whose bytes a second are those of a GPU.
#: - If a store does not keep up, the store's rate is the throughput, and only the ring may fill.
#: - The engine's CPU time excludes other processes, waits of its thread (for the interpreter's lock or the store), and
#:   copies, which run on another thread.
#:
#: ``benchmarks.charts`` finds rows of bench.json by these labels.
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
    ("null sink next to another process ÷ alone, tokens/s", "tokens_per_s", tuple(STRANGERS), "null-sink", ""),
    ("null sink next to another process ÷ alone, by CPU time", "tokens_per_cpu_s", tuple(STRANGERS), "null-sink", ""),
    ("durable ÷ null sink, tokens/s", "tokens_per_s", STORING, "null-sink", "≥ 0.97"),
    ("durable ÷ null sink, by CPU time", "tokens_per_cpu_s", STORING, "null-sink", ""),
    ("durable ÷ null sink, until all is durable", "durable_tokens_per_s", STORING, "null-sink", ""),
    ("durable ÷ null sink next to a process that copies memory, tokens/s", "tokens_per_s", STORING, "busy", ""),
    ("a server ÷ null sink next to a process that sends, tokens/s", "tokens_per_s", SERVED, "traffic", ""),
    ("files ÷ null sink next to a process that writes files, tokens/s", "tokens_per_s", WRITTEN, "disk", ""),
    ("direct: durable ÷ null sink, tokens/s", "tokens_per_s", ("direct",), "direct-sink", "≥ 0.97"),
    ("direct: durable ÷ null sink, by CPU time", "tokens_per_cpu_s", ("direct",), "direct-sink", ""),
    ("direct: durable ÷ null sink, until all is durable", "durable_tokens_per_s", ("direct",), "direct-sink", ""),
    ("direct: into the cache alone ÷ nothing captured, tokens/s", "tokens_per_s", ("direct-cache",), "none", ""),
    ("direct: into the cache alone ÷ nothing captured, by CPU time", "tokens_per_cpu_s", ("direct-cache",), "none", ""),
    ("taps: into the cache alone ÷ nothing captured, tokens/s", "tokens_per_s", ("taps-cache",), "none", "≥ 0.98"),
    ("taps: into the cache alone ÷ nothing captured, by CPU time", "tokens_per_cpu_s", ("taps-cache",), "none", ""),
    ("taps: to host memory ÷ nothing captured, tokens/s", "tokens_per_s", ("taps-sink",), "none", "≥ 0.95"),
    ("taps: to host memory ÷ nothing captured, by CPU time", "tokens_per_cpu_s", ("taps-sink",), "none", ""),
    ("taps: to host memory ÷ vLLM's extraction alone, tokens/s", "tokens_per_s", ("taps-sink",), "null", "≥ 1.0"),
    ("taps: durable ÷ nothing captured, tokens/s", "tokens_per_s", ("taps",), "none", "≥ 0.9"),
    ("taps: durable ÷ nothing captured, by CPU time", "tokens_per_cpu_s", ("taps",), "none", ""),
    ("taps: durable ÷ nothing captured, until all is durable", "durable_tokens_per_s", ("taps",), "none", ""),
    ("taps: time to first token ÷ without capture, median", "ttft_median", ("taps-sink", "taps"), "none", ""),
    ("SeaweedFS on the writers' core ÷ null sink, tokens/s", "tokens_per_s", ("seaweedfs",), "null-sink", ""),
    ("a store of 60 MB/s: durable bytes a second ÷ the store's rate", "rate_share", ("slow",), "", "≥ 0.95"),
    ("a store of 60 MB/s: the same, upper limit", "rate_share", ("slow",), "", "≤ 1.05"),
    ("a store of 60 MB/s: answers with a full cache ÷ the store's rate", "answers_share", ("slow",), "", "≤ 1.1"),
    ("encoding limits throughput: used share of the writers' core", "core_share", ("zstd",), "", "≥ 0.9"),
    ("store or core is the limit: memory growth ÷ in-flight limit", "growth_share", BOUND, "", "≤ 0.1"),
    ("durable ÷ vLLM's own, until all is written", "durable_tokens_per_s", FILES, "vllm", "≥ 1.3"),
    ("durable ÷ vLLM's own, until all is on the disk", "synced_tokens_per_s", FILES, "vllm", ""),
    ("time to first token ÷ null's, median", "ttft_median", ("null-sink", *STORING, *DIRECT), "null", "≤ 1.03"),
    ("vLLM's own: time to first token ÷ null's, median", "ttft_median", ("vllm",), "null", ""),
)  # fmt: skip


def ratios(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians, for each load, of the ratios of windows of the same turn."""
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
    """Confidence interval of the median by order statistics: 95 % from six values on, the range with fewer."""
    ordered, below, k = sorted(values), 0.0, 0
    while (below := below + math.comb(len(ordered), k) / 2 ** len(ordered)) <= 0.025:
        k += 1
    k = max(k - 1, 0)
    return [ordered[k], ordered[-1 - k]]


def is_meant(load: Load, sink: str, against: str) -> bool:
    """Whether goals apply to the sink under this load."""
    if sink == "taps-cache":  # the goal is for few bytes of states for each unit of compute
        return load.toggled is not None and not load.gpu_like and load.points in ("", "qkvz") and len(load.layers) < 5
    if sink in TAPS:  # two processes differ by more than a goal; capture of all points has no goal
        return load.toggled is not None and load.points != "full"
    if sink in BOUND:
        # The other loads make too few bytes to exceed the store's rate.
        return load.pinned and load.gpu_like and load.phase == "prefill"
    return load.pinned and (against != "vllm" or load.gpu_like)


def busy(cell: dict[str, Any]) -> float:
    """Share of one core used by all threads other than the engine's, and by the server."""
    others = sum(s for name, s in cell["cpu_s"].items() if name != "engine") + cell["server_cpu_s"]
    return float(others / cell["durable_s"])


def line(cell: dict[str, Any]) -> str:
    return (
        f"{cell['load']} {cell['sink']} round {cell['round']}: {cell['tokens_per_s']:,.0f} tokens/s, until durable "
        f"{cell['durable_tokens_per_s']:,.0f}, first token {cell['ttft_median'] * 1e3:.0f} ms, "
        f"{cell['durable_bytes_per_s'] / 1e6:.0f} MB/s, writers' core {busy(cell):.0%}"
    )


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    middle = format(statistics.median(values), form)
    return middle if len(values) == 1 else f"{middle} ({format(min(values), form)}–{format(max(values), form)})"


def stored(sink: str, rows: Sequence[dict[str, Any]]) -> str:
    """Durable MB/s; a dash for sinks that store nothing."""
    return spread([r["durable_bytes_per_s"] / 1e6 for r in rows]) if KINDS.get(sink) in (None, "vllm") else "–"


def bounds(ratio: dict[str, Any]) -> str:
    """The median's confidence interval; empty with fewer than six pairs."""
    return "–".join(f"{v:.3f}" for v in ratio["interval"]) if ratio["pairs"] > 5 and "interval" in ratio else ""


def table(found: dict[str, Any]) -> str:
    """The report as Markdown."""
    cells = found["cells"]
    lines = [
        "# Cost of extraction for an engine",
        "",
        "Made by `python -m benchmarks.engine`; its docstring describes the sinks. Figures are medians (range) of "
        "windows. Ratios are medians over pairs of windows of one turn. A CPU's tokens/s say nothing about a GPU; "
        "compare ratios within a load.",
        "",
        "- *By the engine's CPU time*: CPU time of the engine's thread. It excludes our copies, which run on another "
        "thread. It includes those of vLLM's own connector, which run in the step, because a CPU has no streams.",
        "- *Durable*: on the disk or acknowledged by the server. Files of vLLM's own connector are synced first.",
        "- *Blocks held*: held requests times the blocks of one request.",
        "- *Host memory*: peak, and growth from the first half of a window to the second.",
        "- *Writers' core*: share of one core used by all but the engine's threads, the server included.",
        "- *Another process*: `busy`, `traffic` or `disk`. *Direct*: with `cache_writes: direct`.",
        "- *vLLM's own*: its connector, subclassed for a CPU: without pinned memory and streams, with the CPU's cache "
        "layout, and without drafts, as ours.",
        "- Cells measure windows in alternating order, so compared windows may be some windows apart. Pairs of one "
        "round compare the same two processes, which differ for their whole life. So the range of few rounds is too "
        "narrow.",
        "- Loads that end in `host`, `files` and `cache-files` have one engine whose captures are switched on and off "
        "between windows.",
        "- Intervals are 95 % confidence intervals of the median. They assume independent windows.",
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
            "| hidden-state cache blocks held, peak | host memory, peak (growth), MiB "
            "| CPU s a window: engine, writers, server | writers' core | durable MB/s |",
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
            "| ratio | sink | median (range) | interval | pairs | goal | |",
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
