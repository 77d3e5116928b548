"""Output on a terminal. This package prints every line with these functions.

Keys, reasons and names are text of clients, rows and stored objects. They are shown unchanged, without markup, but with
control and format characters escaped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
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


def print_json_rows(document: dict[str, Any], rows: Mapping[str, Iterable[Any]]) -> None:
    """Print as ``print_json`` of ``document``, with ``rows[name]`` in place of the empty list ``document[name]``.

    ``rows`` has its names in the order of ``document``. Each row is printed before the next is made, because all rows
    together may not fit the memory.
    """
    after = ascii_json(document, indent=1)
    for name, of_name in rows.items():
        # Only a member of the document itself is behind one space. A text has no line break.
        before, after = after.split(f'\n "{name}": []')
        _write(f'{before}\n "{name}": [', None, end="")
        end = "]"
        for i, row in enumerate(of_name):
            text = ascii_json(row, indent=1).replace("\n", "\n  ")
            _write(f"{',' if i else ''}\n  {text}", None, end="")
            end = "\n ]"
        _write(end, None, end="")
    _write(after, None)


def _write(text: str, to: TextIO | None, end: str = "\n") -> None:
    print(text, end=end, file=sys.stdout if to is None else to, flush=bool(end))


class Console(rich.console.Console):
    """rich's console, but it takes no markup in strings, also not in the cells and titles of tables."""

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        # rich calls this for every string: lines, cells of tables, titles.
        return super().render_str(printable(text), **options)
