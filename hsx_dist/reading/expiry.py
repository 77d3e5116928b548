"""What a server's objects say of their end: objects and failure markers with a time to live, and their companions.

A server never ends, so its objects may carry ``expires`` (``ttl_seconds`` of the connector). Nothing is ever removed
that does not carry it; a run's parts never do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

from hsx_dist.errors import ConfigError, FormatError, NotFound
from hsx_dist.format.companions import LOCK, MARKERS, lock_name
from hsx_dist.format.container import Part
from hsx_dist.format.manifest import RUN
from hsx_dist.store import Store

_LARGEST_MARKER = 1 << 20


def expired(store: Store, now: float | None = None) -> Iterator[tuple[str, float]]:
    """(name, when it expired in seconds since the epoch) of objects and markers under the store's URL, as listed.

    Objects that cannot be read as ours are left alone.

    Raises:
        ConfigError: there is a run at the URL.
        StoreError: the store's.
    """
    try:
        store.head(RUN)
    except NotFound:
        pass
    else:
        raise ConfigError(
            f"{store.url}: expected a prefix under which a server stores, came a run, whose parts do not expire; "
            "remove the run as a whole, or name another prefix"
        )
    now = time.time() if now is None else now
    for info in store.list():
        if info.name.endswith(MARKERS) and info.size <= _LARGEST_MARKER:
            end = _of_marker(store, info.name)
        elif info.name.endswith(LOCK):
            continue
        else:
            end = _of_object(store, info.name)
        if end is not None and end <= now:
            yield info.name, end


def _of_object(store: Store, name: str) -> float | None:
    try:
        ends = [s.segment.meta.get("expires") for s in Part.open(store, name).segments]
    except (FormatError, NotFound, ValueError):
        return None  # not ours, or gone meanwhile
    if not ends or not all(isinstance(e, (int, float)) and not isinstance(e, bool) for e in ends):
        return None
    return float(max(e for e in ends if e is not None))


def _of_marker(store: Store, name: str) -> float | None:
    try:
        end = json.loads(store.get(name))["expires"]
    except (NotFound, ValueError, KeyError, TypeError, RecursionError):
        return None
    return float(end) if isinstance(end, (int, float)) and not isinstance(end, bool) else None


def remove(store: Store, name: str) -> None:
    """Delete an object or marker, and the lock file beside an object.

    Raises:
        StoreError: the store's.
    """
    store.delete(name)
    if not name.endswith(MARKERS):
        store.delete(lock_name(name))
