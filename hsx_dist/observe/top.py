"""The progress of a run, read from its store alone: the newest attempt's heartbeat contains it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from hsx_dist.config.urls import public_url
from hsx_dist.format.place import open_place
from hsx_dist.format.runs import newest_and_complete, read_heartbeat
from hsx_dist.observe.units import duration
from hsx_dist.store import Store

#: Age in seconds from which a heartbeat is shown as old. This proves no death: ``hsx gc`` and ``hsx rm`` observe
#: whether the heartbeat changes.
OLD_S = 30.0


@dataclass(slots=True)
class Standing:
    """A run's state at one time. Rates are means since the previous ``Standing``, or since the first engine."""

    url: str
    model: str
    attempt: int
    state: str  # not started, starting, running, complete, finished, failed, fenced, or "stopped: " and the reason
    age: float | None  # seconds since the last heartbeat, by the two machines' clocks
    progress: dict[str, Any] = field(default_factory=dict)
    rows_per_second: float = 0.0
    tokens_per_second: float = 0.0
    bytes_per_second: float = 0.0
    waiting: float = 0.0

    @property
    def total(self) -> int | None:
        """Number of input rows, if it is known."""
        found = self.progress.get("rows")
        return int(found) if isinstance(found, int) else None

    @property
    def fates(self) -> dict[str, Any]:
        """Rows of this attempt by outcome, and rows that were done ``before`` it."""
        found = self.progress.get("fates")
        return found if isinstance(found, dict) else {}

    @property
    def done(self) -> int:
        """Rows with an outcome, including those of earlier attempts."""
        return sum(int(self.fates.get(name) or 0) for name in ("before", "stored", "refused", "failed"))

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until no row is left, at the present rate. None without a rate."""
        if not self.total or self.rows_per_second <= 0 or self.state != "running":
            return None
        return max(self.total - self.done, 0) / self.rows_per_second

    def line(self) -> str:
        """The progress in one line."""
        age = f" (last heartbeat {duration(self.age)} ago)" if self.age is not None and self.stale else ""
        parts = [
            self.state + age,
            f"rows {self.done:,}" + (f"/{self.total:,}" if self.total is not None else ""),
            f"{self.tokens_per_second:,.0f} tokens/s",
            f"{self.bytes_per_second / 1e6:,.1f} MB/s stored",
            f"waiting on the store {self.waiting:.0%}",
        ]
        if self.eta_seconds is not None:
            parts.append(f"ETA {duration(self.eta_seconds)}")
        parts += [f"{self.fates.get(name) or 0:,} {name}" for name in ("refused", "failed", "retried")]
        paused = self.progress.get("paused")
        return " · ".join(parts + ([f"paused by {paused}"] if paused and self.state == "running" else []))

    @property
    def stale(self) -> bool:
        """Whether the state is ``running``, but the last heartbeat is old."""
        return self.state == "running" and self.age is not None and self.age > OLD_S


def look(root: Store, before: Standing | None = None) -> Standing:
    """Return the present state of the run at ``root``, with rates since ``before``.

    Raises:
        RunError: there is no run, or it is being removed.
        FormatError: one of its objects cannot be read.
    """
    place = open_place(root)
    store = place.store
    with place.reading():
        attempt, complete = newest_and_complete(store)
        beat = read_heartbeat(store, attempt) if attempt else None
    state = str(beat.get("state", "?")) if beat else "not started" if not attempt else "starting"
    if complete is not None and complete["attempt"] >= attempt:
        state = "complete"
    progress = beat.get("progress") if beat else None
    standing = Standing(
        url=root.url,
        model=public_url(str(place.info.get("meaning", {}).get("model", "?"))),
        attempt=attempt,
        state=state,
        age=_age(beat),
        progress=progress if isinstance(progress, dict) else {},
    )
    _rates(standing, before if before is not None and before.attempt == attempt else None)
    return standing


def follow(root: Store, every: float) -> Iterator[Standing]:
    """Yield the run's state every ``every`` seconds until the attempt has ended."""
    standing: Standing | None = None
    while True:
        now = look(root, standing)
        if standing is not None and now.progress.get("seconds") == standing.progress.get("seconds"):
            # The heartbeat has not changed, so the last rates are still the best.
            now.rows_per_second, now.tokens_per_second = standing.rows_per_second, standing.tokens_per_second
            now.bytes_per_second, now.waiting = standing.bytes_per_second, standing.waiting
        standing = now
        yield standing
        if standing.state not in ("not started", "starting", "running"):
            return
        time.sleep(every)


def _rates(now: Standing, before: Standing | None) -> None:
    def since(name: str) -> float:
        return float(now.progress.get(name) or 0) - (float(before.progress.get(name) or 0) if before else 0.0)

    def counted(name: str) -> float:
        numbers = [s.progress.get("counted", {}).get(name, 0.0) if s else 0.0 for s in (now, before)]
        return float(numbers[0]) - float(numbers[1])

    seconds = since("seconds")
    if seconds <= 0:
        return
    done = now.done - (before.done if before else int(now.fates.get("before") or 0))
    now.rows_per_second = done / seconds
    now.tokens_per_second = since("tokens") / seconds
    now.bytes_per_second = since("stored_bytes") / seconds
    now.waiting = min(counted("store_wait_seconds") / max(counted("engine_seconds"), 1e-9), 1.0)


def _age(beat: dict[str, Any] | None) -> float | None:
    try:
        then = datetime.fromisoformat(str(beat["time"])).timestamp() if beat else None
    except (KeyError, ValueError, OverflowError, OSError):
        return None
    return max(time.time() - then, 0.0) if then is not None else None
