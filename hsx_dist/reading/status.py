"""What became of every row of a run, and whether anybody works on it: from the store alone, at any time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hsx_dist.format.manifest import Totals
from hsx_dist.format.runs import load_manifest, newest_attempt, read_complete, read_heartbeat, read_run
from hsx_dist.store import Store

#: A driver beats every 5 seconds; of one that lives, a change is seen within so many.
OBSERVE_S = 15.0
_LOOK_EVERY_S = 1.0
#: Different reasons told; the rest is counted as one.
_REASONS = 20


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The account of a run.

    ``state``: ``complete``; ``running``; ``silent`` (its driver died, or is cut off from the store); ``new`` (nobody
    took an attempt yet); or what its last driver said at its end: ``stopped: why``, ``failed``, ``fenced``,
    ``finished``. ``rows``: ``total`` and ``open`` are ``None`` while no driver has counted its input; ``failed`` does
    not count ``poison``. ``reasons``: how many rows by what was said of them, digits left out. ``progress``: what the
    driver told with its last sign of life.
    """

    url: str
    state: str
    attempt: int
    rows: dict[str, int | None]
    totals: Totals
    conflicts: int
    reasons: dict[str, dict[str, int]] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    last_sign: str | None = None

    @property
    def ok(self) -> bool:
        """Whether there is nothing that somebody should look at."""
        bad = self.rows["failed"] or self.rows["poison"] or self.conflicts
        return not bad and self.state not in ("silent", "failed")


def run_status(
    store: Store, *, observe_seconds: float = OBSERVE_S, sleep: Callable[[float], None] = time.sleep
) -> RunStatus:
    """The account of the run in ``store``. While its last driver has not said that it ended, its heartbeat is watched
    for up to ``observe_seconds``: clocks of two machines are never compared.

    Raises:
        RunError: there is no run.
        FormatError: its manifest is damaged.
    """
    read_run(store)
    attempt = newest_attempt(store)
    complete = read_complete(store)
    done = complete is not None and complete["attempt"] >= attempt
    state = "complete" if done else _state(store, attempt, observe_seconds, sleep)
    heart = (read_heartbeat(store, attempt) if attempt else None) or {}
    manifest = load_manifest(store)
    progress = dict(heart.get("progress") or {})
    total = complete["summary"].get("rows") if done and complete else progress.get("rows")
    poison = sum(fate.fate == "poison" for fate in manifest.failed.values())
    ended = {
        "stored": len(manifest.samples),
        "refused": len(manifest.refused),
        "failed": len(manifest.failed) - poison,
        "poison": poison,
    }
    left = None if total is None else max(int(total) - sum(ended.values()), 0)
    return RunStatus(
        url=store.url,
        state=state,
        attempt=attempt,
        rows={"total": total, **ended, "open": left},
        totals=manifest.totals(),
        conflicts=len(manifest.conflicts),
        reasons={
            "refused": _reasons(fate.reason for fate in manifest.refused.values()),
            "failed": _reasons(fate.reason for fate in manifest.failed.values()),
        },
        progress=progress if state == "running" else {},
        last_sign=heart.get("time"),
    )


def _state(store: Store, attempt: int, seconds: float, sleep: Callable[[float], None]) -> str:
    if not attempt:
        return "new"
    first = read_heartbeat(store, attempt)
    waited = 0.0
    while first is None or first.get("state") == "running":
        if waited >= seconds:
            return "silent"
        sleep(_LOOK_EVERY_S)
        waited += _LOOK_EVERY_S
        now = read_heartbeat(store, attempt)
        if now is not None and now.get("state") == "running" and now.get("value") != (first or {}).get("value"):
            return "running"
        first = first if now is None or now.get("state") == "running" else now
    return str(first.get("state"))


def _reasons(reasons: Any) -> dict[str, int]:
    """Counts by reason, most frequent first. Numbers differ from row to row where the reason does not."""
    counts: Counter[str] = Counter()
    for reason in reasons:
        counts["".join("#" if c.isdigit() else c for c in reason)[:300]] += 1
    common = counts.most_common(_REASONS)
    rest = counts.total() - sum(n for _, n in common)
    return {**dict(common), **({"other reasons": rest} if rest else {})}
