"""The run at a place (a folder or URL that a user names), and how one run replaces another there.

``run.json`` is put only if absent, and names the run's random id. All other objects of the run are in ``run-ID/``, so
that a process of an earlier run at the same place writes and deletes in another folder. Removing a run replaces its
``run.json`` by a *tombstone*, which stays: the next run's description is ``run.0002.json``, then ``run.0003.json``. No
name is used for two runs, so that a delayed delete or put of an earlier run's process cannot affect a later run.

Runs of version 1 (``hsx-run/1``) have no id in their names: their objects are next to ``run.json``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from hsx_dist.errors import (
    Denied,
    FormatError,
    NotFound,
    ObjectsMissing,
    RunError,
    RunStalled,
    StoreError,
    Unavailable,
)
from hsx_dist.format.json_objects import (
    MemberCheck,
    anything,
    check_members,
    dump_json,
    find_json,
    members,
    object_of,
    or_null,
    parse_json,
    put_own,
    shown,
    text,
)
from hsx_dist.format.markers import OBJECTS_OF_A_RUN
from hsx_dist.format.own_objects import has_evidence, is_evidence, run_objects
from hsx_dist.format.presence import exists, is_missing
from hsx_dist.format.segment_info import MAX_HIDDEN_SIZE, MAX_LAYERS
from hsx_dist.store import Store
from hsx_dist.store.base import Conditional, version_of
from hsx_dist.store.prefix import PrefixStore
from hsx_dist.text import bounded

__all__ = [
    "REMOVAL_ERRORS",
    "RUN",
    "Place",
    "RunFolder",
    "find_place",
    "bury",
    "close_place",
    "is_description",
    "leftovers",
    "open_place",
    "read_run",
    "start_run",
]

RUN = "run.json"
#: Errors of a process that uses a run while another one removes the run's objects.
REMOVAL_ERRORS = (NotFound, ObjectsMissing, FormatError, RunStalled)
_FORMATS = {"hsx-run/1": 1, "hsx-run/2": 2}
_ID = re.compile(r"[0-9a-f]{16}")
_POINTER = re.compile(r"run(\.[0-9]{4,})?\.json")
_FOLDER = re.compile(r"run-[0-9a-f]{16}/")
#: After this many objects of a run's folder, the listing ends and another one skips the rest of the folder.
_LOOKED_AT = 1000
#: Tries to replace a description, and the pause after the first try in seconds. It doubles with each try.
_TRIES = 5
_FIRST_PAUSE_S = 0.05


def _layers(value: Any) -> str | None:
    """Layer ids; or a string, such as ``all``, if the driver did not resolve it."""
    ids = value if isinstance(value, list) else [value]
    fine = len(ids) <= MAX_LAYERS and all(type(v) is str or (type(v) is int and abs(v) <= MAX_HIDDEN_SIZE) for v in ids)
    return None if fine else f"at most {MAX_LAYERS} layer ids"


#: Checks of a description's members. Members without a check may have any value.
_RUN_MEMBERS: dict[str, MemberCheck] = {
    "meaning": members({"model": or_null(text), "revision": or_null(text), "layers": or_null(_layers)}),
    "settings": object_of(anything),
    "created": text,
    "id": text,
    "first_rows": or_null(object_of(text)),
}


class RunFolder(PrefixStore):
    """The folder of a version 2 run. No object in it has a name that only version 1 uses."""


@dataclass(frozen=True)
class Place:
    """A run at a place.

    ``root``: the store that the user named. ``pointer``: the name of the run's description in it. ``version``: version
    of the run's layout, 1 or 2. ``info``: the description. ``store``: the store of the run's other objects.
    """

    root: Store
    pointer: str
    version: int
    info: dict[str, Any]
    store: Store

    @property
    def id(self) -> str:
        """16 hex digits that are unique to the run, also among runs at the same place.

        The random id; for version 1, which has none, the hash of the description, which never changes.
        """
        return _id(self.info)

    @property
    def folder(self) -> str:
        """The name of the run's folder in ``root``; empty for version 1."""
        return _folder(self.info) if self.version > 1 else ""

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """vLLM's ids of the requested layers, ascending. Empty if the description does not list them."""
        layers = self.info.get("meaning", {}).get("layers", [])
        whole = isinstance(layers, list) and all(type(layer) is int for layer in layers)
        return tuple(layers) if whole else ()

    def at(self, root: Store) -> Place:
        """The same run, read through ``root``, another store object of the same place."""
        return _place(root, self.pointer, self.info)

    def removed(self) -> bool:
        """Whether the run has been removed. Asks the store, and also lists the description if it is missing.

        Raises:
            Unavailable: listings have the description, or its tombstone, and requests for it say that it is missing.
        """
        for _ in range(2):
            found = _read(self.root, self.pointer)
            if found is not None:
                return "removed" in found or _id(found) != self.id
            if is_missing(self.root, self.pointer):
                return True
        raise Unavailable(
            f"{self.root.url}/{self.pointer}: expected the object that a listing names, got the answer that it is "
            "missing. Check the store"
        )

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context manager for code that reads the run's objects: raises if the run was removed in the meantime.

        Without it the caller could take a partly removed run for the whole run. Makes one request at the end, after the
        last object was read. A removal replaces the description first, so if the description still exists then, the run
        was whole all the time.

        Raises:
            RunError: the run was removed in the meantime. Replaces errors that a removal may cause.
        """
        with self.explaining():
            yield
        if self.removed():
            raise self._gone()

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """As ``reading``, without the request at the end. For code that uses no result of a removed run."""
        try:
            yield
        except REMOVAL_ERRORS as e:
            if self.removed():
                raise self._gone() from e
            raise

    def _gone(self) -> RunError:
        return RunError(f"{self.root.url}: expected a run, got a run that is being removed. Check the path")


def find_place(root: Store) -> Place | None:
    """The run at ``root``; ``None`` when there is none, or the last run was removed.

    Raises:
        FormatError: ``run.json`` cannot be read, or is of a later version.
    """
    return _look(root)[0]


def open_place(root: Store) -> Place:
    """The run at ``root``. Raises ``RunError`` when there is none, ``FormatError`` when it cannot be read."""
    found, _, mark = _look(root)
    if found is not None:
        return found
    if mark is not None:
        raise RunError(
            f"no run at {root.url}: expected a run, got the tombstone of a run removed at "
            f"{bounded(mark.get('at'), 80)}. Start a run there, or check the path"
        )
    raise RunError(f"no run at {root.url}: expected {RUN}, got no such object. Check the path, or start the run")


def read_run(root: Store) -> dict[str, Any]:
    """The description of the run at ``root``. Raises like ``open_place``."""
    return open_place(root).info


def start_run(root: Store, info: Mapping[str, Any]) -> Place:
    """Store the description of a new run; ``info`` must hold no credentials. The run gets a random id.

    Raises:
        RunError: a run exists, another driver has just started a run, or objects of an unfinished removal are left.
        FormatError: no reader would accept ``info``. Nothing is stored.
    """
    if left := leftovers(root):
        raise RunError(
            f"{root.url}: expected an empty place or a run, got objects of a run ({left[0] or 'manifest/, data/'}) "
            f"without its description: a removal did not finish, or {RUN} was deleted. Choose another output. `hsx rm` "
            "without --yes names the objects, and with --yes removes them"
        )
    found, number, _ = _look(root)
    body = dump_json({"format": "hsx-run/2", "id": secrets.token_hex(8), **info})
    stored = parse_json(body, floats=True)
    del stored["crc32c"]  # readers remove it too
    check_members(stored, _RUN_MEMBERS, f"{root.url}/{_pointer(number)}")
    if found is not None or not put_own(root, _pointer(number), body):
        raise RunError(
            f"{root.url}: expected no run, got a run: another driver has just started it. Start again to resume it, or "
            "choose another output"
        )
    return _place(root, _pointer(number), stored)


def leftovers(root: Store, *, removed_only: bool = False) -> list[str]:
    """The folders of other runs than that at ``root`` that still hold objects, with ``/`` at the end. For a run of
    version 1, the empty string.

    Their removal did not finish, one of their processes wrote after it, or their description was deleted. A folder
    that no tombstone at this place names counts only if it has a receipt or a part, and no ``run.json``.
    ``removed_only``: only runs that a tombstone at this place names.

    Raises:
        RunError: ``root`` is itself the folder of a run's objects.
    """
    # List the folders before reading the description. A run's description is stored before any object in its folder,
    # so the folder of a run that starts now cannot be taken for a leftover.
    found = _run_folders(root)
    if has_evidence(root, ""):
        found[""] = True
    place, number, mark = _look(root)
    url = root.url.rstrip("/")
    if "" in found and place is None and mark is None:
        # The description and the tombstone of a run are above its folder. A local path may be a link to the folder.
        for path in (url, os.path.realpath(url) if url.startswith("/") else url):
            if _FOLDER.fullmatch(f"{path.rpartition('/')[2]}/"):
                raise RunError(
                    f"{path}: expected a run's place, got the folder of its objects. Name the folder above it"
                )
    if mark is not None and mark.get("version") == 1 and next(run_objects(root, ""), None) is not None:
        found.setdefault("", False)
    if place is not None:
        found.pop(f"{place.folder}/" if place.version > 1 else "", None)
    if not found:
        return []
    marks = [_mark(_read(root, _pointer(n)) or {}) for n in range(1, number)]
    known = {_folder(mark) + "/" if mark.get("version") != 1 else "" for mark in marks if mark.get("id")}
    # A ``run.json`` in an unknown folder belongs to another place. Next to it there is no unknown run of version 1,
    # because version 1 starts no run where it finds a description or a tombstone.
    return [
        folder
        for folder, evidence in found.items()
        if folder in known or (not removed_only and evidence and not exists(root, folder + RUN))
    ]


def bury(place: Place) -> None:
    """Replace the run's description by a tombstone. From now on no reader opens the run, and no driver resumes it.

    Replaces only this run's description: a user may have deleted the run by hand and started another one. Where a
    store has no conditional puts, a run that starts between the last look and the put is not noticed.

    Raises:
        RunError: the object ``place.pointer`` is of another run.
        Unavailable: it was replaced at each try, or another process has it locked.
    """
    own = place.info.get("id") or "none"
    tombstone = _tombstone(own, place.version)
    refused = version = None
    for attempt in range(_TRIES):
        if attempt:
            refused = version
            time.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
        try:
            version = version_of(place.root, place.pointer)  # before the look: a later object has another one
        except NotFound:
            version = None
        found = _read(place.root, place.pointer)
        if found is None:
            if put_own(place.root, place.pointer, tombstone):
                return
        elif _mark(found).get("id") == own:
            return
        elif "removed" in found or _id(found) != place.id:
            raise RunError(
                f"{place.root.url}/{place.pointer}: expected run {place.id}, got another run, which was started after "
                "the first one was deleted. Nothing was removed. Look at it with hsx show, then try again"
            )
        elif _replace(place, tombstone, version):
            return
    where = f"{place.root.url}/{place.pointer}: expected to replace the description, got"
    if version is not None and version == refused:  # in a folder, a lock refuses the put of an unchanged object
        raise Unavailable(
            f"{where} a refusal although it did not change: another process may have it locked. `lsof` names the "
            "processes that have the file open. End that process, then try again"
        )
    raise Unavailable(f"{where} another version at each of {_TRIES} tries. Try again")


def _replace(place: Place, body: bytes, version: str | None) -> bool:
    """Replace the description if ``version`` is still its version. Returns whether this call stored ``body``."""
    root = place.root
    if version is not None and isinstance(root, Conditional):
        try:
            return root.put_version(place.pointer, [body], version)
        except StoreError as e:
            if e.retryable or isinstance(e, Denied):
                raise  # otherwise the service has versions, and refuses conditional puts
    root.put(place.pointer, [body])
    return True


def close_place(root: Store) -> None:
    """Prevent a version 1 driver from starting a run among the leftovers of another. Raises ``RunError`` when there is
    a run."""
    place, number, _ = _look(root)
    if place is None and number > 1:
        return  # a version 1 driver refuses the existing tombstone
    if place is not None or not put_own(root, _pointer(number), _tombstone("none", 1)):
        raise RunError(
            f"{root.url}: expected no run, got a run that was just started. Check it with `hsx ls`, then try again"
        )


def _tombstone(run_id: str, version: int) -> bytes:
    at = datetime.now(UTC).isoformat(timespec="seconds")
    mark = {"at": at, "id": run_id, "version": version, "token": secrets.token_hex(8)}
    return dump_json({"format": "hsx-run/2", "removed": mark})


def is_description(name: str) -> bool:
    """Whether ``name`` is a name for runs' descriptions and tombstones."""
    return _POINTER.fullmatch(name) is not None


