"""Find and remove expired objects and markers of a server, and lock files without an object.

A server runs without end, so its objects may have an ``expires`` time (``ttl_seconds`` of the connector). Only objects
and markers with ``expires`` are removed. A run's parts never have it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from hsx_dist.errors import ConfigError, Denied, FormatError, NotFound, StoreError, Unavailable
from hsx_dist.format.container import Part
from hsx_dist.format.json_objects import number, read_json
from hsx_dist.format.markers import LOCK, MARKERS, OBJECT, is_marker, lock_name, marked_name
from hsx_dist.format.place import find_place
from hsx_dist.format.presence import exists
from hsx_dist.logger import get_logger
from hsx_dist.reading.garbage import require_gone
from hsx_dist.reading.object_lock import exclusive_lock
from hsx_dist.store import ObjectInfo, Store
from hsx_dist.store.base import Conditional, Folders, check_name, not_conditional, probed

log = get_logger(__name__)


class Failures:
    """Errors of single objects, which ``hsx gc`` logs. It leaves these objects, and continues.

    A store that is down fails for each object, after all retries. So the third error in a row that a retry could mend
    is raised.
    """

    _MOST = 3

    def __init__(self) -> None:
        #: Names of the objects with an error.
        self.names: list[str] = []
        self._in_a_row = 0

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Handle a ``StoreError`` other than ``Denied`` of the body, which reads or deletes the object ``name``."""
        try:
            yield
        except Denied:
            raise
        except StoreError as e:
            self._in_a_row += e.retryable
            if self._in_a_row == self._MOST:
                raise
            self.names.append(name)
            log.warning("gc leaves an object that has an error: name=%s error=%s", name, e)
        else:
            self._in_a_row = 0


def readable(store: Store, unreadable: Callable[[str], None]) -> Iterator[ObjectInfo]:
    """List the store's objects, and call ``unreadable`` with the name of each folder or link that cannot be read.

    Use it only if each object is handled alone. In a run, a missing object has a meaning: use ``Store.list`` there.
    """
    return store.list_readable(unreadable) if isinstance(store, Folders) else store.list()


def expired(
    store: Store,
    now: float | None = None,
    *,
    unreadable: Callable[[str], None] = lambda _: None,
    failures: Failures | None = None,
) -> Iterator[tuple[str, float]]:
    """Yield (name, expiry in seconds since the epoch) of the expired objects and markers under the store's URL.

    Skips objects that are not in this project's format, and objects with an error (``failures`` has their names).
    Calls ``unreadable`` with the names of objects that this user may not read, and of folders: see ``readable``.

    Raises:
        ConfigError: there is a run at the URL.
        StoreError: the store failed.
    """
    if find_place(store) is not None:
        raise ConfigError(
            f"{store.url}: expected a prefix that a server stores under, got a run, whose parts do not expire. Remove "
            "the whole run, or name another prefix"
        )
    now = time.time() if now is None else now
    failures = failures or Failures()
    for info in readable(store, unreadable):
        if info.name.endswith(LOCK):
            continue
        end = None
        try:
            with failures.of(info.name):
                end = _end(store, info.name, info.size)
        except Denied:
            unreadable(info.name)
        if end is not None and end <= now:
            yield info.name, end


def is_expired(store: Store, name: str, now: float) -> bool:
    """Whether an object or marker of this name exists and has expired at ``now``. Raises ``StoreError``."""
    end = _end(store, name)
    return end is not None and end <= now


def _end(store: Store, name: str, size: int | None = None) -> float | None:
    """Expiry of the object or marker in seconds since the epoch. ``None``: never, or not in this project's format."""
    try:
        ends: Iterable[Any]
        if name.endswith(MARKERS):
            check_name(marked_name(name))  # raises for ``.failed.json``, which marks no object
            found = read_json(store, name)
            ends = [found.get("expires") if is_marker(found) else None]
        else:
            segments = (info.segment for info in Part.open(store, name, size=size).segments)
            ends = (s.meta.get("expires") for s in segments if s.column == 0)  # the other columns do not repeat it
        return _latest(ends)
    except (FormatError, NotFound, ValueError):
        return None


def _latest(ends: Iterable[Any]) -> float | None:
    """The latest of the ``ends``. ``None`` if there are none, or one is no number.

    Keeps one of them: decoded metadata of all segments takes up to 44 times the memory of its text.
    """
    latest: float | None = None
    for end in ends:
        if number(end) is not None:
            return None
        latest = float(end) if latest is None else max(latest, float(end))
    return latest


def _hides(store: Store, marker: str) -> bool:
    """Whether readers raise because of the marker even if the object exists. ``True`` if that is not known."""
    try:
        return read_json(store, marker).get("until_stored") is not True and exists(store, marked_name(marker))
    except FormatError:  # replaced since ``_end`` read it
        return True
    except NotFound:  # the marker
        return False
    except StoreError as e:  # of this object alone, or the next call raises it too
        log.warning("gc cannot look at a marker's object, and leaves the marker: name=%s error=%s", marker, e)
        return True


