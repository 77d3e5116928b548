"""A limit of the bytes that threads hold at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ByteBudget:
    """Threads hold at most ``nbytes`` together. A larger claim waits until no other thread holds any."""

    def __init__(self, nbytes: int):
        """``nbytes``: at least 1."""
        self._all = self._free = nbytes
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        """Block until ``nbytes`` are free, and hold them within the context."""
        nbytes = min(max(nbytes, 0), self._all)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= nbytes)
            self._free -= nbytes
        try:
            yield
        finally:
            with self._changed:
                self._free += nbytes
                self._changed.notify_all()
