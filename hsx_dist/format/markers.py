"""The companions of a server's object: its lock (on a file system) and its markers.

A marker is JSON, ``{"key", "error"}``, with ``expires`` (seconds since the epoch) if the server's objects have a time
to live. An object has at most two markers, with this protocol:

- The conflict marker (``conflict_name``, ``"conflict": true``): the key was used for two samples. Readers raise,
  whether the object exists or not. No server replaces or removes it. An operator may remove it at any time, ``hsx gc``
  only after the object is gone: while the object exists, readers of the other request must not find it.
- The failure marker (``marker_name``): a request stored nothing. For a *key* it has ``"until_stored": true``, and
  readers raise only if the object does not exist or has expired. Without that member the marker is for a *path*.
  Objects at a path are replaced, so an existing object belongs to an earlier request, and readers raise. Readers also
  raise for a marker of an earlier version, which may be a conflict marker under this name. ``hsx gc`` removes these
  markers only after the object is gone.

The object of a key is put with put-if-absent. It is replaced only by the same object with a later expiry. So after the
object is stored, readers of a key depend on two facts: the object and the conflict marker. No process reverts either.
So the order in which servers put and clear markers does not matter. A conflict is detected in every order:

- If a second sample was computed, its put-if-absent fails, and its server puts the conflict marker. If the server
  cannot read the object, the request stores nothing.
- If a request stores nothing, the server first puts the failure marker and then reads the object.

  - If the object is another request's (``identity.is_of_another``), the server puts the conflict marker.
  - If the object does not name its request, the server puts the failure marker again without ``until_stored``. It hides
    the object until a later request of the key is stored. It also does so for a damaged object, which it reads again
    later.
  - If the object is the same request's and expires soon, the failure marker stays. It counts once the object has
    expired, until a later request stores or renews the object.
  - If the object is stored after that read, the key was free: the failed request has no sample, and its marker is older
    than the object.

If there are locks, a request's lock is released only after these steps.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

OBJECT = ".safetensors"
LOCK = ".lock"
#: Name endings of markers. Failures: ``KEY.error.json`` for ``KEY.safetensors``, ``NAME.failed.json`` for other names
#: that a client chose. Conflicts: ``NAME.conflict.json``.
MARKERS = (".error.json", ".failed.json", ".conflict.json")
#: Name endings that no object may have.
RESERVED = (LOCK, *MARKERS)
#: Objects of a run at the top of its prefix, and the first folders of its other objects.
RUN_NAMES = frozenset(
    {
        *("run.json", "complete.json", "check.json", "removed.json"),
        *("attempts", "consumed", "data", "manifest", "removed", "report", "statistics"),
    }
)
#: Prefix → pattern of the names that a run gives to its objects with that prefix, relative to its description's folder.
OBJECTS_OF_A_RUN = {
    "attempts/": re.compile(r"attempts/[0-9]{4,9}(\.heartbeat|\.closed|\.complete)?\.json"),
    "manifest/": re.compile(r"manifest/([0-9]{4,9}/[A-Za-z0-9._-]+/[0-9]{6,9}\.json|compacted-[0-9]{4,9}\.jsonl\.zst)"),
    "data/part-": re.compile(r"data/part-[0-9]{4,9}-[A-Za-z0-9._-]+-[0-9]{6,9}(=[^/]*)?\.safetensors"),
    "consumed/": re.compile(r"consumed/part-[^/]+\.safetensors/[^/]+\.json"),
    "check.json": re.compile(r"check\.json"),
    "complete.json": re.compile(r"complete\.json"),  # version 1
    "statistics/": re.compile(r"statistics/(?:[a-z][a-z0-9_]{0,63}-)?[0-9]{4,9}\.json"),
}
#: The names that ``page.object_name`` makes from keys, in lower case.
_OF_A_KEY = re.compile(r"[a-z0-9_%-][a-z0-9._%~-]{0,127}")
#: Some file systems ignore these characters in names.
_IGNORED = dict.fromkeys([0x00AD, 0x034F, 0x061C, 0x180E, *range(0x200B, 0x2010), *range(0x202A, 0x202F),
                          *range(0x2060, 0x2070), *range(0xFE00, 0xFE10), 0xFEFF])  # fmt: skip


def marker_name(name: str) -> str:
    """The failure marker of the object ``name``. Two objects never share one."""
    return f"{name.removesuffix(OBJECT)}{MARKERS[0]}" if name.endswith(OBJECT) else f"{name}{MARKERS[1]}"


def conflict_name(name: str) -> str:
    """The conflict marker of the object ``name``."""
    return f"{name}{MARKERS[2]}"


def lock_name(name: str) -> str:
    """The lock file of the object ``name``, with the same name as in vLLM's connector."""
    return f"{name}{LOCK}"


