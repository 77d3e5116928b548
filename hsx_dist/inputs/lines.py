"""Numbered lines of a file, with limits on their length, their number and their decompressed size."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import IO

from hsx_dist.errors import FormatError
from hsx_dist.inputs.decompress import FREE_BYTES, FREE_ROWS, MAX_EXPANSION, MOST_ROWS

#: A line longer than ``_SKIPPED`` times the limit ends the input with an error. So do more than ``_MOST_EMPTY`` empty
#: lines in a row.
_SKIPPED, _MOST_EMPTY = 64, 100_000
#: Bytes that are read at once of a line above the limit.
_BUFFER = 1 << 20


def read_lines(file: IO[bytes], most: int, stored: int | None) -> Iterator[tuple[int, bytes | None]]:
    """Yield numbered lines, and ``None`` for a line that is too long. Empty lines at the end of the file are no rows.

    Raises ``FormatError`` for a line that is far too long, for very many empty lines, and for more lines or bytes than
    ``stored`` bytes should hold. In a compressed file, such lines take almost no space. ``stored`` is None for a plain
    file of unknown size, which holds only what arrives.
    """
    number, empty, made = -1, 0, 0
    most_lines, most_made = inf, inf
    if stored is not None:
        most_lines, most_made = max(FREE_ROWS, MOST_ROWS * stored), max(FREE_BYTES, MAX_EXPANSION * stored)
    while line := file.readline(most + 1):
        number += 1
        made += len(line)
        if number >= most_lines or made > most_made:
            raise FormatError(
                f"expected at most {MOST_ROWS} lines and {MAX_EXPANSION} bytes for each stored byte, got more beyond "
                f"{FREE_ROWS} lines or {FREE_BYTES} bytes. Decompress the file"
            )
        if len(line) <= most and not line.strip():
            empty += 1
            if empty > _MOST_EMPTY:
                raise FormatError(f"expected rows, got more than {_MOST_EMPTY} empty lines in a row. Remove them")
            continue
        for i in range(empty):
            yield number - empty + i, b""
        empty = 0
        if len(line) > most:
            skipped = len(line)
            while line and not line.endswith(b"\n"):
                line = file.readline(min(most, _BUFFER))
                skipped += len(line)
                if skipped > _SKIPPED * most:
                    raise FormatError(
                        f"expected lines of at most {most} bytes, got one of more than {skipped}. Split "
                        "the line, or raise input.max_row_bytes"
                    )
            made += skipped - most - 1
            yield number, None
        else:
            yield number, line
