"""Exit statuses, and errors as one message instead of a traceback."""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence

import typer

from hsx_dist.config.redaction import redact_text
from hsx_dist.errors import ConfigError, Denied, HsxError, InputError, NotFound, RunError, RunMismatch, SampleNotFound
from hsx_dist.observe.console import say, say_lines
from hsx_dist.observe.logs import configure_logging, redact_records

FINE, FOUND_BAD, WRONG_USE = 0, 1, 2

_WRONG_USE = (ConfigError, InputError, NotFound, Denied, RunMismatch, SampleNotFound)


def exit_status(error: HsxError) -> int:
    """Return 2 if the caller can correct the cause (a setting, a name, access), and 1 otherwise."""
    # RunError itself, not a subclass such as Fenced: there is no run at the given path.
    return WRONG_USE if isinstance(error, _WRONG_USE) or type(error) is RunError else FOUND_BAD


def run_app(app: typer.Typer, args: Sequence[str] | None, name: str) -> None:
    """Run a typer app and exit; an HsxError becomes its message on stderr. ``HSX_DEBUG=1`` shows the traceback too."""
    debug = os.environ.get("HSX_DEBUG", "") not in ("", "0")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # keys may have characters that its encoding lacks
            stream.reconfigure(errors="backslashreplace")
    redact_records()
    configure_logging(logging.DEBUG if debug else logging.WARNING)
    try:
        app(args=None if args is None else list(args), prog_name=name)
    except HsxError as e:
        if debug:
            say_lines(redact_text(traceback.format_exc()), to=sys.stderr)
        say_lines(f"{name}: {redact_text(str(e))}", to=sys.stderr)
        sys.exit(exit_status(e))
    except Exception as e:  # noqa: BLE001 (the outermost frame: report a bug of hsx_dist, then exit)
        say_lines(redact_text(traceback.format_exc()), to=sys.stderr)
        say(
            f"{name}: this should not happen ({type(e).__name__}): please report it with the lines above",
            to=sys.stderr,
        )
        sys.exit(FOUND_BAD)
