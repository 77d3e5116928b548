"""Finds times and dates of Arrow that Python would change.

Arrow takes 24:00 as 00:00, and -1 s as 23:59:59. It leaves out the nanoseconds of a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

#: Why a row with such a time is refused.
CHANGED_TIME = (
    "expected times from 00:00 to before 24:00 in whole microseconds, and dates without a time of day, got others. "
    "Correct or cast the column"
)
_NS_PER_US = 1000
_PER_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}

_Check = Callable[[Any], np.ndarray[Any, np.dtype[np.bool_]]]
#: Returns, for an Arrow array of a column, which elements Python would change. By the column's name.
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
    """Return which rows of a record batch have a time that Python would change, or a date with a time of day."""
    return {int(i) for name, check in checks.items() for i in np.flatnonzero(check(batch.column(name)))}


def _check_of(kind: Any) -> _Check | None:
    """Return the check of an Arrow type. None: Python changes no value of the type."""
    check = _check_of_some(kind)
    if check is None:
        return None

    def of_valid(values: Any) -> Any:
        # Does not visit the types in a type without values: there may be thousands, and each row may be null.
        if values.null_count == len(values):
            return np.zeros(len(values), bool)
        found = check(values)
        return found & _numbers(values.is_valid()) if values.null_count else found

    return of_valid


def _check_of_some(kind: Any) -> _Check | None:
    """Return the check of an Arrow type for arrays with at least one value. Its result for a null has no meaning."""
    import pyarrow as pa

    types = pa.types
    if types.is_time(kind):
        number = pa.int32() if kind.bit_width == 32 else pa.int64()
        return lambda values: _changed(_numbers(values.view(number).fill_null(0)), kind.unit)
    if types.is_date64(kind):
        return lambda values: _numbers(values.view(pa.int64()).fill_null(0)) % _PER_DAY["ms"] != 0
    if types.is_dictionary(kind):
        of_value = _check_of(kind.value_type)
        return None if of_value is None else lambda values: of_value(values.dictionary.take(values.indices))
    if types.is_struct(kind):
        return _of_members({i: check for i, f in enumerate(kind) if (check := _check_of(f.type)) is not None})
    if types.is_map(kind):
        own = [(check, of) for of, check in (("keys", _check_of(kind.key_type)), ("items", _check_of(kind.item_type)))]
        return _of_lists([(check, of) for check, of in own if check is not None])
    if not types.is_nested(kind):
        return None
    entry = _check_of(kind.value_type)
    if entry is None:
        return None
    return _of_fixed_lists(entry, kind.list_size) if types.is_fixed_size_list(kind) else _of_lists([(entry, "values")])


def _of_members(checks: dict[int, _Check]) -> _Check | None:
    if not checks:
        return None
    return lambda values: np.logical_or.reduce([check(values.field(i)) for i, check in checks.items()])


def _of_lists(checks: list[tuple[_Check, str]]) -> _Check | None:
    """Return the check of lists or maps. ``checks``: checks of entries, and the attribute that has these entries."""

    def check(values: Any) -> Any:
        ends = _numbers(values.offsets)
        found = np.zeros(len(values), bool)
        for of_entries, name in checks:
            entries = getattr(values, name).slice(ends[0], ends[-1] - ends[0])
            before = np.append(0, np.cumsum(of_entries(entries)))[ends - ends[0]]  # changed entries before each end
            found |= before[1:] > before[:-1]
        return found

    return check if checks else None


def _of_fixed_lists(entry: _Check, size: int) -> _Check:
    def check(values: Any) -> Any:
        entries = values.values.slice(values.offset * size, len(values) * size)
        return entry(entries).reshape(len(values), size).any(axis=1)

    return check


def _numbers(values: Any) -> Any:
    return values.to_numpy(zero_copy_only=False)


def _changed(numbers: Any, unit: str) -> Any:
    found = (numbers < 0) | (numbers >= _PER_DAY[unit])
    return found | (numbers % _NS_PER_US != 0) if unit == "ns" else found
