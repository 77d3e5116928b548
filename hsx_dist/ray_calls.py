"""Tasks and actors whose errors and log lines show no credentials. Ray writes each error that it gets into its logs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from hsx_dist import errors
from hsx_dist.config.redaction import redact_text
from hsx_dist.errors import HsxError, is_error
from hsx_dist.logger import get_logger
from hsx_dist.new_process import begin_process
from hsx_dist.text import shown_error, text_of

log = get_logger(__name__)


def remote(entry: Any, **options: Any) -> Any:
    """Return ``ray.remote`` of a function, or of a class whose public methods and constructor are called by Ray.

    The process that runs it redacts its log records, and errors reach Ray as ``redacted_errors`` raises them.
    """
    return (ray.remote(**options) if options else ray.remote)(guarded(entry))


def guarded(entry: Any) -> Any:
    """Return what ``remote`` gives to Ray."""
    if not isinstance(entry, type):
        return _guarded_call(entry)
    called = {
        name: _guarded_call(member)
        for name, member in vars(entry).items()
        if inspect.isfunction(member) and (name == "__init__" or not name.startswith("_"))
    }
    # Ray shows the class by these names.
    names = {"__module__": entry.__module__, "__qualname__": entry.__qualname__}
    return type(entry.__name__, (entry,), {**called, **names})


def _guarded_call(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def guarded_call(*args: Any, **kwargs: Any) -> Any:
        begin_process()
        with redacted_errors():
            return call(*args, **kwargs)

    return guarded_call


@contextmanager
def redacted_errors() -> Iterator[None]:
    """Raise an error of the block with redacted text and without its causes, as an error of ``hsx_dist.errors``.

    An error of that module keeps its type. A subclass becomes its base there, and every other error an ``HsxError``.
    """
    try:
        yield
    except BaseException as e:
        if not is_error(e):
            raise
        log.warning("an error ends a call of Ray", exc_info=True)
        told = text_of(e) if isinstance(e, HsxError) else shown_error(e)
        kind = next((c for c in type(e).__mro__ if c.__module__ == errors.__name__), HsxError)
        raise kind(redact_text(told)).with_traceback(e.__traceback__) from None
