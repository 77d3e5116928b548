"""A row's nested fields as plain JSON values, bounded before anything else reads them."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from hsx_dist.errors import InputError
from hsx_dist.text import bounded, redacted, shown_error

#: Nested lists and objects of one field. json, pickle and jinja recurse, and fail at a few hundred levels.
MAX_DEPTH = 64
#: Values of one field: items of lists and members of objects, at every level.
MAX_VALUES = 1 << 20
#: Text of a row that is shown. Redaction of other text takes up to milliseconds, and a small compressed file may have a
#: million rows whose reasons quote text.
_SHOWN = re.compile(r"(?!.*::)[\w .,+/:#<>|()\[\]-]{0,80}")
#: Characters of an error's first line that are shown. Redaction of a text from a row may take milliseconds.
_MOST_OF_ERROR = 200
#: Python refuses to print integers above 4300 digits, which are 14,284 bits.
_MAX_INT_BITS = 4096
#: msgpack, which carries a request to an engine in another process, has integers of 64 bits.
_LEAST_INT, _MOST_INT = -(1 << 63), (1 << 64) - 1


def chat_value(value: Any, name: str) -> Any:
    """Return messages or tools as lists, objects and scalars. Dates, times and decimals become their ``str``, as a
    template would print them.

    Raises:
        InputError: a value has no JSON form, such as NaN, or the field is nested too deeply or has too many values.
    """
    return _plain(
        value, name, lambda item: str(item) if isinstance(item, _AS_TEXT) and not _is_nat(item) else item, MAX_VALUES
    )


def metadata_value(value: Any, name: str, most: int) -> Any:
    """Return a metadata column as JSON values.

    Dates and times are in ISO 8601, durations in seconds. Decimals, and integers of more than 64 bits, are text.
    Numbers that are not finite, and times that are not a time (``NaT``), are null. ``most``: limit of the
    number of values.

    Raises:
        InputError: as ``chat_value``.
    """
    return _plain(value, name, _metadata_scalar, most)


_AS_TEXT = (date, time, timedelta, Decimal, UUID)


def _metadata_scalar(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if _is_nat(value):
        return None
    if isinstance(value, int) and value.bit_length() <= _MAX_INT_BITS:
        return value if _LEAST_INT <= value <= _MOST_INT else str(value)
    if isinstance(value, (date, time)):  # datetime is a date
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value) if isinstance(value, (Decimal, UUID)) else value


def _is_nat(value: Any) -> bool:
    """Whether a value is the ``NaT`` of pandas, an instance of ``datetime``: Arrow's least time in nanoseconds."""
    return isinstance(value, date) and value != value


def _plain(value: Any, name: str, scalar: Callable[[Any], Any], most: int) -> Any:
    """Return a copy of ``value`` with lists, objects, and ``scalar`` of each other value. Does not recurse."""
    root = [value]
    todo: list[tuple[list[Any] | dict[str, Any], int]] = [(root, 0)]
    count = 0
    while todo:
        box, depth = todo.pop()
        for place, item in enumerate(box) if isinstance(box, list) else box.items():
            if not isinstance(item, (list, tuple, dict)):
                box[place] = _checked(scalar(item), name)  # type: ignore[index]
                continue
            count += len(item)
            if count > most:
                raise InputError(f"{name}: expected at most {most} values, got more. Shorten the row, or remove it")
            if depth == MAX_DEPTH:
                raise InputError(
                    f"{name}: expected lists and objects nested at most {MAX_DEPTH} deep, got a deeper one. Flatten "
                    "the row, or store the value as a JSON text"
                )
            inner = _members(item, name) if isinstance(item, dict) else list(item)
            box[place] = inner  # type: ignore[index]
            todo.append((inner, depth + 1))
    return root[0]


def _members(value: dict[Any, Any], name: str) -> dict[str, Any]:
    found = {}
    for key, item in value.items():
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            raise InputError(f"{name}: expected names of members to be strings, got {kind_of(key)}. Use strings")
        key = str(_checked(key, name))
        if key in found:
            raise InputError(f"{name}: expected each member once, got {shown(key)} twice. Remove one of them")
        found[key] = item
    return found


_EXACT = (str, int, float, bool, type(None))


def _checked(value: Any, name: str) -> Any:
    if isinstance(value, str):
        if not is_unicode(value):
            raise InputError(f"{name}: expected valid Unicode, got half of a surrogate pair. Correct the text")
    elif isinstance(value, int):
        if value.bit_length() > _MAX_INT_BITS:
            raise InputError(
                f"{name}: expected integers of at most {_MAX_INT_BITS} bits, got {shown(value)}. Store it as text"
            )
    elif isinstance(value, float):
        if not math.isfinite(value):  # JSON has no such number, so a template would print NaN or Infinity
            raise InputError(
                f"{name}: expected finite numbers, got {shown(value)}. Use null, or leave it out of the row"
            )
    elif value is not None:
        raise InputError(f"{name}: expected a value that JSON can hold, got {kind_of(value)}. Leave it out of the row")
    if type(value) in _EXACT:
        return value
    # A subclass, such as NumPy's. The transport to an engine in another process supports only Python's own types.
    return str.__str__(value) if isinstance(value, str) else int(value) if isinstance(value, int) else float(value)


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can encode ``text``."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def kind_of(value: Any) -> str:
    """Return the kind of a value, in JSON's words."""
    names = {dict: "an object", str: "a string", bool: "a boolean", int: "an integer", float: "a number"}
    if value is None:
        return "null"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return names.get(type(value), type(value).__name__)


def shown(value: Any) -> str:
    """Return a number or short plain text in quotation marks, or the kind of another value, which may be very large."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        return repr(redacted(value)) if _SHOWN.fullmatch(value) else f"a string of {len(value)} characters"
    return repr(str(value)) if isinstance(value, (int, float)) else kind_of(value)


def shown_problem(error: BaseException) -> str:
    """Return the type of an error, with a short first line. A template's error may quote the row's text."""
    line = (shown_error(error).splitlines() or [""])[0]
    return bounded(line) if len(line) <= _MOST_OF_ERROR else type(error).__name__


def row_json(text: str) -> Any:
    """Parse the JSON of a row.

    Raises:
        InputError: an object has a member twice. Programs read such a row differently.
        ValueError, RecursionError: as ``json.loads``.
    """
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise InputError(f"expected each member of a JSON object once, got {shown(twice)} twice. Remove one")
    return found
