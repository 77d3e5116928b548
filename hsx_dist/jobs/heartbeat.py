"""The driver's heartbeat, and its check for a newer attempt."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

from hsx_dist.errors import Fenced, HsxError, StoreError
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

    A context manager around all that the attempt does. Set ``state`` before its end: ``finished``, or ``stopped`` and
    why. After an error it is ``fenced`` or ``failed``.
    """

    def __init__(self, place: Place, attempt: int, *, every: float = HEARTBEAT_S):
        self._place = place
        self._store = place.store
        self._attempt = attempt
        self._every = every
        self._progress: Callable[[], dict[str, Any]] = dict
        self._on_over: Callable[[str], None] = lambda _: None
        self._over = ""
        self._value = 0
        self._end = threading.Event()
        self._removed = False
        self.state = "failed"
        self._thread = threading.Thread(target=self._loop, name="hsx-heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._beat("running")  # the first at once: else a new attempt looks dead
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Store the last value. Returns after a time limit; the thread goes on trying until the process ends."""
        if kind is not None:
            self.state = "fenced" if issubclass(kind, Fenced) else "failed"
        self._end.set()
        self._thread.join(LAST_S)
        if self._thread.is_alive():
            log.warning("the heartbeat's last value (%s) is not stored yet: the store does not answer", self.state)

    def connect(self, progress: Callable[[], dict[str, Any]], on_over: Callable[[str], None]) -> None:
        """Connect the driver.

        ``progress()`` returns further values of each beat (JSON types). ``on_over(why)`` is called when a newer attempt
        was taken or the run was removed: this attempt's driver must stop. If that has happened, it is called at once.
        """
        self._progress, self._on_over = progress, on_over
        if self._over:
            on_over(self._over)

    def _loop(self) -> None:
        while not self._end.wait(self._every):
            if self._over:
                continue  # no process reads the heartbeat of this attempt
            self._beat("running")
            try:
                self._over = "" if self._end.is_set() else self._why_over()
            except HsxError:
                continue  # checked again soon, and before each receipt
            if self._over:
                self._on_over(self._over)
        if not self._removed:
            self._beat(self.state)

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
