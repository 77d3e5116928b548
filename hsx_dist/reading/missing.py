"""Parts that receipts name and that are not stored: removed after use, which a mark says, or lost."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from hsx_dist.errors import NotFound
from hsx_dist.format.manifest import Manifest
from hsx_dist.store import Store

#: Below it, a folder for each part that a consumer has used up: ``consumed/PART/CONSUMER.json``.
CONSUMED = "consumed/"
_REMOVED = "removed.json"
_DATA = "data/"
_THREADS = 16


def marks_folder(part: str) -> str:
    """The folder of a part's marks, with ``/`` at its end."""
    return f"{CONSUMED}{part.removeprefix(_DATA)}/"


def removal_mark(part: str) -> str:
    """The mark that is stored before a part is removed because every consumer has used it."""
    return marks_folder(part) + _REMOVED


def is_removed(store: Store, part: str, version: int) -> bool:
    """Whether ``part`` was removed after use. Version 1 stored no mark of its own for that: there any consumer's mark
    counts."""
    if version == 1:
        return next(iter(store.list(marks_folder(part))), None) is not None
    try:
        store.head(removal_mark(part))
    except NotFound:
        return False
    return True


def removed_parts(store: Store, version: int) -> set[str]:
    """All parts that were removed after use, or are about to be: see ``is_removed``."""
    marks = (info.name.removeprefix(CONSUMED).rpartition("/") for info in store.list(CONSUMED))
    return {f"{_DATA}{part}" for part, _, mark in marks if version == 1 or mark == _REMOVED}


def missing_parts(store: Store, manifest: Manifest, version: int) -> list[str]:
    """The parts that ``manifest`` names, that are not stored, and that were not removed after use: their samples are
    lost. ``manifest`` must have been read before this is called.

    Raises ``StoreError``.
    """
    stored = {info.name for info in store.list(_DATA)}
    absent = [part for part in manifest.parts if part not in stored]
    if not absent:
        return []
    # Marks are read after the listing: a part's mark is stored before the part is deleted.
    removed = removed_parts(store, version)
    return sorted(_not_stored(store, (part for part in absent if part not in removed)))


def _not_stored(store: Store, parts: Iterable[str]) -> list[str]:
    """Those of ``parts`` that the store does not have when it is asked for each: a listing may be older."""

    def absent(part: str) -> str | None:
        try:
            store.head(part)
        except NotFound:
            return part
        return None

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="hsx-missing") as pool:
        return [part for part in pool.map(absent, parts) if part is not None]
