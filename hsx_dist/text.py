"""Text from clients, rows and stored objects, made safe for terminals and logs.

Keys and reasons may hold escape sequences, line breaks, C1 controls or bidirectional overrides. Log lines
(``observe.logs``) and terminals (``observe.console``) show them through these functions only.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from itertools import accumulate
from numbers import Integral, Real
from typing import Any

#: Limit in characters of a reason that is stored, returned to a client, or put into an error.
MAX_REASON = 1000


def printable(text: object, limit: int | None = None) -> str:
    """Return ``text`` on one line, in at most ``limit`` characters.

    Characters in Unicode's categories control, format, surrogate, private, unassigned and separator (except the space)
    become ``\\n``, ``\\x1b``, ``\\u202e`` and so on.
    """
    shown = str(text)
    if limit is not None and len(shown) > limit:
        shown = f"{shown[: limit - 1]}…"
    if shown.isprintable():
        return shown
    pieces = [c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown]
    if limit is not None and sum(map(len, pieces)) > limit:
        ends = list(accumulate(map(len, pieces)))
        pieces = [*pieces[: bisect_right(ends, limit - 1)], "…"]
    return "".join(pieces)


def printable_lines(text: object) -> str:
    """Return ``text`` with its line breaks, and every line after the first indented.

    So a line break in a client's text cannot fake a log line, which begins at the margin.
    """
    return "\n  ".join(map(printable, str(text).split("\n")))


def bounded(text: object) -> str:
    """Return a reason in the form that is stored and returned: printable, at most ``MAX_REASON`` characters."""
    return printable(text, MAX_REASON)


def ascii_json(value: Any, *, indent: int | None = None) -> str:
    """Encode JSON of printable ASCII and line breaks. NumPy's numbers become numbers, other types text."""
    # The json module does not escape DEL. Outside of strings it cannot occur.
    try:
        text = json.dumps(value, indent=indent, ensure_ascii=True, default=_plain, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), indent=indent, ensure_ascii=True, default=_plain, allow_nan=False)
    return text.replace("\x7f", "\\u007f")


def _plain(value: Any) -> Any:
    if isinstance(value, Integral):
        return int(value)
    return _finite(float(value)) if isinstance(value, Real) else str(value)


def _finite(value: Any) -> Any:
    """Return ``value`` with null in place of numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
