"""When an object of a server expires: the member ``expires`` of its segments' ``meta``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hsx_dist.format.json_objects import number

#: Seconds for which an object must still exist to satisfy a later request of its key: readers need time to fetch it.
STILL_THERE_S = 60.0


def expires_by(meta: Mapping[str, Any], moment: float) -> bool:
    """Whether an object with a segment of this ``meta`` has expired at ``moment`` (seconds since the epoch)."""
    expires: Any = meta.get("expires")
    return number(expires) is None and expires <= moment
