"""The driver's heartbeat, and its check for a newer attempt."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hsx_dist.errors import HsxError, StoreError
from hsx_dist.format.place import Place
from hsx_dist.format.runs import beat, is_fenced
from hsx_dist.logger import get_logger

log = get_logger(__name__)

#: Readers observe a heartbeat for `OBSERVE_SECONDS` (`reading.liveness`): three beats.
HEARTBEAT_S = 5.0
#: Seconds to store the last value. With a store that is down, all retries of a put would delay the driver's end.
LAST_S = 10.0


class Heartbeat:
    """Increments the attempt's heartbeat every few seconds, on a thread. If it stops, another driver may take over.

    ``progress()`` returns further values of each beat (JSON types). The thread calls ``on_over(why)`` when a newer
    attempt was taken or the run was removed: this attempt's driver must stop.
    """

    def __init__(
        self,
        place: Place,
        attempt: int,
        *,
        progress: Callable[[], dict[str, Any]] = dict,
        on_over: Callable[[str], None] = lambda _: None,
        every: float = HEARTBEAT_S,
    ):
        self._place = place
        self._store = place.store
        self._attempt = attempt
        self._progress = progress
        self._on_over = on_over
        self._every = every
        self._value = 0
        self._end = threading.Event()
        self._last = ""
        self._removed = False
        self._beat("running")  # the first beat at once: otherwise a new attempt looks dead
        self._thread = threading.Thread(target=self._loop, name="hsx-heartbeat", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        over = ""
        while not self._end.wait(self._every):
            if over:
                continue  # no process reads the heartbeat of this attempt
            self._beat("running")
            try:
                over = "" if self._end.is_set() else self._why_over()
            except HsxError:
                continue  # checked again soon, and before each receipt
            if over:
                self._on_over(over)
        if not self._removed:
            self._beat(self._last)

    def _why_over(self) -> str:
        if is_fenced(self._store, self._attempt):
            return "another driver took a newer attempt of this run: it continues, and this one stops"
        self._removed = self._place.removed()
        return "the run was removed: what this driver stored is lost" if self._removed else ""

    def _beat(self, state: str) -> None:
        self._value += 1
        try:
            beat(self._store, self._attempt, self._value, state, self._progress())
        except StoreError as e:
            log.warning("heartbeat %d was not stored: %s", self._value, e)

    def stop(self, state: str) -> None:
        """Store the last value: ``finished``, ``failed``, ``fenced``, or ``stopped: WHY``. Waits at most ``LAST_S``
        seconds. The thread then continues to try until the process ends."""
        self._last = state
        self._end.set()
        self._thread.join(LAST_S)
        if self._thread.is_alive():
            log.warning("the heartbeat's last value (%s) is not stored yet: the store does not answer", state)
