"""Failure markers beside the objects of a bare connector, stored by threads of their own: steps only say what to tell.

Of one name the latest wins, and one thread at a time works on it; a marker that says that a key stands for two samples
(a conflict) is never taken back.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hsx_dist.errors import HsxError, NotFound
from hsx_dist.format.companions import is_conflict, marker_name
from hsx_dist.format.json_objects import MAX_JSON_BYTES, get_small
from hsx_dist.logger import get_logger
from hsx_dist.store import Store
from hsx_dist.text import bounded
from hsx_dist.writers.daemon import DaemonPool

log = get_logger(__name__)

_THREADS = 4
#: How many names wait for a store that is slow, at most; what comes on top is not told, but logged.
_MOST_WAITING = 65536
#: A thread that stores waits while more names than this are to be looked at, so that they do not pile up.
_MANY = 256
#: Names marked by this process that are remembered: a later request of one takes its marker away at once.
_REMEMBERED = 65536


@dataclass(slots=True)
class _Act:
    """``body``: the marker to store; None: take away what is there."""

    body: bytes | None
    conflict: bool = False
    then: list[Callable[[], None]] = field(default_factory=list)


class Markers:
    """What was told of names under ``store``. Thread-safe; only ``clear(patient=True)`` may wait."""

    def __init__(self, store: Store, ttl: float | None = None):
        self._store = store
        self._ttl = ttl
        self._lock = threading.Condition()
        self._waiting: dict[str, _Act] = {}
        self._busy: set[str] = set()  # names that a thread works on or will
        self._marked: OrderedDict[str, None] = OrderedDict()
        self._closed = False
        self._pool = DaemonPool(_THREADS, "hsx-mark")

    def fail(
        self, key: str, name: str, reason: str, *, conflict: bool = False, then: Callable[[], None] | None = None
    ) -> None:
        """Mark the object ``name``; then call ``then``, also where the marker could not be stored."""
        body: dict[str, Any] = {"key": key, "error": bounded(reason)}
        if conflict:
            body["conflict"] = True
        if self._ttl is not None:
            body["expires"] = round(time.time() + self._ttl)
        if not conflict:
            with self._lock:
                self._marked[name] = None
                if len(self._marked) > _REMEMBERED:
                    self._marked.popitem(last=False)
        self._put(name, _Act(json.dumps(body).encode(), conflict, [then] if then else []))

    def clear(self, name: str, *, then: Callable[[], None] | None = None, patient: bool = False) -> None:
        """Take a marker away that is no conflict's; then call ``then``. ``patient``: wait while many others wait."""
        with self._lock:
            self._marked.pop(name, None)
            while patient and len(self._busy) >= _MANY and not self._closed:
                self._lock.wait(1.0)
        self._put(name, _Act(None, False, [then] if then else []))

    def failed(self, name: str) -> bool:
        """Whether this process has marked the name, as far as it remembers; conflicts do not count."""
        with self._lock:
            return name in self._marked

    @property
    def pending(self) -> int:
        """Names of which something is still to be told."""
        return len(self._busy)

    def close(self) -> list[str]:
        """Take no more; the names of which what was to be told is not told yet."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
            left = sorted(self._busy)
        self._pool.close(wait=False)
        return left

    def _put(self, name: str, act: _Act) -> None:
        with self._lock:
            before = self._waiting.get(name)
            refused = self._closed or (before is None and len(self._waiting) >= _MOST_WAITING)
            if not refused:
                if before is not None:
                    act.then = before.then + act.then
                    if before.conflict and not act.conflict:
                        act.body, act.conflict = before.body, True
                self._waiting[name] = act
            start = not refused and name not in self._busy
            if start:
                self._busy.add(name)
        if start:
            self._pool.submit(self._work, name)
        elif refused:
            if act.body is not None:
                log.error("no failure marker is stored for %s: too many wait for the store, or it is the end", name)
            _call(act.then)

    def _work(self, name: str) -> None:
        with self._lock:
            act = self._waiting.pop(name)
        try:
            self._do(name, act)
        except HsxError as e:
            log.error("the failure marker of %s could not be %s: %s", name, "stored" if act.body else "removed", e)
        except Exception:
            log.exception("the failure marker of %s could not be %s", name, "stored" if act.body else "removed")
        _call(act.then)
        with self._lock:
            again = name in self._waiting
            if not again:
                self._busy.discard(name)
            self._lock.notify_all()
        if again:
            self._pool.submit(self._work, name)

    def _do(self, name: str, act: _Act) -> None:
        marker = marker_name(name)
        if act.conflict and act.body is not None:
            self._store.put(marker, [act.body])
            return
        try:
            there = get_small(self._store, marker, MAX_JSON_BYTES)
        except NotFound:
            there = None
        if there is not None and is_conflict(there):
            return
        if act.body is not None:
            self._store.put(marker, [act.body])
        elif there is not None:
            self._store.delete(marker)


def _call(then: list[Callable[[], None]]) -> None:
    for call in then:
        try:
            call()
        except Exception:
            log.exception("after a failure marker was told")
