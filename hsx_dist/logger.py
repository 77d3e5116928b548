"""The loggers of this package. They escape the arguments of messages, which may be text of clients or stored objects.

They also redact them: an argument may be a library's error. A logging filter does both. A formatter could not, because
in vLLM's server other code configures the formatters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from operator import index
from typing import Any

from hsx_dist.text import bounded, hidden_text, names_secret, printable_lines, redacted

#: Limit of the shown characters of one argument.
MAX_ARGUMENT = 2000

#: Names of this package's loggers.
OWN: set[str] = set()

_formatter = logging.Formatter()


class _Shown:
    """An argument of a message, formatted together with the message. ``show`` is called for its text."""

    def __init__(self, value: object, show: Callable[[str], str]):
        self._value = value
        self._show = show

    def __str__(self) -> str:
        return self._text(str)

    def __repr__(self) -> str:
        return self._text(repr)

    def _text(self, of: Callable[[object], str]) -> str:
        try:
            return self._show(of(self._value))
        except Exception:  # noqa: BLE001 - logging would print the error of any argument, unredacted
            return f"({type(self._value).__name__} that cannot be shown)"

    # For %d, %x and %f: NumPy's and torch's numbers are neither int nor float. These methods refuse text.
    def __int__(self) -> int:
        return int(self._number())

    def __index__(self) -> int:
        return index(self._number())

    def __float__(self) -> float:
        return float(self._number())

    def _number(self) -> Any:
        if isinstance(self._value, (str, bytes, bytearray)):
            raise TypeError(f"expected a number, got a {type(self._value).__name__}")
        return self._value


def shown_traceback(raised: Any) -> str:
    """Return the traceback of a record's ``exc_info``, redacted and escaped."""
    return printable_lines(redacted(_formatter.formatException(raised)))


def hide_exception(record: logging.LogRecord) -> None:
    """Replace a record's exception and stack by redacted text.

    Formatters print ``exc_text`` in place of the exception, some only if there is one. Handlers that send records
    elsewhere, and some formatters, read the exception: theirs has the redacted traceback as its text, and no frames.
    """
    raised, record.exc_info = record.exc_info, None
    if record.exc_text:
        record.exc_text = printable_lines(redacted(record.exc_text))
    elif isinstance(raised, tuple):  # a library may give another value to ``makeRecord``
        record.exc_text = shown_traceback(raised)
        if raised[1] is not None:
            record.exc_info = (Exception, Exception(record.exc_text), None)
    if record.stack_info:
        record.stack_info = printable_lines(redacted(record.stack_info))


def _named(args: Any) -> list[tuple[Any, Any]]:
    """Return each argument of a record and its name: its key in a mapping, or the argument before it."""
    if isinstance(args, Mapping):
        return [(value, name) for name, value in args.items()]
    return list(zip(args, (None, *args), strict=False)) if isinstance(args, tuple) else []


def has_named_secret(args: Any) -> bool:
    """Whether an argument that ``hide_arguments`` hides is behind a secret's name."""
    return any(not _is_plain(value) and names_secret(name) for value, name in _named(args))


def shows_no_secret(args: Any) -> bool:
    """Whether redaction hides nothing of the text of each argument. ``repr`` shows another text of an error."""
    try:
        texts = [str(value) for value, _ in _named(args) if not _is_plain(value)]
    except Exception:  # noqa: BLE001 - any code of a library
        return False
    return all(redacted(text) == text for text in texts)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (int, float))


def hide_arguments(record: logging.LogRecord, hide: Callable[[Any], Any]) -> None:
    """Store the result of ``hide`` for each argument of a record, and ``HIDDEN`` behind a secret's name. Numbers stay.

    The template may show an argument without its name.
    """

    def hidden(value: Any, name: Any) -> Any:
        if _is_plain(value):
            return value
        return redacted_argument(value, hidden_text) if names_secret(name) else hide(value)

    shown = [hidden(value, name) for value, name in _named(record.args)]
    if isinstance(record.args, Mapping):
        record.args = dict(zip(record.args, shown, strict=True))
    elif isinstance(record.args, tuple):
        record.args = tuple(shown)


def redacted_argument(value: Any, hide: Callable[[str], str] = redacted) -> Any:
    """Return an argument of a library's message, redacted. Text stays text, because filters and formatters read it."""
    return hide(value) if isinstance(value, str) else _Shown(value, hide)


def _escaped(value: Any) -> Any:
    return _Shown(value, partial(bounded, limit=MAX_ARGUMENT))


class Escaping(logging.Filter):
    """Makes a record's message, arguments and traceback printable, and redacts them. Removes no records.

    A message with arguments is a template of this package: redacted, it might lose a ``%s``.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = printable_lines(record.msg if record.args else redacted(str(record.msg)))
        hide_arguments(record, _escaped)
        hide_exception(record)
        return True


_escaping = Escaping()


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module of this package. A plain ``logging.getLogger`` would not escape clients' text."""
    log = logging.getLogger(name)
    log.addFilter(_escaping)  # adds it only once
    OWN.add(name)
    return log
