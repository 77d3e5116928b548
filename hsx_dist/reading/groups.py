"""Groups of items that are in memory together, limited by their number and by their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

M = TypeVar("M", bound=Mapping[str, Any])

#: Bytes of a group's arrays. A single sample may decode to 64 MiB from few stored bytes, so a number is no limit.
GROUP_BYTES = 64 << 20


def groups(items: Iterable[M], most: int) -> Iterator[list[M]]:
    """Yield the items in lists of at most ``most`` items and ``GROUP_BYTES`` bytes. A larger item is alone.

    Each list is emptied when the next one is requested, so that two groups are never in memory.
    """
    group: list[M] = []
    held = 0
    for item in items:
        nbytes = sum(getattr(x, "nbytes", 0) for x in item.values())
        if group and (len(group) == most or held + nbytes > GROUP_BYTES):
            yield group
            group.clear()
            held = 0
        group.append(item)
        held += nbytes
        del item  # the group alone holds it
    if group:
        yield group
        group.clear()
