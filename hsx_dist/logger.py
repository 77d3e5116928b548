"""The loggers of this package. They escape the arguments of messages, which may be text of clients or stored objects.

They also redact them: an argument may be a library's error. A logging filter does both. A formatter could not, because
in vLLM's server other code configures the formatters.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from operator import index
from typing import Any

from hsx_dist.text import bounded, printable_lines, redacted

#: Limit of the shown characters of one argument.
MAX_ARGUMENT = 2000

#: Names of this package's loggers.
OWN: set[str] = set()

_formatter = logging.Formatter()


class _Escaped:
    """An argument of a message, formatted together with the message."""

    def __init__(self, value: object):
        self._value = value

    def __str__(self) -> str:
        return bounded(self._value, MAX_ARGUMENT)

    def __repr__(self) -> str:
        return bounded(repr(self._value), MAX_ARGUMENT)

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

    Formatters print ``exc_text`` in place of the exception. Handlers that send records elsewhere read the exception.
    """
    raised, record.exc_info = record.exc_info, None
    if record.exc_text:
        record.exc_text = redacted(record.exc_text)
    elif isinstance(raised, tuple):  # a library may give another value to ``makeRecord``
        record.exc_text = shown_traceback(raised)
    if record.stack_info:
        record.stack_info = printable_lines(redacted(record.stack_info))


def _escaped(value: Any) -> Any:
    return value if value is None or isinstance(value, (int, float)) else _Escaped(value)


class Escaping(logging.Filter):
    """Makes a record's message, arguments and traceback printable, and redacts them. Removes no records.

    A message with arguments is a template of this package: redacted, it might lose a ``%s``.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = printable_lines(record.msg if record.args else redacted(str(record.msg)))
        if isinstance(record.args, Mapping):
            record.args = {name: _escaped(value) for name, value in record.args.items()}
        elif record.args:
            record.args = tuple(map(_escaped, record.args))
        hide_exception(record)
        return True


_escaping = Escaping()


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module of this package. A plain ``logging.getLogger`` would not escape clients' text."""
    log = logging.getLogger(name)
    log.addFilter(_escaping)  # adds it only once
    OWN.add(name)
    return log
