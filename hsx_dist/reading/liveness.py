"""Whether anybody works on a run: from its store alone. Clocks of two machines are never compared."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hsx_dist.errors import RunError
from hsx_dist.format.runs import newest_and_complete, newest_attempt, read_heartbeat
from hsx_dist.store import Store

#: A driver beats every 5 seconds; of one that lives, a change is seen within so many.
OBSERVE_SECONDS = 15.0
#: Before something is removed, one that is slow, or cut off from the store for a while, gets longer.
WATCH_SECONDS = 45.0
#: Between two looks at a heartbeat, which is renewed every few seconds.
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Tenure:
    """The newest attempt of a run, and what became of it.

    ``state``: ``complete``; ``running``; ``silent`` (its driver died, or is cut off from the store); ``new`` (nobody
    took an attempt yet: 0); or what its driver said at its end: ``stopped: why``, ``failed``, ``fenced``, ``finished``.
    ``heartbeat``: the last one seen, if any. ``completed``: what the last completed attempt stored, when the
    observation began. It may be of an earlier attempt; ``complete`` is not.
    """

    attempt: int
    state: str
    heartbeat: dict[str, Any]
    completed: dict[str, Any] | None

    @property
    def complete(self) -> dict[str, Any] | None:
        """What the attempt stored, if it is complete."""
        return self.completed if self.state == "complete" else None


def observe(store: Store, seconds: float, *, sleep: Callable[[float], None] = time.sleep) -> Tenure:
    """The newest attempt. While its driver has not said that it ended, its heartbeat is watched for up to ``seconds``:
    as soon as it changes the driver is known to live."""
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
            return Tenure(newer, "running", {}, complete)  # whoever took it has only just begun
        heart = read_heartbeat(store, attempt) or heart
    return Tenure(attempt, str(heart["state"]), heart, complete)


def require_dead(
    store: Store, *, watch_seconds: float = WATCH_SECONDS, sleep: Callable[[float], None] = time.sleep
) -> int:
    """The newest attempt, once it is known that nobody is at work on the run; 0 when there was none.

    At once where it has said that it ended, else after its heartbeat has stood still for ``watch_seconds``.

    Raises:
        RunError: somebody is at work.
    """
    found = observe(store, watch_seconds, sleep=sleep)
    if found.state == "running":
        raise RunError(
            f"{store.url}: expected a run that nobody works on, and attempt {found.attempt} is alive; stop it, or wait "
            "for its end"
        )
    return found.attempt
