"""Objects whose names clients chose: of two that are stored under one name, the later one stays."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

#: More than can be under way at once: one that is older than so many names cannot come any more.
_REMEMBERED = 4096
#: Locks that names share. More than the threads that put, so that two names seldom wait for one lock.
_STRIPES = 64


class PutOrder:
    """Puts of one name in turn, and none after a later one's. Thread-safe."""

    def __init__(self) -> None:
        self._newest: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()
        self._stripes = [threading.Lock() for _ in range(_STRIPES)]

    @contextmanager
    def take(self, name: str, number: int) -> Iterator[bool]:
        """Whether ``number``, of those that came for ``name``, is still to be stored; within the block nobody else
        stores that name. A block that raises has stored nothing."""
        with self._stripes[hash(name) % _STRIPES]:
            with self._lock:
                newest = self._newest.get(name, -1)
            yield number > newest
            with self._lock:
                self._newest[name] = max(newest, number)
                self._newest.move_to_end(name)
                if len(self._newest) > _REMEMBERED:
                    self._newest.popitem(last=False)