def _run_folders(root: Store) -> dict[str, bool]:
    """The runs' folders that hold objects with a run's names → whether one is a receipt or a part."""
    found: dict[str, bool] = {}
    after: str | None = ""
    # One listing for all folders, and one more for each folder with very many objects.
    while after is not None:
        folder, more, start, after = "", 0, after, None
        for info in root.list("run-", start or None):
            match = _FOLDER.match(info.name)
            if match is None:
                continue
            folder, more = match[0], more + 1 if match[0] == folder else 0
            name = info.name.removeprefix(folder)
            if any(pattern.fullmatch(name) for pattern in OBJECTS_OF_A_RUN.values()):
                found[folder] = found.get(folder, False) or is_evidence(name)
            if more == _LOOKED_AT:
                if not found.get(folder) and next(run_objects(root, folder), None) is not None:
                    found[folder] = has_evidence(root, folder)
                after = f"{folder[:-1]}0"  # sorts after all names in the folder: "0" is the character after "/"
                break
    return found


def _look(root: Store) -> tuple[Place | None, int, dict[str, Any] | None]:
    """(the run, the number of its description or of the next run's, the tombstone of a run before it, if any)."""
    number, mark, listed = 1, None, set[str]()
    while (found := _read(root, _pointer(number))) is not None:
        if "removed" not in found:
            return _place(root, _pointer(number), found), number, mark
        mark = _mark(found)
        if number == 2:  # one listing replaces the reads of the next tombstones, of which each removal leaves one
            listed = {info.name for info in root.list("run.")}
        number += 1
        while _pointer(number + 1) in listed:
            number += 1
    return None, number, mark


