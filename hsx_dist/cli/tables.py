"""Tables on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from typing import Literal

from hsx_dist.observe.console import Console
from hsx_dist.text import printable

#: Number of rows of a table in memory at once.
_ROWS_AT_ONCE = 1000
#: Width of printed lines, in characters, without a terminal.
_WIDE = 1000


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Sequence[str] = ()) -> None:
    """Print a table. ``numbers`` names the columns that are aligned to the right. Lines are cut only on a terminal.

    Each page of rows is printed before the next is made, because all rows together may not fit the memory. A column is
    at least as wide as on the page before.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table

    console, widths = _console(), [cell_len(column) for column in columns]
    cells = ([printable(cell) for cell in row] for row in rows)
    page, first = list(islice(cells, _ROWS_AT_ONCE)), True
    while first or page:
        following = list(islice(cells, _ROWS_AT_ONCE))
        for row in page:
            widths = [max(width, cell_len(cell)) for width, cell in zip(widths, row, strict=True)]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=first)
        for column, width in zip(columns, widths, strict=True):
            justify: Literal["right", "left"] = "right" if column in numbers else "left"
            table.add_column(column, justify=justify, no_wrap=True, overflow="ellipsis", min_width=width)
        for row in page:
            table.add_row(*row)
        with console.capture() as printed:
            console.print(table)
        lines = printed.get().splitlines(keepends=True)
        # rich puts an empty line above and below each table.
        console.file.write("".join(lines[0 if first else 1 : -1 if following else None]))
        page, first = following, False


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Print names and values, one pair per line."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, str(value))
    _console().print(table)


def layers_text(layers: Sequence[int]) -> str:
    """Return ``0-30`` for consecutive ids, else the ids with commas."""
    if len(layers) > 2 and all(type(k) is int for k in layers) and all(b == a + 1 for a, b in pairwise(layers)):
        return f"{layers[0]}-{layers[-1]}"
    return ",".join(str(layer) for layer in layers)


def _console() -> Console:
    # Without a terminal no line is cut, because another program reads the output.
    return Console(width=None if sys.stdout.isatty() else _WIDE)
