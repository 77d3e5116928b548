"""What the members of a run's own JSON objects must be. Members that are not named here may be anything."""

from __future__ import annotations

from typing import Any

from hsx_dist.format.description import MAX_HIDDEN_SIZE
from hsx_dist.format.json_objects import Check, anything, count, members, number, object_of, or_null, text


def _layers(value: Any) -> str | None:
    """Ids; or a string, such as ``all``, in a run whose driver did not resolve it."""
    ids = value if isinstance(value, list) else [value]
    fine = len(ids) <= MAX_HIDDEN_SIZE and all(type(v) in (int, str) for v in ids)
    return None if fine else "layer ids"


_MEANING = {"model": or_null(text), "revision": or_null(text), "layers": or_null(_layers)}
_PROGRESS = {
    **dict.fromkeys(
        ("rows", "tokens", "raw_bytes", "stored_bytes", "in_flight", "replicas", "under_way"), or_null(count)
    ),
    **dict.fromkeys(("tokens_per_second", "seconds", "engines_timestamp"), or_null(number)),
    "fates": object_of(or_null(count)),
    "counted": object_of(number),
    "paused": or_null(text),
}

RUN_MEMBERS: dict[str, Check] = {
    "meaning": members(_MEANING),
    "settings": object_of(anything),
    "created": text,
    "id": text,
    "first_rows": or_null(object_of(text)),
}
ATTEMPT_MEMBERS: dict[str, Check] = {"created": text, "host": text, "settings": object_of(anything)}
HEARTBEAT_MEMBERS: dict[str, Check] = {
    "attempt": count,
    "value": or_null(number),
    "state": text,
    "time": or_null(text),
    "progress": or_null(members(_PROGRESS)),
}
COMPLETE_MEMBERS: dict[str, Check] = {
    "counts": object_of(count),
    "summary": members({"rows": or_null(count)}),
    "created": text,
}