def _mark(found: Mapping[str, Any]) -> dict[str, Any]:
    mark = found.get("removed")
    return mark if isinstance(mark, dict) else {}


def _place(root: Store, pointer: str, info: dict[str, Any]) -> Place:
    version = _FORMATS[info["format"]]
    if version == 1:
        return Place(root, pointer, version, info, root)
    return Place(root, pointer, version, info, RunFolder(root, _folder(info)))


def _read(root: Store, name: str) -> dict[str, Any] | None:
    found = find_json(root, name, _RUN_MEMBERS)
    if found is None:
        return None
    where = f"{root.url}/{name}"
    if str(found.get("format")) not in _FORMATS:
        raise FormatError(
            f"{where}: expected format {' or '.join(_FORMATS)}, got {shown(found.get('format'))}. Update hsx_dist"
        )
    if _FORMATS[found["format"]] > 1 and "removed" not in found and not _is_id(found.get("id")):
        raise FormatError(
            f"{where}: expected an id of 16 hex digits, got {shown(found.get('id'))}. Restore the file from a copy"
        )
    return found


def _id(info: Mapping[str, Any]) -> str:
    if _FORMATS[info["format"]] > 1:
        return str(info["id"])
    return hashlib.blake2b(json.dumps(info, sort_keys=True).encode(), digest_size=8).hexdigest()


def _folder(info: Mapping[str, Any]) -> str:
    return f"run-{info['id']}"


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def _pointer(number: int) -> str:
    return RUN if number == 1 else f"run.{number:04d}.json"
