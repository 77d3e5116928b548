"""Output on a terminal. This package prints every line with these functions.

Keys, reasons and names are text of clients, rows and stored objects. They are shown unchanged, without markup, but with
control and format characters escaped.
"""

from __future__ import annotations

import sys
from typing import Any, TextIO

import rich.console
from rich.text import Text

from hsx_dist.text import ascii_json, printable, printable_lines


def say(text: object, *, to: TextIO | None = None) -> None:
    """Print one line, on standard output or ``to``."""
    _write(printable(text), to)


def say_lines(text: object, *, to: TextIO | None = None) -> None:
    """Print an error or a traceback, whose line breaks are kept; lines after the first are indented."""
    _write(printable_lines(text), to)


def print_json(value: Any, *, indent: int | None = 1, to: TextIO | None = None) -> None:
    """Print one JSON document, in ASCII."""
    _write(ascii_json(value, indent=indent), to)


def _write(text: str, to: TextIO | None) -> None:
    print(text, file=sys.stdout if to is None else to, flush=True)


class Console(rich.console.Console):
    """rich's console, but it takes no markup in strings, also not in the cells and titles of tables."""

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        # rich calls this for every string: lines, cells of tables, titles.
        return super().render_str(printable(text), **options)
