"""Log lines that programs can also read: ``time level logger message key=value …``, or JSON with ``HSX_LOG=json``.

The subject of a line is in ``extra``: ``log.warning("…", extra={"key": key})``. Messages contain it too, because vLLM's
logging configuration does not show ``extra``.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from hsx_dist.config.redaction import redact_text
from hsx_dist.logger import (
    OWN,
    has_named_secret,
    hide_arguments,
    hide_exception,
    redacted_argument,
    shown_traceback,
    shows_no_secret,
)
from hsx_dist.text import ascii_json, printable_lines

#: Names of a line's subjects, in the order in which they are shown.
FIELDS = ("run", "attempt", "replica", "rank", "writer", "key", "row", "part")
#: Limit of a message's lines in one window.
OFTEN = 10
#: Length of a window in seconds. Lines beyond the limit are only counted.
WINDOW_S = 60.0
#: Characters of an unformatted message that are compared.
_TEMPLATE = 200
#: Environment variable that child processes inherit from a process that redacts its records.
_REDACTS = "HSX_REDACTS_RECORDS"
#: Has ``formats``: whether this thread formats a message.
_thread = threading.local()


class Structured(logging.Formatter):
    """Adds ``context`` (run, replica, rank, writer) and a record's ``extra`` to every line."""

    def __init__(self, context: Mapping[str, Any] | None = None, *, as_json: bool = False):
        super().__init__()
        self._context = dict(context or {})
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        found = {n: v for n in FIELDS if (v := getattr(record, n, self._context.get(n))) is not None}
        about = {n: v if isinstance(v, int) else redact_text(str(v)) for n, v in found.items()}
        message = printable_lines(redact_text(record.getMessage()) + getattr(record, "suppressed", ""))
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        # ``exc_text`` may come from a library's record or formatter, which do not redact it.
        trace = printable_lines(redact_text(record.exc_text)) if record.exc_text else ""
        trace = trace or (shown_traceback(record.exc_info) if record.exc_info else "")
        if self._as_json:
            line = {"time": at, "level": record.levelname, "logger": record.name, "message": message, **about}
            return ascii_json({**line, **({"traceback": trace} if trace else {})})
        words = " ".join(f"{name}={_word(value)}" for name, value in about.items())
        text = f"{at} {record.levelname} {record.name} {message}" + (f" {words}" if words else "")
        return f"{text}\n{trace}" if trace else text


class NotSoOften(logging.Filter):
    """Passes a message ``OFTEN`` times in ``WINDOW_S``, and counts the rest. Messages differ by the beginning of their
    unformatted text.

    The first line of the next window has the number of suppressed lines.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.name, str(getattr(record, "_template", record.msg))[:_TEMPLATE]
        with self._lock:
            now = self._clock()
            since, count = self._seen.get(kind, (now, 0))
            if now - since >= WINDOW_S:
                if count > OFTEN:
                    record.suppressed = f" (and {count - OFTEN} similar lines were left out)"
                since, count = now, 0
            self._seen[kind] = since, count + 1
            self._seen.move_to_end(kind)
            if len(self._seen) > 1000:  # texts that the caller formatted all differ
                self._seen.popitem(last=False)
        return count < OFTEN


def shown_elsewhere(record: logging.LogRecord) -> bool:
    """Whether the record's library has a handler, so that the line would be logged twice."""
    name = record.name
    while name:
        if any(not isinstance(h, logging.NullHandler) for h in logging.getLogger(name).handlers):
            return True
        name = name.rpartition(".")[0]
    return False


def configure_logging(level: int, **context: str) -> None:
    """Let this process log to standard error. Does nothing if logging is configured already.

    ``level`` is that of this package. Lines of other libraries are logged from WARNING on: below it they log each
    request's URL and each answer. vLLM sets its level itself, by ``VLLM_LOGGING_LEVEL``; without its configuration
    (``VLLM_CONFIGURE_LOGGING=0``) it logs from ``level`` on, at least INFO.
    """
    if logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(Structured(context, as_json=os.environ.get("HSX_LOG") == "json"))
    handler.addFilter(lambda record: not shown_elsewhere(record))
    handler.addFilter(NotSoOften())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("hsx_dist").setLevel(level)
    if (vllm := logging.getLogger("vllm")).level == logging.NOTSET:
        vllm.setLevel(max(level, logging.INFO))


class _Redacted(logging.LogRecord):
    """A record whose message is redacted again: a handler may have set another one."""

    def getMessage(self) -> str:  # noqa: N802 - logging's name
        return redact_text(super().getMessage())


@cache
def redact_records() -> None:
    """Redact the messages, tracebacks and stacks of all log records of this process. Only for this package's processes.

    Also redacts those of vLLM's processes that this process starts (``redact_like_parent``).
    """
    os.environ[_REDACTS] = "1"
    factory = logging.getLogRecordFactory()

    def redacted(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = factory(*args, **kwargs)
        if record.name not in OWN:  # the filter of this package's loggers redacts theirs
            _hide_message(record)
            hide_exception(record)
        # Not a copy: vLLM's and Ray's factories add fields. A library's class keeps its type, but its own method would
        # format the message again.
        if type(record) is logging.LogRecord or type(record).getMessage is not logging.LogRecord.getMessage:
            with suppress(TypeError):  # a class with slots
                record.__class__ = _Redacted
        return record

    logging.setLogRecordFactory(redacted)


def _hide_message(record: logging.LogRecord) -> None:
    """Redact a library's message and its arguments, which handlers read too.

    A record without a credential stays as it is: formatters, such as uvicorn's, unpack the arguments. If arguments have
    one, each is redacted alone. If that does not hide it, the redacted message takes the place of the template and its
    arguments. It also does so for a mapping with a credential, and for a class with another format than ``%``.
    """
    message, kept = _message(record)
    shown = redact_text(message)
    if kept and shown == message:
        return
    with suppress(Exception):  # for ``NotSoOften``: a text of a caller may have a credential, a hash has none
        record._template = hash(str(record.msg)[:_TEMPLATE])
    record.msg, record.args = shown, ()


def _message(record: logging.LogRecord) -> tuple[str, bool]:
    """Return a library's message, and whether the record may keep its template and its arguments, which are redacted.

    Arguments are redacted before they are formatted, because a template may cut them.
    """
    if getattr(_thread, "formats", False):  # an argument logs while it is formatted, perhaps itself
        return record.msg if isinstance(record.msg, str) else "a message that is not formatted", False
    args, own = record.args, type(record).getMessage is not logging.LogRecord.getMessage
    _thread.formats = True
    try:
        with suppress(Exception):  # any code of a library
            clean = not args or (
                redact_text(text := repr(args)) == text and not has_named_secret(args) and shows_no_secret(args)
            )
            if not clean:
                hide_arguments(record, redacted_argument)
            return record.getMessage(), not own and (clean or isinstance(args, tuple))
        record.args = args  # redacted, they do not fit
        for form in (record.getMessage, lambda: f"{record.msg!r} with wrong arguments {args!r}"):
            with suppress(Exception):
                return form(), False
        return "a message that cannot be formatted", False
    finally:
        _thread.formats = False


def redact_like_parent() -> None:
    """Call ``redact_records`` if the process that started this one did."""
    if os.environ.get(_REDACTS):
        redact_records()


def _word(value: Any) -> str:
    """Return one word unchanged, other text quoted: a client chooses its key, which may contain anything."""
    text = str(value)
    shown = text.isprintable()
    if shown and text and not any(c in text for c in ' "=\\'):
        return text
    return json.dumps(text, ensure_ascii=False) if shown else ascii_json(text)
