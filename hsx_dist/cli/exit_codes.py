"""Exit statuses, and errors as one message instead of a traceback."""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import typer

from hsx_dist.config.redaction import redact_text
from hsx_dist.errors import (
    ConfigError,
    Denied,
    HsxError,
    InputError,
    NotFound,
    RunError,
    RunMismatch,
    SampleNotFound,
    is_error,
)
from hsx_dist.new_process import begin_process
from hsx_dist.observe.console import say, say_lines
from hsx_dist.observe.logs import configure_logging

FINE, FOUND_BAD, WRONG_USE = 0, 1, 2

#: typer has a copy of click, and does not export this class.
_USAGE_ERROR: Any = typer.BadParameter.__bases__[0]
_WRONG_USE = (ConfigError, InputError, NotFound, Denied, RunMismatch, SampleNotFound)


def exit_status(error: HsxError) -> int:
    """Return 2 if the caller can correct the cause (a setting, a name, access), and 1 otherwise."""
    # RunError itself, not a subclass such as Fenced: there is no run at the given path.
    return WRONG_USE if isinstance(error, _WRONG_USE) or type(error) is RunError else FOUND_BAD


def run_app(app: typer.Typer, args: Sequence[str] | None, name: str) -> None:
    """Run a typer app of this package with this package's logging, and exit as ``run_command`` does."""
    begin_process()
    configure_logging(logging.DEBUG if _shows_tracebacks() else logging.WARNING)
    given = None if args is None else list(args)
    run_command(lambda: app(args=given, prog_name=name, standalone_mode=False), name)


def _shows_tracebacks() -> bool:
    return os.environ.get("HSX_DEBUG", "") not in ("", "0")


def run_command(command: Callable[[], int | None], name: str) -> None:
    """Call a command and exit; an HsxError becomes its message on stderr. ``HSX_DEBUG=1`` shows the traceback too.

    ``command`` calls a typer app that is not standalone. Such an app would print the error of a wrong argument itself,
    with the argument's password. With typer before 0.23 it would also print local variables.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # keys may have characters that its encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        sys.exit(command() or FINE)
    except _USAGE_ERROR as e:
        shown = io.StringIO()
        e.show(shown)
        for line in redact_text(shown.getvalue()).strip().splitlines():
            say(line, to=sys.stderr)
        sys.exit(WRONG_USE)
    except typer.Abort:
        say("Aborted!", to=sys.stderr)
        sys.exit(FOUND_BAD)
    except HsxError as e:
        if _shows_tracebacks():
            say_lines(redact_text(traceback.format_exc()), to=sys.stderr)
        say_lines(f"{name}: {redact_text(str(e))}", to=sys.stderr)
        sys.exit(exit_status(e))
    except BaseException as e:  # the outermost frame: report a bug of hsx_dist, or a library's panic, then exit
        if not is_error(e):
            raise
        say_lines(redact_text(traceback.format_exc()), to=sys.stderr)
        say(
            f"{name}: this should not happen ({type(e).__name__}): please report it with the lines above",
            to=sys.stderr,
        )
        sys.exit(FOUND_BAD)
