from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsx_dist.reading.prefetch import read_ahead


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 4), st.integers(1, 200))
def test_order_is_kept_and_bytes_are_bounded(sizes: list[int], threads: int, most: int) -> None:
    lock = threading.Lock()
    state = {"held": 0, "count": 0}

    def work(item: tuple[int, int]) -> int:
        with lock:
            state["held"] += item[1]
            state["count"] += 1
            assert state["held"] <= most or state["count"] == 1
        return item[0]

    seen = []
    for item, future in read_ahead(work, (((i, n), n) for i, n in enumerate(sizes)), threads=threads, max_bytes=most):
        seen.append(future.result())
        with lock:
            state["held"] -= item[1]
            state["count"] -= 1
    assert seen == list(range(len(sizes)))


def test_an_error_of_the_source_is_raised_in_its_order() -> None:
    def source() -> Iterator[tuple[int, int]]:
        yield 1, 1
        yield 2, 1
        raise RuntimeError("torn")

    reading = read_ahead(lambda i: i, source(), threads=4, max_bytes=100)
    assert [next(reading)[1].result() for _ in range(2)] == [1, 2]
    with pytest.raises(RuntimeError, match="torn"):
        next(reading)


def test_a_pause_waits_until_all_before_it_is_consumed() -> None:
    asked: list[int] = []

    def source() -> Iterator[tuple[int | None, int]]:
        for i in (1, 2, None, 3):
            asked.append(i or 0)
            yield i, 1

    reading = read_ahead(lambda i: i, source(), threads=4, max_bytes=100)
    assert next(reading)[0] == 1
    assert asked == [1, 2, 0]
    assert [item for item, _ in reading] == [2, 3]


def test_leaving_early_ends_the_threads() -> None:
    before = threading.active_count()
    reading = read_ahead(lambda i: i, ((i, 1) for i in range(1000)), threads=3, max_bytes=10)
    next(reading)
    reading.close()
    end = time.monotonic() + 60
    while threading.active_count() > before:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_leaving_early_does_not_wait_for_a_thread() -> None:
    """The garbage collector may close an abandoned iteration in a thread that holds a lock of these threads."""
    closed, seen = threading.Event(), []

    def work(i: int) -> int:
        if i:
            seen.append(closed.wait(30))
        return i

    reading = read_ahead(work, ((i, 1) for i in range(1000)), threads=3, max_bytes=10)
    next(reading)
    reading.close()
    closed.set()
    end = time.monotonic() + 60
    while not seen:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert all(seen)


@pytest.mark.parametrize(
    "kept",
    [
        "prefetch import read_ahead; os.kept = read_ahead(str, ((i, 1) for i in range(99)), threads=2, max_bytes=9)",
        "mixer import ahead; os.kept = ahead(iter(range(99)), 3, threading.Event())",
    ],
)
def test_an_abandoned_iteration_prints_nothing_at_exit(kept: str) -> None:
    """Python clears ``concurrent.futures`` before ``os``, which it imported earlier."""
    script = f"import os, threading; from hsx_dist.reading.{kept}; next(os.kept)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
