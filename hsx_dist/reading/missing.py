"""Parts that receipts name but that are not stored: removed after use, if a mark records that, or lost."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from hsx_dist.format.json_objects import holds_json
from hsx_dist.format.manifest import Manifest
from hsx_dist.format.names import parse_part_name
from hsx_dist.format.presence import exists, unlisted
from hsx_dist.format.runs import version_1_refuses
from hsx_dist.store import ObjectInfo, Store

#: Holds a folder for each part that a consumer has used up: ``consumed/PART/CONSUMER.json``.
CONSUMED = "consumed/"
_REMOVED = "removed.json"
_DATA = "data/"
#: Concurrent requests. Each waits for a round trip to the store.
_THREADS = 16


def marks_folder(part: str) -> str:
    """The folder of a part's marks, with ``/`` at its end."""
    return f"{CONSUMED}{part.removeprefix(_DATA)}/"


def removal_mark(part: str) -> str:
    """Name of the mark that is stored before a part is removed because every consumer has used it."""
    return marks_folder(part) + _REMOVED


def mark_of(part: str, *, every_copy: bool = True) -> bytes:
    """Content of a consumer's mark, or of the mark of a removal.

    ``every_copy=False`` is the content of earlier versions. These marked a part although a sample in it was not used,
    if another part also held the sample.
    """
    return json.dumps({"part": part, "used": "every copy"} if every_copy else {"part": part}).encode()


def covers_every_copy(part: str, mark: ObjectInfo) -> bool:
    """Whether ``mark`` records that all samples in ``part`` were used. Decided by its size, which listings contain."""
    return mark.size == len(mark_of(part))


def is_removed(store: Store, part: str, version: int) -> bool:
    """Whether ``part`` was removed after use.

    Version 1 stored no mark for a removal. In its runs any consumer's mark by an earlier version counts, unless the
    current version took the part's attempt.
    """
    if version == 1:
        return part in _removals(store, version, store.list(marks_folder(part)))
    return holds_json(store, removal_mark(part))


def removed_parts(store: Store, version: int) -> set[str]:
    """All parts that were removed after use or that are being removed. See ``is_removed``."""
    return set(_removals(store, version, store.list(CONSUMED)))


def _removals(store: Store, version: int, marks: Iterable[ObjectInfo]) -> dict[str, bool]:
    """The removed parts that ``marks`` record, each with whether all its samples were used."""
    found: dict[str, bool] = {}
    earlier: dict[str, int] = {}  # part marked by a consumer of an earlier version → its attempt
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
    """The lost parts: ``manifest`` names them, but they are not stored, and were not removed after use.

    A removed part is also lost if it held another copy of a lost sample, and its mark does not record that all its
    samples were used. Read ``manifest`` before calling this.

    Raises ``StoreError``, also if the listing of the marks lacks one.
    """
    stored = stored_parts(store)
    absent = [part for part in manifest.parts if part not in stored]
    if not absent:
        return []
    # Read marks after the listing: a part's mark is stored before the part is deleted, so none can be missed.
    removed = _removals(store, version, store.list(CONSUMED))
    lost = set(_not_stored(store, (part for part in absent if part not in removed)))
    marks = {removal_mark(part) for part in lost}
    if marked := marks.difference(_not_stored(store, marks)):
        raise unlisted(store, min(marked), "other marks")
    keys = {key for part in lost for key in list(manifest.parts[part].table.keys())}
    for record in filter(None, map(manifest.samples.get, keys)):
        if not lost.isdisjoint(proof.part for proof in record.segments):
            lost.update(part for part in manifest.parts_of(record.key) if removed.get(part) is False)
    return sorted(lost)


def _not_stored(store: Store, names: Iterable[str]) -> list[str]:
    """The ``names`` that do not exist, checked with a request for each, because a listing may lack names."""
    names = list(names)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="hsx-missing") as pool:
        there = pool.map(partial(exists, store), names)
        return [name for name, found in zip(names, there, strict=True) if not found]
