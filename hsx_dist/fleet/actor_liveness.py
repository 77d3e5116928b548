"""Actors out of reach.

Ray fails the calls of a connection a second after it broke (``ActorUnavailableError``). That a node is dead, and its
actors with it, Ray knows when the node has missed its health checks: by its defaults (``ray_config_def.h``: 5 misses, a
check every 3 s that waits up to 10 s) some 15 s later where connections are refused, up to 65 s where nothing answers.
Whether an actor died, and of what, is not known before.
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

#: How long Ray may take to know: then whoever cannot be reached is given up.
KNOWN_AFTER_S = 90.0
#: How often whoever waits for as long as it takes looks whether that is still wanted.
LOOK_EVERY_S = 0.2


class Inquiry:
    """Asks actors for a sign of life until they give one, or Ray knows that they are dead."""

    def __init__(self) -> None:
        self._asked: dict[Any, Hashable] = {}  # ref of a call → whose
        self._actors: dict[Hashable, tuple[Any, float]] = {}  # whose → actor, and since when

    def __contains__(self, name: Hashable) -> bool:
        return name in self._actors

    @property
    def refs(self) -> list[Any]:
        """What to wait for."""
        return list(self._asked)

    def begin(self, name: Hashable, actor: Any) -> None:
        self._actors[name] = (actor, time.monotonic())
        self._ask(name)

    def forget(self, name: Hashable) -> None:
        self._actors.pop(name, None)

    def overdue(self) -> list[Any]:
        """Who was asked for too long, whether or not the last call has come back; each is told once."""
        late = [name for name, (_, since) in self._actors.items() if time.monotonic() - since >= KNOWN_AFTER_S]
        for name in late:
            del self._actors[name]
        return late

    def heard(self, ref: Any) -> tuple[Any, RayError | None] | None:
        """Of one of ``refs`` that is there: who it is, and what it died of (None: it lives). None while that is not
        known, and when nobody wants to know."""
        name = self._asked.pop(ref)
        if name not in self._actors:
            return None
        died: RayError | None = None
        try:
            ray.get(ref)
        except ActorUnavailableError:
            self._ask(name)  # not at once: Ray takes a second or two for such an answer
            return None
        except RayError as e:
            died = e
        del self._actors[name]
        return name, died

    def _ask(self, name: Hashable) -> None:
        self._asked[self._actors[name][0].__ray_ready__.remote()] = name


def flushing(actors: Iterable[Any]) -> dict[Any, Any]:
    """Calls of their ``flush``: ref → actor."""
    return {actor.flush.remote(): actor for actor in actors}


def wait_for_all(
    refs: Collection[Any], timeout: float | None, hurry: Callable[[], bool] | None = None
) -> tuple[list[Any], list[Any]]:
    """``ray.wait`` for all of them: (there, not yet). Ends after ``timeout`` seconds, or when ``hurry`` says so."""
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
    """Wait (``wait_for_all``) for ``calls`` (ref → actor); the actors whose calls failed by then, and why."""
    done, late = wait_for_all(calls, timeout, hurry)
    failed: dict[Any, RayError] = {}
    for ref in done:
        try:
            ray.get(ref)
        except RayError as e:
            log.warning("no answer: %s", reason_of(e))
            failed[calls[ref]] = e
    if late:
        log.warning("%d of %d actors did not answer in time", len(late), len(calls))
    return failed


def flush_until_known(
    actors: Iterable[Any], given_up: Collection[Any] = (), hurry: Callable[[], bool] | None = None
) -> dict[Any, RayError]:
    """Flush ``actors``; those that could not be, and why.

    Who is out of reach is flushed again until it says that it is, or it is known what became of it: it may live, and
    be about to store what it has. Those in ``given_up`` are asked once. Where ``hurry`` says so, nobody is waited for,
    and of those that are out of reach nothing is told.
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
