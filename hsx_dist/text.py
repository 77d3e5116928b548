"""Text from clients, rows and stored objects, made safe for terminals and logs.

Keys and reasons may hold escape sequences, line breaks, C1 controls or bidirectional overrides. Log lines
(``observe.logs``) and terminals (``observe.console``) show them through these functions only.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Callable
from errno import errorcode
from functools import cache, lru_cache, partial
from itertools import accumulate
from numbers import Integral, Real
from typing import Any

#: Limit in characters of a reason that is stored, returned to a client, or put into an error.
MAX_REASON = 1000
#: Limit in characters of any text that is shown. A stored object's text may have megabytes, and ten times as many where
#: each character is escaped.
MAX_SHOWN = 1 << 16
#: ``head`` hides a credential of at most this many characters.
_BEYOND = 1 << 10


def printable(text: object, limit: int = MAX_SHOWN) -> str:
    """Return ``text`` on one line, in at most ``limit`` characters.

    Characters in Unicode's categories control, format, surrogate, private, unassigned and separator (except the space)
    become ``\\n``, ``\\x1b``, ``\\u202e`` and so on.
    """
    shown = _cut(str(text), limit)
    if shown.isprintable():
        return shown
    pieces = [c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown]
    ends = list(accumulate(map(len, pieces)))
    if ends[-1] > limit:
        pieces = [*pieces[: bisect_right(ends, limit - 1)], "…"]
    return "".join(pieces)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def printable_lines(text: object) -> str:
    """Return ``text`` with its line breaks, and every line after the first indented. Shows ``MAX_SHOWN`` characters.

    So a line break in a client's text cannot fake a log line, which begins at the margin.
    """
    return "\n  ".join(map(printable, _cut(str(text), MAX_SHOWN).split("\n")))


@cache
def _redaction() -> tuple[Callable[[str], str], Callable[[str], bool]]:
    # Imported late: the benchmark of a GPU's copies runs on machines without the packages of ``config``. It opens no
    # store, so its lines have no credentials.
    try:
        from hsx_dist.config.redaction import names_a_secret, redact_text
    except ImportError:
        return str, lambda _: False
    return redact_text, partial(names_a_secret, in_list=True)


def redacted(text: str) -> str:
    """Return ``redact_text(text)``."""
    return _redaction()[0](text)


def names_secret(name: object) -> bool:
    """Whether the value behind ``name``, a text or bytes, may be a secret (``names_a_secret``).

    Of a path only the last name counts: the error behind ``s3://team-secrets/run`` is shown.
    """
    name = name.decode(errors="replace") if isinstance(name, bytes) else name
    return isinstance(name, str) and _redaction()[1](name.rpartition("/")[2])


def hidden_text(_text: str) -> str:
    """Return the text in place of a value that is not shown."""
    from hsx_dist.config.secret_names import HIDDEN

    return HIDDEN


def text_of(value: object) -> str:
    """Return ``str(value)``. If its ``__str__`` raises, as that of some errors of libraries does, return its type."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - any code of a library
        return f"({type(value).__name__} that cannot be shown)"


def shown_error(error: BaseException) -> str:
    """Return the type and the text of an error of any library."""
    return f"{type(error).__name__}: {text_of(error)}"


def os_reason(error: BaseException) -> str:
    """Return the operating system's text for the number of a built-in ``OSError``, or the error's type.

    Never the error's own text, in which libraries put a server's answer. Their own types use other numbers.
    """
    number = error.errno if isinstance(error, OSError) and type(error).__module__ == "builtins" else None
    if number is not None and number in errorcode:
        return os.strerror(number)
    return type(error).__name__


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its text, as ``bounded``."""
    return bounded((shown_error(error).splitlines() or [""])[0], 200)


def bounded(text: object, limit: int = MAX_REASON) -> str:
    """Return a reason in the form that is stored and returned: redacted, printable, at most ``limit`` characters.

    Redacts before it cuts: half a credential is not recognized.
    """
    return printable(redacted(text_of(text)), limit)


def head(text: str, limit: int) -> str:
    """Return the first ``limit`` characters of the redacted text, for a message that quotes them.

    Redacts before it cuts, as ``bounded``. Reads little more than it shows, because messages may quote a text of
    megabytes very often. A credential that is cut there is among the last ``_BEYOND`` characters, which are left out.
    """
    seen = text[: limit + 2 * _BEYOND]
    shown = _redacted_once(seen)
    return shown[:limit] if len(seen) == len(text) else shown[:-_BEYOND][:limit] or "…"


@lru_cache(maxsize=64)
def _redacted_once(text: str) -> str:
    return redacted(text)


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
