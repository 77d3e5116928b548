"""Actors out of reach.

Ray fails the calls of a connection a second after it broke (``ActorUnavailableError``). That a node is dead, and its
actors with it, Ray knows when the node has missed its health checks: by its defaults 15 s later where connections are
refused, 65 s where nothing answers. Whether an actor died, and of what, is not known before.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

#: How long Ray may take to know: then whoever cannot be reached is given up.
KNOWN_AFTER_S = 90.0


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

    def heard(self, ref: Any) -> tuple[Any, RayError | None] | None:
        """Of one of ``refs`` that is there: who it is, and what it died of (None: it lives). None while that is not
        known, and when nobody wants to know."""
        name = self._asked.pop(ref)
        if name not in self._actors:
            return None
        died: RayError | None = None
        try:
            ray.get(ref)
        except ActorUnavailableError as e:
            if time.monotonic() - self._actors[name][1] < KNOWN_AFTER_S:
                self._ask(name)  # Ray takes a second to answer, and more where it waits for the connection
                return None
            died = e
        except RayError as e:
            died = e
        del self._actors[name]
        return name, died

    def _ask(self, name: Hashable) -> None:
        self._asked[self._actors[name][0].__ray_ready__.remote()] = name


def wait_until_known(actors: Sequence[Any]) -> None:
    """Until each of ``actors`` lives, is dead, or was out of reach for too long."""
    inquiry = Inquiry()
    for number, actor in enumerate(actors):
        inquiry.begin(number, actor)
    end = time.monotonic() + KNOWN_AFTER_S
    while (refs := inquiry.refs) and (left := end - time.monotonic()) > 0:
        for ref in ray.wait(refs, num_returns=1, timeout=left)[0]:
            inquiry.heard(ref)
