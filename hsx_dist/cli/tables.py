"""Tables on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise

from hsx_dist.observe.console import Console

#: Width of printed lines, in characters, without a terminal.
_WIDE = 1000


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Sequence[str] = ()) -> None:
    """Print a table. ``numbers`` names the columns that are aligned to the right. Lines are cut only on a terminal."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    _console().print(table)


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
