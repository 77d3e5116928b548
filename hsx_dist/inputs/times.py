"""Finds times and dates of Arrow that Python would change: Arrow takes 24:00 as 00:00, and -1 s as 23:59:59."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

#: Why a row with such a time is refused.
CHANGED_TIME = (
    "expected times from 00:00 to before 24:00, and dates without a time of day, got others. Correct or cast the column"
)
_PER_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}

_Check = Callable[[Any], bool]
#: Whether Python would change an Arrow scalar of a column, by the column's name.
TimeChecks = Mapping[str, _Check]


def time_checks(schema: Any) -> TimeChecks:
    """Return a check for each column with times or dates."""
    found: dict[str, _Check] = {}
    for field in schema:
        with suppress(RecursionError):  # a row with a value at such a depth is refused
            if (check := _check_of(field.type)) is not None:
                found[field.name] = check
    return found


def rows_of_changed_times(batch: Any, checks: TimeChecks) -> set[int]:
    """Return which rows of a record batch have a time outside the day, or a date with a time of day."""
    return {i for name, check in checks.items() for i, scalar in enumerate(batch.column(name)) if check(scalar)}


def _check_of(kind: Any) -> _Check | None:
    """Return a function that says whether Python would change an Arrow scalar of a type. None: it never does."""
    check = _check_of_valid(kind)
    return None if check is None else lambda scalar: scalar.is_valid and check(scalar)


def _check_of_valid(kind: Any) -> _Check | None:
    import pyarrow as pa

    types = pa.types
    if types.is_time(kind):
        day = _PER_DAY[kind.unit]
        return lambda scalar: not 0 <= scalar.value < day
    if types.is_date64(kind):
        return lambda scalar: scalar.value % _PER_DAY["ms"] != 0
    if types.is_dictionary(kind):
        inner = _check_of(kind.value_type)
        return None if inner is None else lambda scalar: inner(scalar.value)
    if types.is_struct(kind):
        return _of_members({i: check for i, f in enumerate(kind) if (check := _check_of(f.type)) is not None})
    if types.is_map(kind):
        entry = _check_of(pa.struct([kind.key_field, kind.item_field]))
    elif types.is_nested(kind):  # all other nested types are lists
        entry = _check_of(kind.value_type)
    else:
        return None
    return None if entry is None else lambda scalar: any(map(entry, scalar.values))


def _of_members(checks: dict[int, _Check]) -> _Check | None:
    return (lambda scalar: any(check(scalar[i]) for i, check in checks.items())) if checks else None
