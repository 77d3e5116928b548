"""Find objects that no reader needs (parts without a receipt, removed runs, unfinished files), and remove whole runs.

This code does not rely on clocks, and does not need to know whether a process works on the run. A part is deleted only
after its writer's log was sealed and read again. Its receipt is then stored, or never will be (``format.receipt_log``).
A removed run's objects are in a separate folder that no other run uses (``format.place``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain

from hsx_dist.errors import Denied, Unavailable
from hsx_dist.format.names import parse_part_name
from hsx_dist.format.own_objects import run_objects
from hsx_dist.format.place import Place, bury, close_place, leftovers, open_place
from hsx_dist.format.receipt_log import Log, list_logs, seal_logs
from hsx_dist.format.runs import all_receipts
from hsx_dist.reading.missing import removed_parts
from hsx_dist.store import ObjectInfo, Store
from hsx_dist.store.base import Folders

#: The folders of a version 1 run's objects, next to ``run.json``. Their other subfolders are not the run's.
_V1_FOLDERS = "(attempts|data|statistics|manifest(/[^/]+){0,2}|consumed(/[^/]+)?)/(?=[^/]*$)"


def unproven(place: Place, *, seal: bool) -> list[ObjectInfo]:
    """List parts that no receipt names, and parts that are marked as removed.

    ``seal``: first stop the writers of parts without a receipt, so that no receipt can name these parts later. Delete
    the parts only after a call with ``seal``.

    Raises:
        FormatError, IntegrityError: the manifest is damaged, so that no part is known to be garbage.
        StoreError: the store failed, or lists a sealed log without its seal.
    """
    store = place.store
    # List the parts before reading receipts: every listed part's receipt that is stored in between is then seen.
    listed = [info for info in store.list("data/") if parse_part_name(info.name) is not None]
    found = _unnamed(store, listed)
    if seal and found:
        writers = {parsed[:2] for info in found if (parsed := parse_part_name(info.name)) is not None}
        seal_logs(store, {log: last for log, last in list_logs(store).items() if log in writers}, "gc")
        found = _unnamed(store, found, writers)
    removed = removed_parts(store, place.version) if place.version > 1 else set()
    return found + [info for info in listed if info.name in removed]


def _unnamed(store: Store, parts: list[ObjectInfo], sealed: Iterable[Log] = ()) -> list[ObjectInfo]:
    # Read both the compacted manifest and all single receipts, because a reader may use either.
    named = {receipt.part for receipt in all_receipts(store, sealed)}
    return [info for info in parts if info.name not in named]


def unfinished(
    store: Store, older_than: float = 0.0, unreadable: Callable[[str], None] | None = None
) -> Iterator[ObjectInfo]:
    """List files of puts whose process was killed, in all of the store, if the store is a folder.

    Skips files that changed within ``older_than`` seconds. ``unreadable``: see ``store.base.Folders``.
    """
    return store.unfinished(older_than, unreadable) if isinstance(store, Folders) else iter(())


def own_unfinished(place: Place) -> Iterator[ObjectInfo]:
    """``unfinished`` files of this run and its place only. A folder of the place may contain another run."""
    return _unfinished_of(place.root, [f"{place.folder}/" if place.version > 1 else ""])


def _unfinished_of(root: Store, folders: list[str]) -> Iterator[ObjectInfo]:
    """``unfinished`` files directly in ``root``, and of the runs in ``folders`` (empty: of version 1).

    Ignores unreadable folders elsewhere, since they do not belong to a run.
    """
    own = re.compile("|".join((re.escape(folder) if folder else _V1_FOLDERS) for folder in folders) or "(?!)")

    def unreadable(folder: str) -> None:
        if own.match(f"{folder}/"):
            raise Denied(
                f"list {root.url}/{folder}: expected a readable folder of the run, got an error. Check its mode and "
                "its mount"
            )

    return (i for i in unfinished(root, unreadable=unreadable) if "/" not in i.name or own.match(i.name))


def left_behind(root: Store) -> Iterator[ObjectInfo]:
    """List remaining objects of runs that were removed from this place.

    They exist if the removal did not finish, or if a process of the run wrote after it.
    """
    for folder in leftovers(root, removed_only=True):
        yield from run_objects(root, folder)


def remove_run(
    root: Store,
    place: Place | None,
    left: Collection[str] | None = None,
    *,
    on_object: Callable[[str], None] = lambda _: None,
) -> int:
    """Remove ``place``, the run at ``root``, and the remains of unfinished removals. Return the number of objects.

    Keeps objects that do not belong to a run, and the mark of the removal of ``place`` or of a version 1 run. From the
    first step on no driver resumes the run. Another call continues an interrupted removal.

    ``left``: without ``place``, those ``leftovers`` of which the caller knows that no driver uses them. None: all.

    Raises:
        RunError: there is no run, and no remains of an unfinished removal; or another run was started in its place.
        Unavailable: an object is still there, or the description could not be replaced.
    """
    own: list[str] = []
    if place is not None:
        bury(place)
        own = [f"{place.folder}/"] if place.version > 1 else []
    # Without a run here, this includes folders that no tombstone names. A run of version 1 is included, as ``bury`` has
    # replaced its run.json. Its folders may hold other files too.
    found_left = leftovers(root, removed_only=place is not None)
    if place is None and left is not None:  # a folder that appeared since may be of a run that is copied here
        found_left = [folder for folder in found_left if folder in left]
    if place is None and not found_left:
        open_place(root)  # raises RunError
    if place is None and "" in found_left:
        close_place(root)
    folders = list(dict.fromkeys([*own, *found_left]))  # the remains include the run just buried
    found = chain(
        (info.name for folder in folders for info in run_objects(root, folder)),
        (info.name for info in _unfinished_of(root, folders)),
    )
    removed = set()
    for name in found:
        root.delete(name)
        on_object(name)
        removed.add(name)
    require_gone(root, removed, (info.name for folder in folders for info in run_objects(root, folder)))
    return len(removed)


def require_gone(store: Store, deleted: Collection[str], found: Iterable[str]) -> None:
    """Check that no name ``found`` after the deletes is ``deleted``. A gateway's page answers a delete like the store.

    Raises:
        Unavailable: one is.
    """
    left = next((name for name in found if name in deleted), None)
    if left is not None:
        raise Unavailable(
            f"{store.url}/{left}: expected no object after its delete, got one: another service answered for the "
            "store, or a process stored the object again. Check that the store answers, then run the command again"
        )
