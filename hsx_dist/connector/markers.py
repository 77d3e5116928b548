"""Markers next to the objects of a bare connector, stored by threads of their own: steps only say what to store.

One thread at a time works on a name. Of a name's failure marker the latest call decides; a conflict marker stays. The
rule between objects and markers is in ``format.companions``.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hsx_dist.errors import FormatError, HsxError, NotFound
from hsx_dist.format.companions import conflict_name, is_conflict, is_of_a_key, marker_name
from hsx_dist.format.container import Part
from hsx_dist.format.identity import is_of_another
from hsx_dist.format.json_objects import MAX_JSON_BYTES, get_small
from hsx_dist.logger import get_logger
from hsx_dist.store import Store
from hsx_dist.text import bounded
from hsx_dist.writers.daemon import DaemonPool

log = get_logger(__name__)

_THREADS = 4
#: How many names wait for a store that is slow, at most; what comes on top is not told, but logged.
_MOST_WAITING = 65536
#: A thread that stores waits while more names than this are to be looked at, so that they do not pile up.
_MANY = 256
#: Seconds after which a marker that the store refused is stored again.
_AGAIN_S = 5.0
#: How many requests whose marker the store refused keep their locks, each an open file.
_MOST_KEPT = 256
#: Names marked by this process that are remembered: a later request of one takes its marker away at once.
_REMEMBERED = 65536


@dataclass(slots=True)
class _Act:
    """What is to be done for one name.

    ``markers``: name → the marker to store, None to remove it. ``failed``: hash of a request of which nothing is stored
    → the conflict marker to store if there is an object of another request.
    """

    markers: dict[str, bytes | None]
    failed: dict[str, bytes]
    then: list[Callable[[], None]]

    def and_then(self, later: _Act) -> _Act:
        return _Act(self.markers | later.markers, self.failed | later.failed, self.then + later.then)


class Markers:
    """What was told of names under ``store``. Thread-safe; only ``clear(patient=True)`` may wait."""

    def __init__(self, store: Store, ttl: float | None = None, about: Mapping[str, Any] | None = None):
        """``about``: what this server's objects say of the model."""
        self._store = store
        self._ttl = ttl
        self._about = about or {}
        self._lock = threading.Condition()
        self._waiting: dict[str, _Act] = {}
        self._busy: set[str] = set()  # names that a thread works on or will
        self._marked: OrderedDict[str, None] = OrderedDict()
        self._kept: dict[str, _Act] = {}  # what the store refused, and is tried again
        self._trying = False
        self._closed = False
        self._pool = DaemonPool(_THREADS, "hsx-mark")

    def fail(
        self,
        key: str,
        name: str,
        reason: str,
        *,
        requests: Iterable[str] = (),
        then: Callable[[], None] | None = None,
    ) -> None:
        """Store the failure marker of ``name``, or its conflict marker where there is an object of another request than
        ``requests`` (hashes); then call ``then``. A marker that the store refuses is stored again later: see
        ``_MOST_KEPT``."""
        with self._lock:
            self._marked[name] = None
            if len(self._marked) > _REMEMBERED:
                self._marked.popitem(last=False)
        more = {"until_stored": True} if is_of_a_key(name) else {}
        self._put(key, name, {marker_name(name): self._body(key, reason, **more)}, requests, then)

    def conflict(self, key: str, name: str, reason: str, *, then: Callable[[], None] | None = None) -> None:
        """Store the conflict marker of ``name``; then call ``then``, as ``fail`` does."""
        self._put(key, name, {conflict_name(name): self._body(key, reason, conflict=True)}, (), then)

    def clear(
        self,
        key: str,
        name: str,
        *,
        requests: Iterable[str] = (),
        then: Callable[[], None] | None = None,
        patient: bool = False,
    ) -> None:
        """Remove the failure marker of ``name``; otherwise as ``fail``. ``patient``: wait while many others wait."""
        with self._lock:
            self._marked.pop(name, None)
            while patient and len(self._busy) >= _MANY and not self._closed:
                self._lock.wait(1.0)
        self._put(key, name, {marker_name(name): None}, requests, then)

    def failed(self, name: str) -> bool:
        """Whether this process has marked the name, as far as it remembers; conflicts do not count."""
        with self._lock:
            return name in self._marked

    @property
    def pending(self) -> int:
        """Names of which something is still to be told."""
        return len(self._busy)

    def close(self) -> list[str]:
        """Take no more; the names of which what was to be told is not told yet."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
            left = sorted(self._busy)
        self._pool.close(wait=False)
        return left

    def _body(self, key: str, reason: str, **more: bool) -> bytes:
        body: dict[str, Any] = {"key": key, "error": bounded(reason), **more}
        if self._ttl is not None:
            body["expires"] = round(time.time() + self._ttl)
        return json.dumps(body).encode()

    def _put(
        self,
        key: str,
        name: str,
        markers: dict[str, bytes | None],
        requests: Iterable[str],
        then: Callable[[], None] | None,
    ) -> None:
        # A path's objects are replaced: that there is another request's is no conflict.
        failed = {r: self._body(key, used_before(key), conflict=True) for r in requests if is_of_a_key(name)}
        act = _Act(markers, failed, [then] if then else [])
        with self._lock:
            before = self._waiting.get(name) or self._kept.pop(name, None)
            refused = self._closed or (before is None and len(self._waiting) >= _MOST_WAITING)
            if not refused:
                if before is not None:
                    act = before.and_then(act)
                self._waiting[name] = act
            start = not refused and name not in self._busy
            if start:
                self._busy.add(name)
        if start:
            self._pool.submit(self._work, name)
        elif refused:
            if any(markers.values()):
                log.error("no failure marker is stored for %s: too many wait for the store, or it is the end", name)
            _call(act.then)

    def _work(self, name: str) -> None:
        with self._lock:
            act = self._waiting.pop(name)
        try:
            self._do(name, act)
            done = True
        except Exception as e:
            done = False
            log.error(
                "the markers of %s could not be stored or removed: %s", name, e, exc_info=not isinstance(e, HsxError)
            )
        with self._lock:
            again = name in self._waiting
            # Without the marker, readers would get an earlier object: the lock stays until the marker is stored.
            kept = not done and any(act.markers.values()) and not self._closed and len(self._kept) < _MOST_KEPT
            if kept and again:
                self._waiting[name] = act.and_then(self._waiting[name])
            elif kept:
                self._kept[name] = act
                if not self._trying:
                    self._trying = True
                    threading.Thread(target=self._try_again, name="hsx-mark-again", daemon=True).start()
        if not kept:
            _call(act.then)
        with self._lock:
            again = name in self._waiting
            if not again:
                self._busy.discard(name)
            self._lock.notify_all()
        if again:
            self._pool.submit(self._work, name)

    def _try_again(self) -> None:
        while True:
            time.sleep(_AGAIN_S)
            with self._lock:
                if self._closed or not self._kept:
                    self._trying = False
                    return
                names = [name for name in self._kept if name not in self._busy]
                self._waiting.update((name, self._kept.pop(name)) for name in names)
                self._busy.update(names)
            for name in names:
                self._pool.submit(self._work, name)

    def _do(self, name: str, act: _Act) -> None:
        conflict, failure = conflict_name(name), marker_name(name)
        if body := act.markers.get(conflict):
            self._store.put(conflict, [body])
        if failure in act.markers and not self._replace(failure, act.markers[failure]):
            return
        # After the put: of this look and another server's put of the object, one is the later.
        if act.failed:
            try:
                part = Part.open(self._store, name)
            except (NotFound, FormatError):
                return
            hidden = None
            for request, used in act.failed.items():
                match is_of_another(part, request, self._about):
                    case True:
                        self._store.put(conflict, [used])
                    case None:
                        hidden = act.markers.get(failure)
            self._replace(failure, None if hidden is None else _hiding(hidden))

    def _replace(self, marker: str, body: bytes | None) -> bool:
        """Store or remove a failure marker. False: an earlier version left a conflict marker there, which stays."""
        try:
            there = get_small(self._store, marker, MAX_JSON_BYTES)
        except NotFound:
            there = None
        if there is not None and is_conflict(there):
            return False
        if body is not None:
            self._store.put(marker, [body])
        elif there is not None:
            self._store.delete(marker)
        return True


def _hiding(marker: bytes) -> bytes:
    """A failure marker that also counts where there is an object."""
    body = json.loads(marker)
    body.pop("until_stored", None)
    return json.dumps(body).encode()


def used_before(key: str) -> str:
    """Why a key cannot stand for a second sample."""
    return f"the key {key!r} was used before for another sample; choose another"


def _call(then: list[Callable[[], None]]) -> None:
    for call in then:
        try:
            call()
        except Exception:
            log.exception("after a failure marker was told")
