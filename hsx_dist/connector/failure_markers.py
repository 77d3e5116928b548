"""Markers next to the objects of a bare connector. Background threads store them; steps only queue them.

One thread at a time works on a name. The latest call decides a name's failure marker; a conflict marker stays.
``format.markers`` defines how objects and markers relate. The bytes that wait for the store are bounded in total. For a
name they are bounded regardless of the number of its requests. No call waits for the store.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from hsx_dist.connector.locks import ObjectLocks
from hsx_dist.errors import FormatError, HsxError, NotFound, Unavailable
from hsx_dist.format.expires import STILL_THERE_S, expires_by
from hsx_dist.format.identity import is_of_another
from hsx_dist.format.json_objects import MAX_JSON_BYTES, get_small
from hsx_dist.format.markers import (
    conflict_name,
    is_conflict,
    is_of_a_key,
    marker_name,
)
from hsx_dist.format.origin import origin_of
from hsx_dist.logger import get_logger
from hsx_dist.page import object_name
from hsx_dist.store import Store
from hsx_dist.text import bounded
from hsx_dist.writers.daemon import DaemonPool

log = get_logger(__name__)

#: Number of threads in each of two pools: for failures and conflicts, and for stored samples. A client can cheaply send
#: requests that fail. A separate pool keeps these from delaying stored samples.
_THREADS = 4
#: Limit of the bytes that wait for a slow store. Beyond it a marker is not stored, and an error is logged. Failure
#: markers may use three quarters of the limit, since a client can cheaply send requests that fail.
_MOST_BYTES = 64 << 20
#: Characters of a key that a marker shows. The object name of a longer key contains the key's digest.
KEY_SHOWN = 128
#: Estimated bytes of a waiting name, without its markers.
_NAME_BYTES = 1 << 10
#: Seconds between two retry rounds of markers that the store refused. The first retry is in the next round. Later
#: pauses double, up to ``_DOUBLED`` times.
_AGAIN_S = 5.0
_DOUBLED = 4
#: Number of retries for a key whose object is damaged when it is read. Later its failure marker hides the object.
_DAMAGED = 5
#: Limit of the names whose refused marker is retried. Each keeps its lock, which is an open file.
_MOST_KEPT = 256
#: Limit of the remembered names that this process has marked. A later request of such a name removes its marker.
_REMEMBERED = 65536
#: Hashes of failed requests kept for a name. Of two different hashes, at least one differs from the object's request.
ENOUGH_FAILED = 2


@dataclass(slots=True)
class _Act:
    """Pending changes of one name's markers, merged over any number of requests.

    ``markers``: name → the marker to store, None to remove it; at most the failure and the conflict marker.
    ``failed``: hash → key of requests that store nothing. ``looks``: the samples of all merged requests are stored.
    ``clears``: a later request uses the name, so the object is not compared with requests that failed before.
    """

    markers: dict[str, bytes | None]
    failed: dict[str, str]
    looks: bool = False
    clears: bool = False

    def and_then(self, later: _Act) -> _Act:
        before = {} if later.clears else self.failed
        failed = islice((before | later.failed).items(), ENOUGH_FAILED)
        clears = self.clears or later.clears
        return _Act(self.markers | later.markers, dict(failed), self.looks and later.looks, clears)

    @property
    def only_removes(self) -> bool:
        """Whether the changes only remove markers: without them at most an outdated failure marker remains."""
        return not self.failed and not any(self.markers.values())

    @property
    def nbytes(self) -> int:
        keys = 4 * sum(map(len, self.failed.values()))
        return _NAME_BYTES + keys + sum(len(body) for body in self.markers.values() if body)


@dataclass(slots=True)
class _PendingName:
    """A name with pending changes of its markers.

    ``act``: changes that no thread has begun. ``ticket``: a thread must present it to begin; None while a thread works
    on the name, or while the name waits for a retry. ``ahead``: a thread for stored samples may begin. ``holder``: the
    request that holds the lock for all waiting requests of the name. ``stored``: one of these is stored. ``after``:
    called when the first act is done. ``ended``: no changes are left. ``of_a_key``: the name is a key's, not a path;
    kept here, because some paths take a millisecond to compare.
    """

    of_a_key: bool

    act: _Act | None = None
    ticket: object = None
    ahead: bool = False
    holder: str = ""
    stored: bool = False
    after: Callable[[], None] | None = None
    refused: int = 0  # number of times that the store refused
    due: float = 0.0  # time of the next retry
    ended: bool = False


class Markers:
    """Failure and conflict markers of names under ``store``. Thread-safe; no call waits for the store.

    ``holder`` is a request that has ended. Its lock is held until the store has the changes of that call. A marker that
    the store refuses is retried later: see ``_MOST_KEPT``.
    """

    def __init__(
        self,
        store: Store,
        ttl: float | None = None,
        about: Mapping[str, Any] | None = None,
        locks: ObjectLocks | None = None,
    ):
        """``about``: the description of the model in this server's objects."""
        self._store = store
        self._ttl = ttl
        self._about = about or {}
        self._locks = locks
        self._lock = threading.Lock()
        self._names: dict[str, _PendingName] = {}
        self._bytes = 0  # of all acts that no thread has begun
        self._kept: dict[str, _PendingName] = {}  # names whose changes the store refused, waiting for a retry
        self._running = 0  # names that a thread works on, or that are queued for a thread
        self._marked: OrderedDict[str, None] = OrderedDict()
        self._trying = False
        self._closed = False
        self._failures = DaemonPool(_THREADS, "hsx-mark")
        self._looks = DaemonPool(_THREADS, "hsx-look")

    def fail(self, key: str, name: str, reason: str, *, requests: Iterable[str] = (), holder: str = "") -> None:
        """Store the failure marker of ``name``.

        If one of ``requests`` (hashes) is not the request of a key's object, store the conflict marker instead.
        """
        with self._lock:
            self._marked[object_name(name)] = None  # a path may be long
            if len(self._marked) > _REMEMBERED:
                self._marked.popitem(last=False)
        more = {"until_stored": True} if is_of_a_key(name) else {}
        markers: dict[str, bytes | None] = {marker_name(name): self._body(key, reason, **more)}
        self._put(name, _Act(markers, _failed(key, name, requests)), holder)

    def conflict(self, key: str, name: str, reason: str, *, holder: str = "") -> None:
        """Store the conflict marker of ``name``."""
        self._put(name, _Act({conflict_name(name): self._body(key, reason, conflict=True)}, {}), holder)

    def clear(self, name: str) -> None:
        """Remove the failure marker that this process remembers or makes, because a later request uses ``name``.

        Call it before the later request's object can be stored. Otherwise that object, compared with the earlier
        request, would be a conflict.
        """
        with self._lock:
            failed = self._marked.pop(object_name(name), self) is None or name in self._names
        if failed:
            self._put(name, _Act({marker_name(name): None}, {}, clears=True))

    def stored(
        self,
        key: str,
        name: str,
        *,
        requests: Iterable[str] = (),
        holder: str = "",
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Remove the failure marker of ``name``, whose object is stored. Other arguments: as for ``fail``.

        ``after`` is called after the first try to remove the marker, or at once if the name already has pending
        changes. It releases the caller's claim, which bounds the number of waiting names.
        """
        self._unmark(name)
        self._put(name, _Act({marker_name(name): None}, _failed(key, name, requests), looks=True), holder, after)

    @property
    def pending(self) -> int:
        """Number of names with queued or running changes. Names that wait for a retry do not count."""
        return self._running

    def close(self) -> list[str]:
        """Refuse further changes. Returns the names whose changes are not stored yet."""
        with self._lock:
            self._closed = True
            left = sorted(self._names)
        self._failures.close(wait=False)
        self._looks.close(wait=False)
        return left

    def _unmark(self, name: str) -> None:
        with self._lock:
            self._marked.pop(object_name(name), None)

    def _body(self, key: str, reason: str, **more: bool) -> bytes:
        body: dict[str, Any] = {"key": key[:KEY_SHOWN], "error": bounded(reason), **more}
        if self._ttl is not None:
            body["expires"] = round(time.time() + self._ttl)
        return json.dumps(body).encode()

    def _put(self, name: str, act: _Act, holder: str = "", after: Callable[[], None] | None = None) -> None:
        """``after``: see ``stored``."""
        markers = act.markers
        with self._lock:
            entry = self._names.get(name)
            # A stored sample's change is never refused: an earlier marker may hide the sample. ``after`` bounds these.
            most = _MOST_BYTES if conflict_name(name) in markers else _MOST_BYTES * 3 // 4
            refused = self._closed or (entry is None and not act.looks and self._bytes >= most)
            if not refused:
                if idle := entry is None:
                    entry = self._names[name] = _PendingName(is_of_a_key(name), after=after)
                    after = None
                entry.holder = entry.holder or holder
                entry.stored |= act.looks
                self._set(entry, act if entry.act is None else entry.act.and_then(act))
                if idle or self._kept.pop(name, None) is not None:
                    self._start(name, entry)
                elif act.looks and entry.ticket is not None and not entry.ahead:
                    # The name waits in the pool for failures. Queue it in the other pool too: the first free thread
                    # of either pool begins.
                    entry.ahead = True
                    self._looks.submit(self._work, name, entry.ticket)
        if after is not None:
            after()
        if refused or entry is None:
            if any(markers.values()):
                log.error(
                    "no failure marker is stored for %s: too many wait for the store, or the engine ends. Check the "
                    "store",
                    name,
                )
            self._release(holder, stored=act.looks)
        elif self._locks is not None and holder and holder != entry.holder:
            self._locks.pass_on(holder, entry.holder)
            with self._lock:
                late = entry.ended
            if late:  # a thread has stored this change too, and released the lock before ``pass_on``
                self._release(entry.holder, stored=entry.stored)

    def _set(self, entry: _PendingName, act: _Act | None) -> None:
        self._bytes += (act.nbytes if act else 0) - (entry.act.nbytes if entry.act else 0)
        entry.act = act

    def _start(self, name: str, entry: _PendingName) -> None:
        self._running += 1
        entry.ticket, entry.ahead = object(), entry.act is not None and entry.act.looks
        (self._looks if entry.ahead else self._failures).submit(self._work, name, entry.ticket)

    def _work(self, name: str, ticket: object) -> None:
        with self._lock:
            entry = self._names.get(name)
            if entry is None or entry.ticket is not ticket:
                return  # a thread of the other kind has begun
            act, entry.ticket = entry.act, None
            assert act is not None
            self._set(entry, None)
        try:
            self._do(name, act, entry)
            done = True
        except Exception as e:
            done = False
            level = logging.DEBUG if entry.refused else logging.ERROR
            unknown = not isinstance(e, HsxError)
            log.log(level, "the markers of %s could not be stored or removed: %s", name, e, exc_info=unknown)
        ended = None
        with self._lock:
            after, entry.after = entry.after, None
            again = entry.act is not None
            # Without the lock, readers could get an earlier object or none: hold it until the store has all changes.
            if not done and not self._closed:
                self._set(entry, act if entry.act is None else act.and_then(entry.act))
                entry.refused += 1
                if not again:
                    ended = self._keep(name, entry)
            elif not again:
                ended = self._ended(name)
            if again:
                self._start(name, entry)
        if after is not None:
            after()
        if ended is not None:
            self._release(ended.holder, stored=ended.stored)
        with self._lock:
            self._running -= 1

    def _ended(self, name: str) -> _PendingName:
        entry = self._names.pop(name)
        self._set(entry, None)
        entry.ended = True
        return entry

    def _keep(self, name: str, entry: _PendingName) -> _PendingName | None:
        """Schedule a retry of a name. If too many wait for a retry, drop one and return it."""
        entry.due = time.monotonic() + _AGAIN_S * (2 ** min(entry.refused - 1, _DOUBLED) - 1)
        self._kept[name] = entry
        if not self._trying:
            self._trying = True
            threading.Thread(target=self._try_again, name="hsx-mark-again", daemon=True).start()
        if len(self._kept) <= _MOST_KEPT:
            return None
        worst = max(self._kept, key=self._cheapness)
        log.error(
            "no failure marker is stored for %s: the store refuses the markers of too many names. Check the store",
            worst,
        )
        del self._kept[worst]
        return self._ended(worst)

    def _cheapness(self, name: str) -> tuple[bool, bool, int, float]:
        """Return a sort key. The name with the largest sort key is dropped first.

        Names are dropped in this order:

        1. Names of keys whose changes only remove a marker. An outdated marker of a key hides no object.
        2. Paths, since the store may never accept a path.
        3. Names that the store refused most often, since a brief failure ends at the next retry.
        4. Names whose next retry is last.
        """
        entry = self._kept[name]
        only_removes = entry.act is not None and entry.act.only_removes
        return only_removes and entry.of_a_key, not entry.of_a_key, entry.refused, entry.due

    def _try_again(self) -> None:
        while True:
            time.sleep(_AGAIN_S)
            with self._lock:
                if self._closed or not self._kept:
                    self._trying = False
                    return
                now = time.monotonic()
                for name in [name for name, entry in self._kept.items() if entry.due <= now]:
                    self._start(name, self._kept.pop(name))

    def _do(self, name: str, act: _Act, entry: _PendingName) -> None:
        """Make the changes of ``act``. Raises for a damaged object, at first also if a failure marker hides it."""
        again = entry.refused < _DAMAGED
        conflict, failure = conflict_name(name), marker_name(name)
        if body := act.markers.get(conflict):
            self._store.put(conflict, [body])
        if failure in act.markers and not self._replace(failure, act.markers[failure], again):
            return
        # After the put: either this read finds another server's object, or that server finds this marker.
        if act.failed:
            try:
                stored = origin_of(self._store, name)
            except NotFound:
                return
            except FormatError:
                # The object may be another request's. Until it can be read, a failure hides it.
                if not (failed := act.markers.get(failure)):
                    raise
                self._replace(failure, _hiding(failed), again)
                if again:
                    raise
                return
            with self._lock:
                if entry.act is not None and entry.act.clears:
                    return  # the object may be the later request's
            failed = act.markers.get(failure)
            kept = None
            ends = expires_by(stored.meta, time.time() + STILL_THERE_S)
            for request, key in act.failed.items():
                other = is_of_another(stored, request, self._about)
                if other:
                    self._store.put(conflict, [self._body(key, used_before(key), conflict=True)])
                    break
                if other is None:
                    kept = failed and _hiding(failed)
                elif ends:  # the marker must end a reader's wait once the object has expired
                    kept = kept or failed
            self._replace(failure, kept, again)

    def _replace(self, marker: str, body: bytes | None, again: bool) -> bool:
        """Store or remove a failure marker. Returns False if an earlier version left a conflict marker there, which
        stays. ``again``: raise ``Unavailable`` for a gateway's page, which may be in place of a conflict marker."""
        try:
            there = get_small(self._store, marker, MAX_JSON_BYTES)
        except NotFound:
            there = None
        except FormatError:
            there = b"{}"  # too large for a marker of any version
        if again and there is not None and not there.startswith(b"{"):
            raise Unavailable(
                f"{self._store.url}/{marker}: expected a JSON object, got other bytes. Check that the store answers"
            )
        if there is not None and is_conflict(there):
            return False
        if body is not None:
            self._store.put(marker, [body])
        elif there is not None:
            self._store.delete(marker)
        return True

    def _release(self, holder: str, *, stored: bool) -> None:
        if self._locks is not None and holder:
            try:
                self._locks.release(holder, stored=stored)
            except Exception:
                log.exception("the lock of request %s could not be released after its marker was stored", holder)


def _failed(key: str, name: str, requests: Iterable[str]) -> dict[str, str]:
    # Objects at a path are replaced, so an object of another request is no conflict there.
    return dict.fromkeys(islice(requests, ENOUGH_FAILED), key[:KEY_SHOWN]) if is_of_a_key(name) else {}


def _hiding(marker: bytes) -> bytes:
    """Return the failure marker without ``until_stored``: readers raise even if there is an object."""
    body = json.loads(marker)
    body.pop("until_stored", None)
    return json.dumps(body).encode()


def used_before(key: str) -> str:
    """Return the reason that refuses a key which another sample has used."""
    return f"the key {key[:KEY_SHOWN]!r} was used before for another sample. Ask again with another key"
