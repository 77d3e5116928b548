"""Progress of an extraction: a bar on a terminal, and occasional plain lines elsewhere (a Ray job's log)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from hsx_dist.observe.console import Console
from hsx_dist.observe.metrics import Meter, Series
from hsx_dist.observe.units import duration
from hsx_dist.text import printable

#: Seconds between the first plain lines. Each pause is longer than the one before, up to a minute, to keep logs short.
PLAIN_EVERY_S = 5.0
PLAIN_SELDOM_S = 60.0
#: Seconds over which displayed rates are averaged.
WINDOW_S = 30.0


class Progress:
    """Counts rows, tokens and bytes, and shows them. ``total``: number of rows, or None while it is unknown."""

    def __init__(self, total: int | None, done: int = 0, console: Console | None = None, meter: Meter | None = None):
        """``done``: rows that earlier attempts stored. ``meter``: counts the rows by outcome, for exporters."""
        self.console = console or Console()
        self.meter = meter or Meter()
        self.rows = done
        self.refused = 0
        self.failed = 0
        self.retries = 0
        self.tokens = 0
        self.raw_bytes = 0
        self.stored_bytes = 0
        self.paused = ""  # why no rows are handed out at present
        self._before = done
        self._total = total
        self._running = 0
        self._first_token: float | None = None
        self._began: float | None = None  # the same in Unix time
        self._last_receipt = time.time()
        self._spent: dict[str, float] = {}  # sums of what replicas and writers counted
        self._window: deque[tuple[float, int, int, int]] = deque()  # (time, rows, tokens, stored bytes)
        self._said = 0.0
        self._pause = PLAIN_EVERY_S
        self._bar: Bar | None = None
        self._ended = False
        self.meter.watch("rows_left", lambda: 0 if self._ended else self._running if self.left is None else self.left)
        self.meter.watch("receipt_timestamp_seconds", lambda: self._last_receipt)

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._bar = Bar(
                TextColumn("rows"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[line]}", markup=False),
                console=self.console,
            )
            self._bar.start()
            self._task = self._bar.add_task("rows", total=self._total, completed=self.rows, line="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ended = True
        if self._bar is not None:
            self.show(self._running)
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print one line above the bar."""
        self.console.print(text, soft_wrap=True)

    # -- what happens --------------------------------------------------------------------------------------------

    def computed(self, tokens: int) -> None:
        """Count a task of ``tokens`` tokens that its replica has finished."""
        self.tokens += tokens

    def counted(self, numbers: Mapping[Series, float]) -> None:
        """Add the increments that a replica or a writer reported."""
        for (name, _), value in numbers.items():
            self._spent[name] = self._spent.get(name, 0) + value

    def stored(self, *, rows: int, raw_bytes: int, stored_bytes: int) -> None:
        """Count a part that is durable."""
        self.rows += rows
        self.raw_bytes += raw_bytes
        self.stored_bytes += stored_bytes
        self._last_receipt = time.time()
        self.meter.add("rows", rows, "stored")

    def ended(self, fate: str) -> None:
        """Count a row that ended as ``refused``, ``failed`` or ``poison`` (which counts as failed here)."""
        if fate == "refused":
            self.refused += 1
        else:
            self.failed += 1
        self.meter.add("rows", 1, fate)

    def retried(self, rows: int) -> None:
        self.retries += rows
        self.meter.add("rows", rows, "retried")

    def started(self) -> None:
        """Start to count rates, when the first engine is ready."""
        if self._first_token is None:
            self._first_token = time.monotonic()
            self._began = self._last_receipt = time.time()  # otherwise loading a model would look like a stall

    # -- how it stands -------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Seconds since the first engine was ready."""
        return 0.0 if self._first_token is None else time.monotonic() - self._first_token

    @property
    def done(self) -> int:
        """Rows with an outcome."""
        return self.rows + self.refused + self.failed

    @property
    def left(self) -> int | None:
        """Rows without an outcome. None while the number of rows is unknown."""
        return None if self._total is None else max(self._total - self.done, 0)

    @property
    def rate(self) -> float:
        """Mean tokens per second since the first engine was ready."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def waiting(self) -> float:
        """The share of the engines' time, 0 to 1, in which they waited for the writers and the store."""
        return min(self._spent.get("store_wait_seconds", 0.0) / max(self._spent.get("engine_seconds", 0.0), 1e-9), 1.0)

    def rates(self) -> tuple[float, float, float]:
        """Rows, tokens and stored bytes per second, over the last ``WINDOW_S`` seconds or since the first engine."""
        now = time.monotonic()
        since = self._first_token if self._first_token is not None else now
        if not self._window:
            self._window.append((since, self._before, 0, 0))
        if now - self._window[-1][0] >= 1.0:
            self._window.append((now, self.done, self.tokens, self.stored_bytes))
        while len(self._window) > 1 and now - self._window[1][0] > WINDOW_S:
            self._window.popleft()
        at, rows, tokens, nbytes = self._window[0]
        seconds = max(now - at, 1e-9)
        return (self.done - rows) / seconds, (self.tokens - tokens) / seconds, (self.stored_bytes - nbytes) / seconds

    def snapshot(self) -> dict[str, Any]:
        """The attempt's progress as JSON values, which its heartbeat has for ``hsx top`` and ``hsx report``."""
        return {
            "rows": self._total,
            "tokens_per_second": round(self.rate, 1),
            "fates": {
                "before": self._before,
                "stored": self.rows - self._before,
                "refused": self.refused,
                "failed": self.failed,
                "retried": self.retries,
            },
            "tokens": self.tokens,
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
            "seconds": round(self.seconds, 3),
            "engines_timestamp": self._began,
            "in_flight": self._running,
            "paused": self.paused,
            "counted": {name: round(value, 3) for name, value in sorted(self._spent.copy().items())},
        }

    def line(self) -> str:
        """Rates and counts in one line."""
        rows_s, tokens_s, bytes_s = self.rates()
        parts = [f"{tokens_s:,.0f} tokens/s", f"{bytes_s / 1e6:,.1f} MB/s stored"]
        if self._spent.get("engine_seconds"):
            parts.append(f"waiting on the store {self.waiting:.0%}")
        if self.left and rows_s > 0:
            parts.append(f"ETA {duration(self.left / rows_s)}")
        parts += [f"{self._running} in flight", f"{self.refused} refused", f"{self.failed} failed"]
        parts += [f"{self.retries} retried"] if self.retries else []
        return " · ".join(parts + ([f"paused by {self.paused}"] if self.paused else []))

    def show(self, running: int) -> None:
        """Update the display. ``running``: number of rows with replicas."""
        self._running = running
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, line=printable(self.line()))
            return
        now = time.monotonic()
        if self._first_token is not None and now - self._said >= self._pause:
            self._pause = PLAIN_EVERY_S if not self._said else min(self._pause * 1.5, PLAIN_SELDOM_S)
            self._said = now
            of = f"/{self._total:,}" if self._total is not None else ""
            self.say(f"rows {self.done:,}{of} done · {self.line()}")
