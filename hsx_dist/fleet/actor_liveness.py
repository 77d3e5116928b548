"""Handling of actors that cannot be reached.

Ray fails calls one second after their connection broke (``ActorUnavailableError``). Ray declares a node and its actors
dead when the node misses its health checks. Ray's defaults (``ray_config_def.h``) are 5 misses, and one check every 3 s
with a limit of 10 s. So detection takes 15 s if connections are refused, and up to 65 s if nothing answers. Before
that, it is unknown whether an actor died, and why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from hsx_dist.fleet.ray_errors import reason_of
from hsx_dist.logger import get_logger

log = get_logger(__name__)

#: Longest time that Ray needs to detect a death. Actors that are unreachable for longer are treated as dead.
KNOWN_AFTER_S = 90.0
#: Seconds between two checks of ``hurry`` in waits without a time limit.
LOOK_EVERY_S = 0.2


class Inquiry:
    """Polls unreachable actors until they answer, or Ray reports that they are dead."""

    def __init__(self) -> None:
        self._asked: dict[Any, Hashable] = {}  # ref of a call → name
        self._actors: dict[Hashable, tuple[Any, float]] = {}  # name → actor, time of the first call

    def __contains__(self, name: Hashable) -> bool:
        return name in self._actors

    @property
    def refs(self) -> list[Any]:
        """Refs of the open calls."""
        return list(self._asked)

    def begin(self, name: Hashable, actor: Any) -> None:
        self._actors[name] = (actor, time.monotonic())
        self._ask(name)

    def forget(self, name: Hashable) -> None:
        self._actors.pop(name, None)

    def overdue(self) -> list[Any]:
        """Names of actors that were unreachable for too long, each returned once. Their last calls may be open."""
        late = [name for name, (_, since) in self._actors.items() if time.monotonic() - since >= KNOWN_AFTER_S]
        for name in late:
            del self._actors[name]
        return late

    def heard(self, ref: Any) -> tuple[Any, RayError | None] | None:
        """Return the name and the cause of death (None: it is alive) for a completed ref.

        Returns None if it is still unknown whether the actor is alive, or if the actor was forgotten.
        """
        name = self._asked.pop(ref)
        if name not in self._actors:
            return None
        died: RayError | None = None
        try:
            ray.get(ref)
        except ActorUnavailableError:
            self._ask(name)  # no busy loop: Ray takes one or two seconds for such an answer
            return None
        except RayError as e:
            died = e
        del self._actors[name]
        return name, died

    def _ask(self, name: Hashable) -> None:
        self._asked[self._actors[name][0].__ray_ready__.remote()] = name


def flushing(actors: Iterable[Any]) -> dict[Any, Any]:
    """Call ``flush`` of each actor. Returns ref → actor."""
    return {actor.flush.remote(): actor for actor in actors}


def wait_for_all(
    refs: Collection[Any], timeout: float | None, hurry: Callable[[], bool] | None = None
) -> tuple[list[Any], list[Any]]:
    """``ray.wait`` for all refs: (completed, open). Returns after ``timeout`` seconds, or when ``hurry`` returns
    true."""
    if not refs:
        return [], []
    if timeout is not None or hurry is None:
        return ray.wait(list(refs), num_returns=len(refs), timeout=None if timeout is None else max(timeout, 0.0))
    while True:
        there, late = ray.wait(list(refs), num_returns=len(refs), timeout=LOOK_EVERY_S)
        if not late or hurry():
            return there, late


def failures(
    calls: Mapping[Any, Any], timeout: float | None, hurry: Callable[[], bool] | None = None
) -> dict[Any, RayError]:
    """Wait (``wait_for_all``) for ``calls`` (ref → actor). Returns the actors whose calls failed, and their errors."""
    done, late = wait_for_all(calls, timeout, hurry)
    failed: dict[Any, RayError] = {}
    for ref in done:
        try:
            ray.get(ref)
        except RayError as e:
            log.warning("an actor did not answer: %s", reason_of(e))
            failed[calls[ref]] = e
    if late:
        log.warning("%d of %d actors did not answer in time", len(late), len(calls))
    return failed


def flush_until_known(
    actors: Iterable[Any], given_up: Collection[Any] = (), hurry: Callable[[], bool] | None = None
) -> dict[Any, RayError]:
    """Flush ``actors``. Returns the actors that could not be flushed, and their errors.

    Flushes an unreachable actor again until it answers or Ray reports its death: it may be alive, and may still store
    its pages. Calls actors in ``given_up`` only once. When ``hurry`` returns true, the wait ends, and the result has no
    unreachable actors.
    """
    end = time.monotonic() + KNOWN_AFTER_S
    failed: dict[Any, RayError] = {}
    left = list(actors)
    while left:
        failed |= failures(flushing(left), None, hurry)
        late = time.monotonic() >= end
        left = [a for a in left if isinstance(failed.get(a), ActorUnavailableError) and not late and a not in given_up]
        for actor in left:
            del failed[actor]
        if hurry is not None and hurry():
            break
    return failed
