"""What a server's objects say of their end: objects and failure markers with a time to live, and their markers.

A server never ends, so its objects may carry ``expires`` (``ttl_seconds`` of the connector). Nothing is ever removed
that does not carry it; a run's parts never do.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from hsx_dist.errors import ConfigError, Denied, FormatError, NotFound
from hsx_dist.format.container import Part
from hsx_dist.format.json_objects import number, read_json
from hsx_dist.format.markers import LOCK, MARKERS, lock_name, marked_name
from hsx_dist.format.place import find_place
from hsx_dist.reading.object_lock import exclusive_lock
from hsx_dist.store import ObjectInfo, Store
from hsx_dist.store.base import Conditional, Folders, check_name, not_conditional


def readable(store: Store, unreadable: Callable[[str], None]) -> Iterator[ObjectInfo]:
    """The store's objects, without folders that this process may not read: ``unreadable`` is called with their names.

    For objects that are judged one by one. Where a missing object means something, as in a run, use ``Store.list``.
    """
    return store.list_readable(unreadable) if isinstance(store, Folders) else store.list()


def expired(
    store: Store, now: float | None = None, *, unreadable: Callable[[str], None] = lambda _: None
) -> Iterator[tuple[str, float]]:
    """(name, when it expired in seconds since the epoch) of objects and markers under the store's URL, as listed.

    Objects that cannot be read as ours, and folders that cannot be read, are left alone: see ``readable``.

    Raises:
        ConfigError: there is a run at the URL.
        StoreError: the store's.
    """
    if find_place(store) is not None:
        raise ConfigError(
            f"{store.url}: expected a prefix under which a server stores, got a run, whose parts do not expire. Remove "
            "the run as a whole, or name another prefix"
        )
    now = time.time() if now is None else now
    for info in readable(store, unreadable):
        if info.name.endswith(LOCK):
            continue
        end = _end(store, info.name, info.size)
        if end is not None and end <= now:
            yield info.name, end


def is_expired(store: Store, name: str) -> bool:
    """Whether there is an object or marker of this name that has expired."""
    end = _end(store, name)
    return end is not None and end <= time.time()


def _end(store: Store, name: str, size: int | None = None) -> float | None:
    """When the object or marker expires, in seconds since the epoch; None: never, or it cannot be read as ours."""
    try:
        ends: list[Any]
        if name.endswith(MARKERS):
            check_name(marked_name(name))  # ``.failed.json`` is the marker of no object
            ends = [read_json(store, name).get("expires")]
        else:
            segments = [info.segment for info in Part.open(store, name, size=size).segments]
            ends = [s.meta.get("expires") for s in segments if s.column == 0]  # it is said once a sample
    except (Denied, FormatError, NotFound, ValueError):
        return None
    return max(map(float, ends)) if ends and all(number(end) is None for end in ends) else None


def _hides(store: Store, marker: str) -> bool:
    """Whether readers raise because of the marker although there is an object."""
    try:
        if read_json(store, marker).get("until_stored") is True:
            return False
        store.head(marked_name(marker))
    except FormatError:  # replaced since it was read as ours
        return True
    except NotFound:
        return False
    return True


def require_conditional_deletes(store: Store) -> None:
    """Check on a probe object that the store spares an object which was stored anew: some servers ignore the condition.

    Raises:
        StoreError: it does not.
    """
    name = f".hsx-probe-{uuid.uuid4().hex}"
    works = False
    try:
        if isinstance(store, Conditional):
            store.put(name, [b"old"])
            old = store.version(name)
            store.put(name, [b"new"])
            spared = not store.delete_version(name, old) and store.get(name) == b"new"
            store.delete_version(name, store.version(name))  # False also where its answer was lost
            works = spared and not any(store.list(name))
    except NotFound:
        pass
    finally:
        if not works:
            store.delete(name)
    if not works:
        raise not_conditional(store.url)


def remove(store: Store, name: str, now: float | None = None) -> bool:
    """Delete an object or marker if it has expired, and the lock file next to an object; whether it was deleted.

    A marker that hides an object stays as long as the object: without the marker, readers of a request that failed or
    conflicted would get the object, which is another request's.

    A server may store the name anew at any moment. The version is read before the end, and the delete is conditional on
    that version, so no order of events deletes an object that has not expired:

    - S3 and GCS refuse the delete of another version (``require_conditional_deletes`` makes sure of it).
    - In a folder puts and the delete exclude each other (``store.inode_lock``), also between machines where the file
      system passes locks on. Puts of a user who may replace the object but not write it exclude deletes, and not each
      other. The object's lock file is locked meanwhile, so no lock file of a server is removed; an object that a server
      or a reader holds is left for the next call.

    Raises:
        StoreError: the store's, and where it has no conditional deletes.
    """
    now = time.time() if now is None else now
    if not isinstance(store, Conditional):
        raise not_conditional(store.url)
    is_object = not name.endswith(MARKERS)
    local = is_object and "://" not in store.url
    try:
        with exclusive_lock(store.url, name) if local else nullcontext(False) as has_lock:
            version = store.version(name)
            end = _end(store, name)
            if end is None or end > now or (not is_object and _hides(store, name)):
                return False
            if not store.delete_version(name, version):
                return False
            if has_lock:
                store.delete(lock_name(name))
    except NotFound:  # in use, or gone meanwhile
        return False
    return True
