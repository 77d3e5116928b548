"""Parts that receipts name and that are not stored: removed after use, which a mark says, or lost."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from hsx_dist.errors import NotFound
from hsx_dist.format.manifest import Manifest
from hsx_dist.format.names import parse_part_name
from hsx_dist.format.runs import version_1_refuses
from hsx_dist.store import ObjectInfo, Store

#: Below it, a folder for each part that a consumer has used up: ``consumed/PART/CONSUMER.json``.
CONSUMED = "consumed/"
_REMOVED = "removed.json"
_DATA = "data/"
#: Requests at once. Each waits for a round trip to the store.
_THREADS = 16


def marks_folder(part: str) -> str:
    """The folder of a part's marks, with ``/`` at its end."""
    return f"{CONSUMED}{part.removeprefix(_DATA)}/"


def removal_mark(part: str) -> str:
    """The mark that is stored before a part is removed because every consumer has used it."""
    return marks_folder(part) + _REMOVED


def mark_of(part: str, *, every_copy: bool = True) -> bytes:
    """A consumer's mark, or the mark of a removal.

    Without ``every_copy``: as earlier versions stored it. They marked a part also while a sample in it was not used,
    where another part held the sample too.
    """
    return json.dumps({"part": part, "used": "every copy"} if every_copy else {"part": part}).encode()


def covers_every_copy(part: str, mark: ObjectInfo) -> bool:
    """Whether this mark of ``part`` says that all samples in it were used. Its size tells: a listing is enough."""
    return mark.size == len(mark_of(part))


def is_removed(store: Store, part: str, version: int) -> bool:
    """Whether ``part`` was removed after use. Version 1 stored no mark of its own for that: there any consumer's mark
    by an earlier version counts, unless this version took the part's attempt."""
    if version == 1:
        return part in _removals(store, version, store.list(marks_folder(part)))
    try:
        store.head(removal_mark(part))
    except NotFound:
        return False
    return True


def removed_parts(store: Store, version: int) -> set[str]:
    """All parts that were removed after use, or are about to be: see ``is_removed``."""
    return set(_removals(store, version, store.list(CONSUMED)))


def _removals(store: Store, version: int, marks: Iterable[ObjectInfo]) -> dict[str, bool]:
    """The removed parts that ``marks`` tell of, and whether all samples in them were used."""
    found: dict[str, bool] = {}
    earlier: dict[str, int] = {}  # parts that a consumer of an earlier version marked, and their attempts
    for info in marks:
        folder, _, name = info.name.removeprefix(CONSUMED).rpartition("/")
        part = f"{_DATA}{folder}"
        parsed = parse_part_name(part)
        if name == _REMOVED:
            found[part] = covers_every_copy(part, info)
        elif version == 1 and parsed is not None and not covers_every_copy(part, info):
            earlier[part] = parsed[0]
    refused = {attempt for attempt in set(earlier.values()) if version_1_refuses(store, attempt)}
    return {part: False for part, attempt in earlier.items() if attempt not in refused} | found


def stored_parts(store: Store) -> set[str]:
    """The names of all parts that are stored now, proven or not. Raises ``StoreError``."""
    return {info.name for info in store.list(_DATA)}


def missing_parts(store: Store, manifest: Manifest, version: int) -> list[str]:
    """The parts that ``manifest`` names, that are not stored, and that were not removed after use: their samples are
    lost. Where another copy of such a sample was in a part that was removed, and its mark does not say that the sample
    was used, this part is among them too. ``manifest`` must have been read before this is called.

    Raises ``StoreError``.
    """
    stored = stored_parts(store)
    absent = [part for part in manifest.parts if part not in stored]
    if not absent:
        return []
    # Marks are read after the listing: a part's mark is stored before the part is deleted.
    removed = _removals(store, version, store.list(CONSUMED))
    lost = set(_not_stored(store, (part for part in absent if part not in removed)))
    keys = {key for part in lost for key in list(manifest.parts[part].table.keys())}
    for record in filter(None, map(manifest.samples.get, keys)):
        if not lost.isdisjoint(proof.part for proof in record.segments):
            lost.update(part for part in manifest.parts_of(record.key) if removed.get(part) is False)
    return sorted(lost)


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
