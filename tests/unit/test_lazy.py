"""A computed attribute holds no lock, which a forked process would wait for."""

from __future__ import annotations

import threading

from hsx_dist.lazy import cached_property


class _Slow:
    """An object whose value is there once ``go`` is set."""

    def __init__(self) -> None:
        self.begun, self.go, self.calls = threading.Event(), threading.Event(), 0

    @cached_property
    def value(self) -> int:
        """The value."""
        self.calls += 1
        self.begun.set()
        assert self.go.wait(60)
        return self.calls


def test_a_value_is_computed_once() -> None:
    slow = _Slow()
    slow.go.set()
    assert (slow.value, slow.value, slow.calls) == (1, 1, 1)
    assert _Slow.value.__doc__ == "The value."


def test_an_object_does_not_wait_for_the_value_of_another() -> None:
    first, second = _Slow(), _Slow()
    thread = threading.Thread(target=lambda: first.value)
    thread.start()
    assert first.begun.wait(60)
    other = threading.Thread(target=lambda: second.value, daemon=True)
    second.go.set()
    other.start()
    other.join(20)
    done = not other.is_alive()
    first.go.set()
    thread.join(60)
    assert done, "expected the second object's value, got a wait for the first one's"
