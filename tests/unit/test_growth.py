"""``check_linear`` itself: the shape of the growth decides, and not the time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest

from tests.unit.growth import check_linear


def spinning(steps: int) -> Callable[[], object]:
    return lambda: deque(range(steps), maxlen=0)


def test_quadratic_time_is_an_error() -> None:
    with pytest.raises(AssertionError, match="for 16000"):
        check_linear(lambda n: spinning(n * n // 16), 4000)


def test_linear_time_is_none() -> None:
    check_linear(lambda n: spinning(1000 * n), 4000)
