"""``hsx gc`` and ``hsx rm``: remove garbage, expired objects, and whole runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice

from hsx_dist.config import parse_storage_options
from hsx_dist.errors import Denied, NotFound, RunError
from hsx_dist.format.conditional_puts import require_conditional_puts
from hsx_dist.format.own_objects import run_objects
from hsx_dist.format.place import Place, find_place, is_description, leftovers
from hsx_dist.format.runs import count, load_manifest
from hsx_dist.logger import get_logger
from hsx_dist.observe.console import print_json, say
from hsx_dist.observe.units import bytes_text
from hsx_dist.reading.expiry import (
    Failures,
    expired,
    is_expired,
    readable,
    remove,
    remove_lock,
    require_conditional_deletes,
    unused_locks,
)
from hsx_dist.reading.garbage import left_behind, own_unfinished, remove_run, require_gone, unfinished, unproven
from hsx_dist.reading.liveness import require_dead
from hsx_dist.store import ObjectInfo, Store, open_store
from hsx_dist.store.prefix import PrefixStore

log = get_logger(__name__)

#: Age from which an unfinished put, or a lock file without an object, counts as abandoned. A running server may still
#: use a newer one.
_LONGEST_PUT_S = 86_400.0
#: Up to this many deleted objects are looked at one by one. For more, a listing of the whole prefix takes less time.
_FEW = 100
#: Limit of the objects that ``hsx rm`` without ``--yes`` names.
_MOST_SHOWN = 100


def run_gc(path: str, options: Sequence[str], *, delete: bool, watch: float, as_json: bool) -> None:
    """List a run's garbage or a server's expired objects, and remove them if ``delete``."""
    store = open_store(path, parse_storage_options(options))
    place = find_place(store)
    if place is not None:
        _gc_run(place, path, delete=delete, watch=watch, as_json=as_json)
        return
    if earlier := leftovers(store, removed_only=True):
        raise RunError(
            f"{path}: expected a run, or where a server stores, got an unfinished removal "
            f"({earlier[0] or 'manifest/, data/'}). Finish it with `hsx rm {path} --yes`"
        )
    _gc_served(store, path, delete=delete, as_json=as_json)


def _gc_served(store: Store, path: str, *, delete: bool, as_json: bool) -> None:
    unreadable: dict[str, None] = {}

    def skipped(name: str) -> None:
        if name not in unreadable:
            unreadable[name] = None
            log.warning("gc skips an object, folder or link that it cannot read: name=%s", name)

    if next(readable(store, skipped), None) is None and not unreadable:
        raise NotFound(f"{path}: expected a run, or where a server stores, got an empty place. Check the path")
    if delete:
        require_conditional_deletes(store)
    now = time.time()  # what a server stores during the call expires later
    names, busy, denied = _collect_expired(store, now, skipped, delete=delete, as_json=as_json)
    if delete:
        gone = set(names)
        looked = names if len(names) <= _FEW else (info.name for info in readable(store, skipped) if info.name in gone)
        require_gone(store, gone, (name for name in looked if _is_left(store, name, now, skipped)))
    locks, lock_errors = _collect_locks(store, skipped, delete=delete, as_json=as_json, denied=denied)
    busy += lock_errors
    dead = unfinished(store, _LONGEST_PUT_S, skipped)
    left = _collect(store, dead, "never finished", delete=delete, as_json=as_json, denied=denied)
    if as_json:
        found = {"expired": names, "unfinished": [info.name for info in left], "locks": locks}
        stay = {"unreadable": list(unreadable), "in_use": busy, "denied": denied}
        print_json({"path": path, "deleted": delete, **found, **stay})
        return
    for name in busy:
        say(f"stays {name}")
    say(f"{len(names):,} objects and markers {'removed' if delete else 'have expired; --delete removes them'}")
    if locks:
        say(f"{len(locks):,} lock files without an object{_what_happens(delete)}")
    _print_unfinished(left, delete=delete)
    if unreadable:
        say(
            f"{len(unreadable):,} objects, folders or links cannot be read, and were skipped: check mounts, or run gc "
            "as owner"
        )
    if busy:
        say(f"{len(busy):,} objects are in use or have an error, and stay: run gc again")
    if denied:
        say(f"{len(denied):,} files may not be removed by this user, and stay: run gc as their owner")


def _collect_expired(
    store: Store, now: float, skipped: Callable[[str], None], *, delete: bool, as_json: bool
) -> tuple[list[str], list[str], list[str]]:
    """Return the names that have expired (removed if ``delete``), that are in use, and that may not be removed.

    Objects with an error are among those in use. See ``Failures``.
    """
    names: list[str] = []
    busy: list[str] = []
    denied: list[str] = []
    # Two: in a store that fails all deletes, a read succeeds before each delete.
    of_reads, of_deletes = Failures(), Failures()

    def tried(name: str) -> bool:
        with of_deletes.of(name):
            try:
                if delete and not remove(store, name, now):
                    return False  # in use, or stored anew
            except Denied as e:
                _not_allowed(name, e, denied)
                return True
            names.append(name)
            if not as_json:
                say(f"{'removed' if delete else 'expired'} {name}")
        return True

    def stays(name: str) -> bool:
        is_left = False
        if not tried(name):
            with of_deletes.of(name):
                is_left = _is_left(store, name, now, skipped)
        return is_left

    for name, _ in expired(store, now, unreadable=skipped, failures=of_reads):
        if not tried(name):
            busy.append(name)
    busy = [name for name in busy if stays(name)]
    return names, busy + of_reads.names + of_deletes.names, denied


def _collect_locks(
    store: Store, skipped: Callable[[str], None], *, delete: bool, as_json: bool, denied: list[str]
) -> tuple[list[str], list[str]]:
    """Return the lock files without an object (removed if ``delete``), and those with an error.

    Adds the names that this user may not remove to ``denied``.
    """
    names: list[str] = []
    of_reads, of_deletes = Failures(), Failures()
    for name in unused_locks(store, _LONGEST_PUT_S, skipped, of_reads):
        try:
            with of_deletes.of(name):
                if not delete or remove_lock(store, name):
                    names.append(name)
                    if not as_json:
                        say(f"{'removed' if delete else 'unused'} {name}")
        except Denied as e:
            _not_allowed(name, e, denied)
    return names, of_reads.names + of_deletes.names


def _is_left(store: Store, name: str, now: float, skipped: Callable[[str], None]) -> bool:
    """``is_expired``. Skips an object that this user may not read: another process stored it anew."""
    try:
        return is_expired(store, name, now)
    except Denied:
        skipped(name)
        return False


def _not_allowed(name: str, error: Denied, denied: list[str]) -> None:
    denied.append(name)
    log.warning("gc may not remove a file: name=%s error=%s", name, error)


def _collect(
    store: Store,
    garbage: Iterable[ObjectInfo],
    why: str,
    *,
    delete: bool,
    as_json: bool,
    denied: list[str] | None = None,
) -> list[ObjectInfo]:
    """Return ``garbage``. Print each object with ``why``, and remove it if ``delete``.

    Adds the names that this user may not remove to ``denied`` instead. If ``denied`` is None, raises ``Denied``.
    """
    found = []
    for info in garbage:
        if delete:
            try:
                store.delete(info.name)
            except Denied as e:
                if denied is None:
                    raise
                _not_allowed(info.name, e, denied)
                continue
        found.append(info)
        if not as_json:
            say(f"{'removed' if delete else why} {info.name}")
    return found


def _print_unfinished(left: Sequence[ObjectInfo], *, delete: bool) -> None:
    if left:
        size = bytes_text(sum(info.size for info in left))
        say(f"{len(left):,} files that were never finished ({size}){_what_happens(delete)}")


def _what_happens(delete: bool) -> str:
    return " were removed" if delete else ". --delete removes them"


def _gc_run(place: Place, path: str, *, delete: bool, watch: float, as_json: bool) -> None:
    require_dead(place.store, watch_seconds=watch)
    if delete:
        require_conditional_puts(place.store)
    found = _collect(place.store, unproven(place, seal=delete), "no reader needs", delete=delete, as_json=as_json)
    earlier = _collect(place.root, left_behind(place.root), "of a removed run:", delete=delete, as_json=as_json)
    left = _collect(place.root, own_unfinished(place), "never finished", delete=delete, as_json=as_json)
    if delete:
        listed = place.store.list("data/") if found else ()
        require_gone(place.store, {info.name for info in found}, (info.name for info in listed))
        listed = left_behind(place.root) if earlier else ()
        require_gone(place.root, {info.name for info in earlier}, (info.name for info in listed))
    size = sum(info.size for info in found)
    if as_json:
        print_json(
            {
                "path": path,
                "deleted": delete,
                "garbage": [info.name for info in found],
                "bytes": size,
                "removed_runs": [info.name for info in earlier],
                "unfinished": [info.name for info in left],
            }
        )
        return
    say(f"{len(found):,} parts that no reader needs ({bytes_text(size)}){_what_happens(delete)}")
    if earlier:
        say(f"{len(earlier):,} objects of runs that were removed here{_what_happens(delete)}")
    _print_unfinished(left, delete=delete)


def run_rm(path: str, options: Sequence[str], *, yes: bool, watch: float) -> None:
    """Remove the run at ``path``. Without ``yes``, only print what would be removed."""
    root = open_store(path, parse_storage_options(options))
    place = find_place(root)
    if not yes and place is not None:
        with place.reading():
            counts = count(load_manifest(place.store))
        say(
            f"{path}: {counts['samples']:,} samples in {counts['parts']:,} parts, "
            f"{bytes_text(counts['stored_bytes'])}; --yes removes them"
        )
        return
    left = leftovers(root) if place is None else []
    if not yes and left:
        say(f"{path}: no run, but objects of runs without a description; --yes removes them")
        names = chain.from_iterable(run_objects(root, folder) for folder in left)
        for info in islice(names, _MOST_SHOWN):
            say(info.name)
        if more := sum(1 for _ in names):
            say(f"and {more:,} more objects")
        return
    for store in [place.store] if place is not None else [_store_of(root, folder) for folder in left]:
        require_dead(store, watch_seconds=watch)
    removed = remove_run(root, place, left)
    mark = "; one small object stays and marks that the run was removed" if place is not None or "" in left else ""
    say(f"{removed:,} objects removed{mark}")
    found = readable(root, lambda _: None)  # objects that are not the run's; unreadable folders stay too
    other = next((info.name for info in found if not is_description(info.name)), None)
    if other is not None:
        say(f"objects that do not belong to the run stay, such as {other}")


def _store_of(root: Store, folder: str) -> Store:
    return PrefixStore(root, folder.rstrip("/")) if folder else root
