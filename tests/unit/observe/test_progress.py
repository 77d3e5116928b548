"""The output of an extraction while it runs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from hsx_dist.observe import progress as module
from hsx_dist.observe.progress import Progress
from hsx_dist.observe.units import duration


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr(module.time, "monotonic", lambda: Clock.now)
    return Clock


def test_rates_are_of_the_recent_past_and_give_the_time_left(clock):
    p = Progress(1000, 100, Console(file=io.StringIO()))
    p.started()
    for second in range(1, 121):
        clock.now += 1
        p.computed(10 if second <= 60 else 50)
        p.stored(rows=1, raw_bytes=200, stored_bytes=100)
        p.show(running=3)
    rows, tokens, stored = p.rates()
    assert (rows, tokens, stored) == pytest.approx((1, 50, 100), rel=0.05)
    assert f"ETA {duration(780)}" in p.line()


def test_without_a_terminal_the_interval_between_lines_grows(clock):
    out = io.StringIO()
    with Progress(None, console=Console(file=out, width=200)) as p:
        p.started()
        for _ in range(3600):
            clock.now += 1
            p.show(running=1)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("rows ")]
    assert 60 <= len(lines) <= 80


def test_the_share_of_waiting_is_of_the_engines_time(clock):
    p = Progress(10, console=Console(file=io.StringIO()))
    p.counted({("engine_seconds", ""): 8.0, ("store_wait_seconds", ""): 2.0})
    p.counted({("engine_seconds", ""): 2.0})
    assert p.waiting == 0.2
    assert "waiting on the store 20%" in p.line()
    assert p.snapshot()["counted"] == {"engine_seconds": 10.0, "store_wait_seconds": 2.0}


def test_rows_by_fate_are_counted_and_none_is_left_at_the_end():
    with Progress(6, 2, Console(file=io.StringIO())) as p:
        p.stored(rows=1, raw_bytes=1, stored_bytes=1)
        p.ended("refused")
        p.ended("failed")
        p.retried(3)
        assert p.meter.gauges()["rows_left", ""] == 1
    assert p.meter.gauges()["rows_left", ""] == 0
    assert p.meter.sums() == {("rows", f): n for f, n in {"stored": 1, "refused": 1, "failed": 1, "retried": 3}.items()}
