"""What may lie beside an object of a server: its lock (on a file system) and its failure marker. Names only.

A marker is JSON, ``{"key", "error"}``, with ``expires`` (seconds since the epoch) where the server gives its objects a
time to live, and with ``"conflict": true`` where the key was used for two samples: such a marker stays until somebody
deletes it.
"""

from __future__ import annotations

import json
import re
import unicodedata

OBJECT = ".safetensors"
LOCK = ".lock"
#: Ends of markers: ``KEY.error.json`` of ``KEY.safetensors``, ``NAME.failed.json`` of any other name a client chose.
MARKERS = (".error.json", ".failed.json")
#: No object may end so.
RESERVED = (LOCK, *MARKERS)
#: Objects of a run at the top of its prefix, and the first folders of its other objects.
RUN_NAMES = frozenset(
    {
        *("run.json", "complete.json", "check.json", "removed.json"),
        *("attempts", "consumed", "data", "manifest", "removed", "report"),
    }
)
#: How ``page.object_name`` makes names of keys, folded.
_OF_A_KEY = re.compile(r"[a-z0-9_%-][a-z0-9._%~-]{0,127}")
#: Some file systems ignore these characters in names.
_IGNORED = dict.fromkeys([0x00AD, 0x034F, 0x061C, 0x180E, *range(0x200B, 0x2010), *range(0x202A, 0x202F),
                          *range(0x2060, 0x2070), *range(0xFE00, 0xFE10), 0xFEFF])  # fmt: skip


def marker_name(name: str) -> str:
    """The failure marker of the object ``name``: no two objects share one."""
    return f"{name.removesuffix(OBJECT)}{MARKERS[0]}" if name.endswith(OBJECT) else f"{name}{MARKERS[1]}"


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


def is_of_a_key(name: str) -> bool:
    """Whether some file system takes ``name`` for the object of a key."""
    same = folded(name)
    return same.endswith(OBJECT) and _OF_A_KEY.fullmatch(same.removesuffix(OBJECT)) is not None


#: A later run's description, and a run's folder: see ``format.place``.
_RUN = re.compile(r"run\.[0-9]+\.json|run-[0-9a-f]{16}")


def is_of_a_run(name: str) -> bool:
    """Whether some file system takes ``name`` for one of a run's own objects, or for a run in a folder below."""
    parts = folded(name).split("/")
    if parts[0] in RUN_NAMES or any(map(_RUN.fullmatch, parts)):
        return True
    return parts[-1].endswith(".json") and parts[-1] in RUN_NAMES


def is_conflict(marker: bytes) -> bool:
    """Whether a marker says that its key stands for two samples."""
    try:
        found = json.loads(marker)
    except (ValueError, RecursionError):  # also where it is no UTF-8
        return False
    return isinstance(found, dict) and found.get("conflict") is True
