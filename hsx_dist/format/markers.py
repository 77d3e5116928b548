"""What may lie next to an object of a server: its lock (on a file system) and its markers.

A marker is JSON, ``{"key", "error"}``, with ``expires`` (seconds since the epoch) where the server gives its objects a
time to live. Of an object there are at most two, and this is the rule between them and the object:

- The conflict marker (``conflict_name``, ``"conflict": true``): the key was used for two samples. Readers raise,
  whether there is an object or not. No server replaces or removes it. An operator does, and ``hsx gc`` once the object
  is gone: as long as there is an object, readers of the other request must not find it.
- The failure marker (``marker_name``): nothing is stored of some request. For a *key* it has ``"until_stored": true``,
  and readers raise only where there is no object. Without that member it is a *path's*: a path's objects are replaced,
  the object is an earlier request's, and readers raise. They also do for a marker of an earlier version, which may be a
  conflict marker under this name. ``hsx gc`` removes such markers too only once the object is gone.

The object of a key is put by put-if-absent. Nothing replaces it but itself with a later end. So once it is stored,
readers of a key go by two facts, the object and the conflict marker. No process takes either back: the order in which
servers put and clear markers changes nothing. A conflict is found in every order:

- A second sample that was computed fails at the put-if-absent, and its server puts the conflict marker.
- Of a request that stores nothing, the server first puts the failure marker and then looks at the object. If the object
  is another request's (``identity.is_of_another``), the server puts the conflict marker. If the object does not say its
  request, the server puts the failure marker again without ``until_stored``: it hides the object until a later request
  of the key is stored. If the object comes after that look, the key was free: the failed request stands for nothing,
  and its marker was there before the object.

A lock is released, where there are locks, only after that.
"""

from __future__ import annotations

import json
import re
import unicodedata

OBJECT = ".safetensors"
LOCK = ".lock"
#: Ends of markers. Failures: ``KEY.error.json`` of ``KEY.safetensors``, ``NAME.failed.json`` of any other name a client
#: chose. Conflicts: ``NAME.conflict.json``.
MARKERS = (".error.json", ".failed.json", ".conflict.json")
#: No object may end so.
RESERVED = (LOCK, *MARKERS)
#: Objects of a run at the top of its prefix, and the first folders of its other objects.
RUN_NAMES = frozenset(
    {
        *("run.json", "complete.json", "check.json", "removed.json"),
        *("attempts", "consumed", "data", "manifest", "removed", "report", "statistics"),
    }
)
#: Prefix → the names below it that a run gives to its objects, next to its description.
OBJECTS_OF_A_RUN = {
    "attempts/": re.compile(r"attempts/[0-9]{4,9}(\.heartbeat|\.closed|\.complete)?\.json"),
    "manifest/": re.compile(r"manifest/([0-9]{4,9}/[A-Za-z0-9._-]+/[0-9]{6,9}\.json|compacted-[0-9]{4,9}\.jsonl\.zst)"),
    "data/part-": re.compile(r"data/part-[0-9]{4,9}-[A-Za-z0-9._-]+-[0-9]{6,9}(=[^/]*)?\.safetensors"),
    "consumed/": re.compile(r"consumed/part-[^/]+\.safetensors/[^/]+\.json"),
    "check.json": re.compile(r"check\.json"),
    "statistics/": re.compile(r"statistics/(?:[a-z][a-z0-9_]{0,63}-)?[0-9]{4,9}\.json"),
}
#: How ``page.object_name`` makes names of keys, folded.
_OF_A_KEY = re.compile(r"[a-z0-9_%-][a-z0-9._%~-]{0,127}")
#: Some file systems ignore these characters in names.
_IGNORED = dict.fromkeys([0x00AD, 0x034F, 0x061C, 0x180E, *range(0x200B, 0x2010), *range(0x202A, 0x202F),
                          *range(0x2060, 0x2070), *range(0xFE00, 0xFE10), 0xFEFF])  # fmt: skip


def marker_name(name: str) -> str:
    """The failure marker of the object ``name``: no two objects share one."""
    return f"{name.removesuffix(OBJECT)}{MARKERS[0]}" if name.endswith(OBJECT) else f"{name}{MARKERS[1]}"


def conflict_name(name: str) -> str:
    """The conflict marker of the object ``name``."""
    return f"{name}{MARKERS[2]}"


def lock_name(name: str) -> str:
    """The companion lock of the object ``name``, as vLLM's own connector calls it."""
    return f"{name}{LOCK}"


def folded(name: str) -> str:
    """What names have in common that some file system takes for the same: letter case, Unicode normalisation, ignorable
    characters, dots and spaces at the end of a component, and what follows a colon."""
    # Twice: normalisation may make new capitals, and folding may undo a normalisation.
    for _ in range(2):
        name = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).translate(_IGNORED).casefold())
    return "/".join(part.partition(":")[0].rstrip(". ") for part in name.split("/"))


def marked_name(marker: str) -> str:
    """The object whose marker ``marker`` (a name) is."""
    end = next(end for end in MARKERS if marker.endswith(end))
    return marker.removesuffix(end) + (OBJECT if end == MARKERS[0] else "")


def is_of_a_key(name: str) -> bool:
    """Whether some file system takes ``name`` for the object of a key."""
    same = folded(name)
    return same.endswith(OBJECT) and _OF_A_KEY.fullmatch(same.removesuffix(OBJECT)) is not None


#: A later run's description, and a run's folder: see ``format.place``.
_RUN = re.compile(r"run\.[0-9]+\.json|run-[0-9a-f]{16}")


def is_of_a_run(name: str) -> bool:
    """Whether some file system takes ``name`` for one of a run's own objects, or for one of a run in a folder below."""
    parts = folded(name).split("/")
    if parts[0] in RUN_NAMES or any(map(_RUN.fullmatch, parts)):
        return True
    if parts[-1].endswith(".json") and parts[-1] in RUN_NAMES:
        return True
    # A run of version 1 has no folder with its id.
    below = ["/".join(parts[k:]) for k in range(1, len(parts))]
    return any(pattern.fullmatch(rest) for pattern in OBJECTS_OF_A_RUN.values() for rest in below)


def is_conflict(marker: bytes) -> bool:
    """Whether a failure marker is a conflict marker of an earlier version."""
    try:
        found = json.loads(marker)
    except (ValueError, RecursionError):  # also where it is no UTF-8
        return False
    return isinstance(found, dict) and found.get("conflict") is True