@lru_cache(maxsize=64)  # several checks of one name need its forms, on the engine's thread
def forms(name: str) -> tuple[str, ...]:
    """The canonical forms of a name. Two names that some store or file system treats as one have an equal form.

    Each form ignores letter case, and dots and spaces at the end of each component. A form respects or ignores Unicode
    normalisation with ignorable characters. A form keeps or drops what follows a colon in each component: a colon is an
    ordinary character, or begins the name of a stream (NTFS). A check of a name must check each form.

    The time grows with the square of a component's combining marks: limit the bytes of a client's name first.
    """
    normal = name
    # Twice: normalisation may create capitals, and case folding may undo a normalisation.
    for _ in range(2):
        normal = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", normal).translate(_IGNORED).casefold())
    whole = [form.split("/") for form in (name.casefold(), normal)]
    cut = [[part.partition(":")[0] for part in parts] for parts in whole]
    return tuple(dict.fromkeys("/".join(part.rstrip(". ") for part in parts) for parts in (*whole, *cut)))


def marked_name(marker: str) -> str:
    """The name of the object that the marker named ``marker`` belongs to."""
    end = next(end for end in MARKERS if marker.endswith(end))
    return marker.removesuffix(end) + (OBJECT if end == MARKERS[0] else "")


def is_of_a_key(name: str) -> bool:
    """Whether some file system treats ``name`` as the name of a key's object."""
    return any(
        form.endswith(OBJECT) and _OF_A_KEY.fullmatch(form.removesuffix(OBJECT)) is not None for form in forms(name)
    )


#: A later run's description, and a run's folder: see ``format.place``.
_RUN = re.compile(r"run\.[0-9]+\.json|run-[0-9a-f]{16}")


def is_of_a_run(name: str) -> bool:
    """Whether some file system treats ``name`` as that of a run's object, also of a run in a subfolder."""
    return any(_is_of_a_run(form.split("/")) for form in forms(name))


def _is_of_a_run(parts: list[str]) -> bool:
    if parts[0] in RUN_NAMES or any(map(_RUN.fullmatch, parts)):
        return True
    if parts[-1].endswith(".json") and parts[-1] in RUN_NAMES:
        return True
    # A run of version 1 has no folder with its id.
    below = ["/".join(parts[k:]) for k in range(1, len(parts))]
    return any(pattern.fullmatch(rest) for pattern in OBJECTS_OF_A_RUN.values() for rest in below)


def is_marker(found: Mapping[str, Any]) -> bool:
    """Whether the JSON object ``found`` has the members of a marker, in this or an earlier version, and no others."""
    return {"key", "error"} <= found.keys() <= {"key", "error", "expires", "conflict", "until_stored"}


def is_conflict(marker: bytes) -> bool:
    """Whether a failure marker is a conflict marker of an earlier version."""
    try:
        found = json.loads(marker)
    except (ValueError, RecursionError):  # ValueError: also for invalid UTF-8
        return False
    return isinstance(found, dict) and found.get("conflict") is True
