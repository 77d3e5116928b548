"""Objects that no reader needs (parts without a receipt, removed runs, unfinished files), and runs as a whole.

Nothing here relies on clocks, or on knowing that no process is at work. A part is deleted only after its writer's log
was sealed and read again: its receipt was there by then, or never will be (``format.receipt_log``). A removed run's
objects lie in a folder of its own, which no other run uses (``format.place``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hsx_dist.format.manifest import parse_part_name
from hsx_dist.format.place import (
    V1_FOLDERS,
    V1_OBJECTS,
    Place,
    bury,
    close_place,
    leftovers,
    open_place,
)
from hsx_dist.format.receipt_log import list_logs, seal_logs
from hsx_dist.format.runs import all_receipts
from hsx_dist.reading.missing import removed_parts
from hsx_dist.store import ObjectInfo, Store

#: What an unfinished removal of a run of version 1 may have left. ``data/`` may hold other files, too.
_V1_LEFT = ("manifest/", "attempts/", "consumed/", "data/part-")


def unproven(place: Place, *, seal: bool) -> list[ObjectInfo]:
    """Parts that no receipt names, and parts that are marked as removed. With ``seal`` the writers of the former are
    stopped first, so that no receipt can name them later: then they may be deleted.

    Raises:
        FormatError, IntegrityError: the manifest is damaged, so that nothing is known to be garbage.
        StoreError: the store's.
    """
    store = place.store
    # Listed first: a receipt that is stored meanwhile is then seen.
    listed = [info for info in store.list("data/") if parse_part_name(info.name) is not None]
    found = _unnamed(store, listed)
    if seal and found:
        writers = {parsed[:2] for info in found if (parsed := parse_part_name(info.name)) is not None}
        seal_logs(store, {log: last for log, last in list_logs(store).items() if log in writers}, "gc")
        found = _unnamed(store, found)
    removed = removed_parts(store, place.version) if place.version > 1 else set()
    return found + [info for info in listed if info.name in removed]


def _unnamed(store: Store, parts: list[ObjectInfo]) -> list[ObjectInfo]:
    # Both the compacted manifest and all single receipts: a reader may go by either.
    named = {receipt.part for receipt in all_receipts(store)}
    return [info for info in parts if info.name not in named]


def unfinished(store: Store, older_than: float = 0.0) -> Iterator[ObjectInfo]:
    """What puts left of which the process was killed, where the store is a folder: of everything below it, unless it
    changed within ``older_than`` seconds."""
    find = getattr(store, "unfinished", None)
    return iter(()) if find is None else find(older_than)


def left_behind(root: Store) -> Iterator[ObjectInfo]:
    """The objects of runs at this place whose removal did not finish, or that a process of theirs wrote after it."""
    for folder in list(leftovers(root)):
        yield from root.list(folder)


def remove_run(root: Store, place: Place | None, *, on_object: Callable[[str], None] = lambda _: None) -> int:
    """Remove ``place``, the run at ``root``, or what an unfinished removal left; returns how many objects.

    What is not a run's own stays, and so does one small object, the mark of the removal. From the first step on no
    driver resumes the run; called again it goes on.

    Raises:
        RunError: there is no run, and nothing that an unfinished removal left.
    """
    left = list(leftovers(root))
    folders = [folder for folder in left if folder.startswith("run-")]
    if place is not None:
        bury(place)
        folders += V1_FOLDERS if place.version == 1 else [f"{place.folder}/"]
    elif not left:
        open_place(root)  # says that there is none
    if len(folders) < len(left):
        if place is None:
            close_place(root)
        folders += _V1_LEFT
    removed = 0
    for name in _objects(root, folders, v1=place is not None and place.version == 1):
        root.delete(name)
        on_object(name)
        removed += 1
    return removed


def _objects(root: Store, folders: list[str], *, v1: bool) -> Iterator[str]:
    for name in V1_OBJECTS if v1 else ():
        yield from (info.name for info in root.list(name) if info.name == name)
    for folder in folders:
        yield from (info.name for info in root.list(folder))
    for info in unfinished(root):
        if "/" not in info.name or info.name.startswith(tuple(folders)):
            yield info.name