def require_conditional_deletes(store: Store) -> None:
    """Check with a probe object that a conditional delete keeps an object that was stored again.

    Some servers ignore the condition.

    Raises:
        StoreError: the store ignores the condition, or has no conditional deletes.
        Unavailable: another service answered for the store.
    """
    name = f".hsx-probe-{uuid.uuid4().hex}"
    works = False
    try:
        if isinstance(store, Conditional):
            store.put(name, [b"old"])
            old = store.version(name)
            store.put(name, [b"new"])
            if store.delete_version(name, old):
                require_gone(store, {name}, (info.name for info in store.list(name)))
            probed(store, name)  # raises NotFound if the store ignores the condition
            if store.delete_version(name, store.version(name)):  # also False if only the store's answer was lost
                require_gone(store, {name}, (info.name for info in store.list(name)))
            works = not any(store.list(name))
    except NotFound:
        pass
    finally:
        if not works:
            store.delete(name)
    if not works:
        raise not_conditional(store.url)


def remove(store: Store, name: str, now: float | None = None) -> bool:
    """Delete an object or marker if it has expired, and an object's lock file. Return whether it was deleted.

    A marker that hides an object is deleted only after the object. Without the marker, readers of a request that failed
    or conflicted would get the object of another request.

    A server may store the same name again at any moment. The version is read before the expiry, and the delete is
    conditional on that version. Therefore no order of puts deletes an object that has not expired:

    - S3 and GCS refuse to delete another version. ``require_conditional_deletes`` checks this.
    - In a folder, puts and the delete exclude each other (``store.inode_lock``). They do so across machines if the file
      system supports locks there. Puts of a user who may replace the object but not write it exclude deletes, but not
      each other. A delete by another program, and a put behind it, are not excluded: docs/operations.md states this.
    - The delete holds the object's lock file, so that it never removes a lock file that a server holds. An object that
      a server or a reader holds is left for the next call. So is one whose lock file has an error, which is logged.

    Raises:
        Denied: this user may not read the lock file or the object, or not delete the object.
        StoreError: the store failed, or has no conditional deletes.
    """
    now = time.time() if now is None else now
    if not isinstance(store, Conditional):
        raise not_conditional(store.url)
    is_object = not name.endswith(MARKERS)
    has_lock_file: Callable[[], bool] | None = None
    try:
        with ExitStack() as held:
            if is_object and "://" not in store.url:
                try:
                    has_lock_file = held.enter_context(exclusive_lock(store.url, name))
                except Unavailable as e:  # of this object alone
                    log.warning("gc cannot lock an object, and leaves it: name=%s error=%s", name, e)
                    return False
            version = store.version(name)
            end = _end(store, name)
            if end is None or end > now or (not is_object and _hides(store, name)):
                return False
            if not store.delete_version(name, version):
                return False
            if has_lock_file is not None and has_lock_file():
                store.delete(lock_name(name))
    except NotFound:  # in use, or already deleted
        return False
    return True


def unused_locks(
    store: Store, older_than: float, unreadable: Callable[[str], None], failures: Failures
) -> Iterator[str]:
    """Yield lock files without an object that did not change within ``older_than`` seconds, if the store is a folder.

    A client that deletes an object, and an engine that is killed, leave a lock file. Only ``NAME.safetensors.lock`` is
    yielded, and only if it is empty: other programs have files that end in ``.lock`` too.
    """
    if "://" in store.url:
        return
    for info in readable(store, unreadable):
        if info.size or not info.name.endswith(lock_name(OBJECT)):
            continue
        try:
            changed = (Path(store.url) / info.name).lstat().st_mtime
        except OSError:  # removed since the listing
            continue
        unused = False
        with suppress(Denied), failures.of(info.name):  # Denied: there is an object
            unused = time.time() - changed >= older_than and not exists(store, info.name.removesuffix(LOCK))
        if unused:
            yield info.name


def remove_lock(store: Store, lock: str) -> bool:
    """Delete a lock file without an object, unless a process holds the lock. Return whether it was deleted.

    A server that opens the file at this moment notices that the file is gone, and makes another. vLLM's own connector
    does not notice it, so call this only for old files: that connector changes the file's time when it opens the file.

    Raises:
        Denied: this user may not read the lock file, or not delete it.
        StoreError: the store failed.
    """
    name = lock.removesuffix(LOCK)
    try:
        with exclusive_lock(store.url, name) as has_lock_file:
            # A server may have stored the object in the meantime: vLLM's reader then needs the lock file.
            if has_lock_file is None or exists(store, name) or not has_lock_file():
                return False
            store.delete(lock)
    except NotFound:  # in use
        return False
    return True
