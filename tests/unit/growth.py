"""Whether the time that a call takes is in proportion to the size of what it is given."""

from __future__ import annotations

import time
from collections.abc import Callable


def check_linear(make: Callable[[int], Callable[[], object]], n: int, what: object = "") -> None:
    """Fail when ``make(4 * n)()`` takes 8 times the CPU time of ``make(n)()``; quadratic work takes 16 times as much.

    Times below 0.1 s are not compared: choose ``n`` so that quadratic work on ``4 * n`` takes a second.
    """

    def seconds(size: int) -> float:
        call = make(size)
        before = time.thread_time()
        call()
        return time.thread_time() - before

    many = seconds(4 * n)
    assert many < 0.1 or many < 8 * seconds(n), f"{what}: {many:.2f} s for {4 * n}"
