"""Detect from the store alone whether a driver works on a run. Never compares the clocks of two machines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hsx_dist.errors import RunError
from hsx_dist.format.runs import newest_and_complete, newest_attempt, read_heartbeat
from hsx_dist.store import Store

#: A living driver renews its heartbeat every 5 seconds, so that a change is seen within this time.
OBSERVE_SECONDS = 15.0
#: Before a removal, wait longer: the driver may be slow, or cut off from the store for a while.
WATCH_SECONDS = 45.0
#: Seconds between two reads of a heartbeat.
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Tenure:
    """The newest attempt of a run, and its state.

    ``state`` is ``complete``, ``running``, ``silent`` (the driver died, or is cut off from the store), or ``new`` (no
    attempt yet: ``attempt`` is 0). Or it is the end that the driver recorded: ``stopped: why``, ``failed``, ``fenced``,
    ``finished``.

    ``heartbeat``: the last heartbeat seen, if any. ``completed``: the record of the last completed attempt, when the
    observation began. It may be of an earlier attempt; ``complete`` is not.
    """

    attempt: int
    state: str
    heartbeat: dict[str, Any]
    completed: dict[str, Any] | None

    @property
    def complete(self) -> dict[str, Any] | None:
        """The record of this attempt, if it is complete."""
        return self.completed if self.state == "complete" else None


def observe(store: Store, seconds: float, *, sleep: Callable[[float], None] = time.sleep) -> Tenure:
    """Return the newest attempt and its state.

    Unless the driver recorded its end, this watches the heartbeat for up to ``seconds``. A change shows that the driver
    lives.
    """
    attempt, complete = newest_and_complete(store)
    heart = (read_heartbeat(store, attempt) if attempt else None) or {}
    if complete is not None and complete["attempt"] >= attempt:
        return Tenure(attempt, "complete", heart, complete)
    if not attempt:
        return Tenure(0, "new", {}, complete)
    first, waited, pause = heart.get("value"), 0.0, min(_LOOK_EVERY_S, seconds)
    while heart.get("state", "running") == "running":
        if heart.get("value") != first:
            return Tenure(attempt, "running", heart, complete)
        if waited >= seconds:
            return Tenure(attempt, "silent", heart, complete)
        sleep(pause)
        waited += pause
        if (newer := newest_attempt(store)) != attempt:
            return Tenure(newer, "running", {}, complete)  # a driver has just started this attempt
        heart = read_heartbeat(store, attempt) or heart
    return Tenure(attempt, str(heart["state"]), heart, complete)


def require_dead(
    store: Store, *, watch_seconds: float = WATCH_SECONDS, sleep: Callable[[float], None] = time.sleep
) -> int:
    """Return the newest attempt (0: none) after checking that no driver works on the run.

    Returns at once if the driver recorded its end, else after ``watch_seconds`` without a change of its heartbeat.

    Raises:
        RunError: a driver works on the run.
    """
    found = observe(store, watch_seconds, sleep=sleep)
    if found.state == "running":
        raise RunError(
            f"{store.url}: expected a run without a running driver, got attempt {found.attempt}, which is alive. Stop "
            "it, or wait for its end"
        )
    return found.attempt
