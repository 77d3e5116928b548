"""Objects that no reader needs (parts without a receipt, removed runs, unfinished files), and runs as a whole.

Nothing here relies on clocks, or on knowing that no process is at work. A part is deleted only after its writer's log
was sealed and read again: its receipt was there by then, or never will be (``format.receipt_log``). A removed run's
objects lie in a folder of its own, which no other run uses (``format.place``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from hsx_dist.errors import Denied, NotFound
from hsx_dist.format.names import parse_part_name
from hsx_dist.format.place import (
    V1_FOLDERS,
    V1_OBJECTS,
    Place,
    bury,
    close_place,
    leftovers,
    open_place,
    run_objects,
)
from hsx_dist.format.receipt_log import list_logs, seal_logs
from hsx_dist.format.runs import all_receipts
from hsx_dist.reading.missing import removed_parts
from hsx_dist.store import ObjectInfo, Store
from hsx_dist.store.base import Folders


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


def unfinished(
    store: Store, older_than: float = 0.0, unreadable: Callable[[str], None] | None = None
) -> Iterator[ObjectInfo]:
    """What puts left of which the process was killed, where the store is a folder: of everything below it, unless it
    changed within ``older_than`` seconds. ``unreadable``: see ``store.base.Folders``."""
    return store.unfinished(older_than, unreadable) if isinstance(store, Folders) else iter(())


def own_unfinished(place: Place) -> Iterator[ObjectInfo]:
    """``unfinished`` of this run and of its place alone: another run may lie in a folder of the place."""
    folders = (f"{place.folder}/",) if place.version > 1 else V1_FOLDERS
    return _unfinished_of(place.root, folders)


def _unfinished_of(root: Store, folders: tuple[str, ...]) -> Iterator[ObjectInfo]:
    """``unfinished`` directly in ``root`` and in ``folders`` (names with ``/`` at the end). Unreadable folders next to
    them are not the run's."""

    def unreadable(folder: str) -> None:
        if f"{folder}/".startswith(folders):
            raise Denied(f"list {root.url}/{folder}: expected a readable folder of the run. Ask its owner")

    return (i for i in unfinished(root, unreadable=unreadable) if "/" not in i.name or i.name.startswith(folders))


def left_behind(root: Store) -> Iterator[ObjectInfo]:
    """The objects of runs that were removed from this place, as far as they are there: their removal did not finish, or
    a process of theirs wrote after it."""
    for folder in leftovers(root, removed_only=True):
        yield from run_objects(root, folder)


def remove_run(root: Store, place: Place | None, *, on_object: Callable[[str], None] = lambda _: None) -> int:
    """Remove ``place``, the run at ``root``, and what unfinished removals left; returns how many objects.

    What is not a run's own stays, and so does one small object, the mark of the removal. From the first step on no
    driver resumes the run; called again it goes on.

    Raises:
        RunError: there is no run, and nothing that an unfinished removal left.
    """
    own: tuple[str, ...] = ()
    names: list[str] = []
    if place is not None:
        bury(place)
        own = (f"{place.folder}/",) if place.version > 1 else ()
        names = [name for name in V1_OBJECTS if place.version == 1 and _is_there(root, name)]
    # Without a run here, also what no tombstone names: run_rm has shown it, and asked whether a driver works on it.
    # A run of version 1 is among them, as ``bury`` has replaced its description. Its folders may hold files of others.
    left = leftovers(root, removed_only=place is not None)
    if place is None and not left:
        open_place(root)  # says that there is none
    if place is None and "" in left:
        close_place(root)
    folders = (*own, *chain(*((folder,) if folder else V1_FOLDERS for folder in left)))
    found = chain(
        names,
        (info.name for folder in own for info in root.list(folder)),
        (info.name for folder in left for info in run_objects(root, folder)),
        (info.name for info in _unfinished_of(root, folders)),
    )
    removed = 0
    for name in found:
        root.delete(name)
        on_object(name)
        removed += 1
    return removed


def _is_there(root: Store, name: str) -> bool:
    try:
        root.head(name)
    except NotFound:
        return False
    return True
