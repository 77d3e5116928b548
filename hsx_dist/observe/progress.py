"""Progress of an extraction: a bar on a terminal, a plain line now and then elsewhere (a Ray job's log)."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

#: Seconds between plain lines.
PLAIN_EVERY_S = 5.0


class Progress:
    """Counts rows, tokens and bytes, and shows them. ``total`` rows, or None while nobody knows."""

    def __init__(self, total: int | None, done: int = 0, console: Console | None = None):
        """``done`` rows were stored by earlier attempts."""
        self.console = console or Console()
        self.rows = done
        self.refused = 0
        self.failed = 0
        self.retries = 0
        self.tokens = 0
        self.raw_bytes = 0
        self.stored_bytes = 0
        self._total = total
        self._running = 0
        self._first_token: float | None = None
        self._said = 0.0
        self._bar: Bar | None = None

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._bar = Bar(
                TextColumn("rows"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[line]}"),
                console=self.console,
            )
            self._bar.start()
            self._task = self._bar.add_task("rows", total=self._total, completed=self.rows, line="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self.show(self._running)
            self._bar.stop()

    def say(self, text: str) -> None:
        """One line above the bar."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def computed(self, tokens: int) -> None:
        """A task of ``tokens`` tokens came back from its replica."""
        self.tokens += tokens

    def stored(self, *, rows: int, raw_bytes: int, stored_bytes: int) -> None:
        """A part is durable."""
        self.rows += rows
        self.raw_bytes += raw_bytes
        self.stored_bytes += stored_bytes

    def ended(self, fate: str) -> None:
        """A row ended as ``refused`` or ``failed``."""
        if fate == "refused":
            self.refused += 1
        else:
            self.failed += 1

    def retried(self, rows: int) -> None:
        self.retries += rows

    def started(self) -> None:
        """The first engine is ready: rates count from here."""
        if self._first_token is None:
            self._first_token = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the first engine was ready."""
        return 0.0 if self._first_token is None else time.monotonic() - self._first_token

    @property
    def rate(self) -> float:
        """Tokens a second, a mean since the first engine was ready."""
        return self.tokens / max(self.seconds, 1e-9)

    def line(self) -> str:
        """Rates and counts in one line; rates are means since the first engine was ready."""
        seconds = max(self.seconds, 1e-9)
        parts = [
            f"{self.rate:,.0f} tokens/s",
            f"{self.stored_bytes / seconds / 1e6:,.1f} MB/s stored",
            f"{self._running} in flight",
            f"{self.refused} refused",
            f"{self.failed} failed",
        ]
        return " · ".join(parts + ([f"{self.retries} retried"] if self.retries else []))

    def show(self, running: int) -> None:
        """Bring the display up to date; ``running`` rows are with replicas."""
        self._running = running
        if self._bar is not None:
            self._bar.update(self._task, completed=self.rows + self.refused + self.failed, line=self.line())
            return
        now = time.monotonic()
        if self._first_token is not None and now - self._said >= PLAIN_EVERY_S:
            self._said = now
            of = f"/{self._total}" if self._total is not None else ""
            self.say(f"rows {self.rows + self.refused + self.failed}{of} done · {self.line()}")
