"""Find the objects that a run stored in a folder. Other programs may have files there, also with a run's names.

A version 2 run has a folder with its random id, so names are enough there. Files with other names are not the run's.
The objects of a version 1 run are next to ``run.json``, in a folder that a user named. There a JSON object counts only
if it has the members that a run stores.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hsx_dist.errors import Denied, FormatError, NotFound
from hsx_dist.format.json_objects import read_json
from hsx_dist.format.markers import OBJECTS_OF_A_RUN
from hsx_dist.store import ObjectInfo, Store

#: Prefixes of receipts and parts. Only runs have objects with these names.
_EVIDENCE = ("manifest/", "data/part-")
#: An object of ``require_conditional_puts``, if its process was killed.
_PROBE = re.compile(r"probe-[0-9a-f]{32}")
#: Pattern of the names of other objects → members that each version stores in them.
_MEMBERS = {
    re.compile(r"attempts/[0-9]+\.json"): {"attempt", "token", "created"},
    re.compile(r"attempts/[0-9]+\.heartbeat\.json"): {"attempt", "value", "state", "time"},
    re.compile(r"attempts/[0-9]+\.closed\.json"): {"by"},
    re.compile(r"(attempts/[0-9]+\.)?complete\.json"): {"format", "attempt", "manifest", "counts"},
    re.compile(r"check\.json"): {"attempt", "wanted", "samples", "dtype", "passed", "layers"},
    re.compile(r"statistics/.*"): {"run", "layer", "hidden_size", "mean", "variance", "absmax"},
    re.compile(r"consumed/.*"): {"part"},
}


def run_objects(root: Store, folder: str) -> Iterator[ObjectInfo]:
    """The objects of a run in ``folder`` (empty: next to ``run.json``). Receipts and parts, the evidence, are last.

    Raises:
        Denied: this user may not read an object that may be of a version 1 run. Removals must not leave it behind.
    """
    if folder:
        yield from (info for info in root.list(f"{folder}probe-") if _PROBE.fullmatch(info.name.removeprefix(folder)))
    for prefix, pattern in sorted(OBJECTS_OF_A_RUN.items(), key=lambda item: item[0] in _EVIDENCE):
        for info in root.list(folder + prefix):
            name = info.name.removeprefix(folder)
            if pattern.fullmatch(name) and (folder or is_evidence(name) or _has_members(root, name)):
                yield info


def is_evidence(name: str) -> bool:
    """Whether only a run has an object with this name, relative to its folder: a receipt or a part."""
    return any(OBJECTS_OF_A_RUN[prefix].fullmatch(name) for prefix in _EVIDENCE)


def has_evidence(root: Store, folder: str) -> bool:
    """Whether ``folder`` holds a receipt or a part."""
    names = (info.name.removeprefix(folder) for prefix in _EVIDENCE for info in root.list(folder + prefix))
    return any(map(is_evidence, names))


def _has_members(root: Store, name: str) -> bool:
    try:
        found = read_json(root, name)
    except Denied as e:
        raise Denied(
            f"{root.url}/{name}: expected an object that this user may read, as it may be of a run, got {e}. Run the "
            "command as its owner, or move an object that is not of the run to another folder"
        ) from e
    except (FormatError, NotFound):  # of another program, damaged, or just deleted
        return False
    stored = next(members for pattern, members in _MEMBERS.items() if pattern.fullmatch(name))
    if not stored <= found.keys() or type(found.get("by", 0)) is not int:
        return False
    return not name.startswith("consumed/") or found["part"] == f"data/{name.split('/')[1]}"
