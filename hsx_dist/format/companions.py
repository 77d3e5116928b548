"""What may lie beside an object of a server: its lock (on a file system) and its failure marker. Names only.

A marker is JSON, ``{"key", "error"}``, with ``expires`` (seconds since the epoch) where the server gives its objects a
time to live, and with ``"conflict": true`` where the key was used for two samples: such a marker stays until somebody
deletes it.
"""

from __future__ import annotations

import json

OBJECT = ".safetensors"
LOCK = ".lock"
#: Ends of markers: ``KEY.error.json`` of ``KEY.safetensors``, ``NAME.failed.json`` of any other name a client chose.
MARKERS = (".error.json", ".failed.json")
#: No object may end so.
RESERVED = (LOCK, *MARKERS)


def marker_name(name: str) -> str:
    """The failure marker of the object ``name``: no two objects share one."""
    return f"{name.removesuffix(OBJECT)}{MARKERS[0]}" if name.endswith(OBJECT) else f"{name}{MARKERS[1]}"


def lock_name(name: str) -> str:
    """The companion lock of the object ``name``, as vLLM's own connector calls it."""
    return f"{name}{LOCK}"


def is_conflict(marker: bytes) -> bool:
    """Whether a marker says that its key stands for two samples."""
    try:
        found = json.loads(marker)
    except (ValueError, RecursionError):  # ValueError: also where it is no UTF-8
        return False
    return isinstance(found, dict) and found.get("conflict") is True
