"""Check that a call's time grows in proportion to the size of its input."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def check_linear(make: Callable[[int], Callable[[], object]], n: int, what: object = "") -> None:
    """Fail if ``make(4 * n)()`` takes 8 times the CPU time of ``make(n)()``. Quadratic work takes 16 times as much.

    Times below 0.1 s are not compared: choose ``n`` so that quadratic work on ``4 * n`` takes a second.
    """
    many = _seconds(make(4 * n))
    if many < 0.1:
        return
    few = min(_seconds(make(n)) for _ in range(3))
    for _ in range(2):  # a busy machine may have slowed down the long call alone
        if many < 0.1 or many < 8 * few:
            return
        many = min(many, _seconds(make(4 * n)))
    assert many < 0.1 or many < 8 * few, f"{what}: {many:.2f} s for {4 * n}, {few:.2f} s for {n}"


def _seconds(call: Callable[[], object]) -> float:
    gc.disable()  # a collection visits all objects of the process
    try:
        before = time.thread_time()
        call()
        return time.thread_time() - before
    finally:
        gc.enable()
