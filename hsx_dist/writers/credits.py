"""Shares of a writer's limit of unacknowledged bytes, for its senders."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Credits:
    """A writer's ``total`` bytes in equal shares for all active senders.

    A sender gets its smaller share only with its next call. Until then a new sender gets only the bytes that are in no
    other sender's share.
    """

    #: A sender without a call for this many seconds is inactive, and loses its share.
    LATELY = 60.0

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic):
        self._total = total
        self._clock = clock
        self._heard: dict[str, float] = {}
        self._granted: dict[str, int] = {}
        self._lock = threading.Lock()

    def share(self, sender: str) -> int:
        """Count a call of ``sender``, and return its new share in bytes."""
        with self._lock:
            now = self._heard[sender] = self._clock()
            self._heard = {s: at for s, at in self._heard.items() if now - at < self.LATELY}
            others = sum(granted for s, granted in self._granted.items() if s in self._heard and s != sender)
            share = max(min(self._total // len(self._heard), self._total - others), 0)
            self._granted = {s: self._granted.get(s, 0) for s in self._heard} | {sender: share}
            return share
