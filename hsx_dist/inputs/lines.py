"""Numbered lines of a file, with limits on their length, their number and their decompressed size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

from hsx_dist.errors import FormatError
from hsx_dist.inputs.allowance import Allowance
from hsx_dist.inputs.row_cost import cost_of_json, most_cost

#: A line longer than ``_SKIPPED`` times the limit ends the input with an error. So do more than ``_MOST_EMPTY`` empty
#: lines in a row.
_SKIPPED, _MOST_EMPTY = 64, 100_000
#: Bytes that are read at once of a line above the limit.
_BUFFER = 1 << 20


def read_lines(file: IO[bytes], most: int, allowance: Allowance) -> Iterator[tuple[int, bytes | None]]:
    """Yield numbered lines, and ``None`` for a line that is too long. Empty lines at the end of the file are no rows.

    Raises ``FormatError`` for a line that is far too long, for very many empty lines, and for more lines, bytes or
    values than ``allowance`` permits. In a compressed file, such lines take almost no space. A line's end, LF or
    CR LF, does not count for ``most``.
    """
    number, empty = -1, 0
    while line := file.readline(most + 2):
        number += 1
        allowance.take(rows=1, decoded=len(line))
        if allowance.expands:  # a row above the limit is refused before it is parsed
            allowance.take(cost=min(cost_of_json(line), most_cost(most)))
        is_long = len(line) > most and len(line.removesuffix(b"\r\n").removesuffix(b"\n")) > most
        if not is_long and not line.strip():
            empty += 1
            if empty > _MOST_EMPTY:
                raise FormatError(f"expected rows, got more than {_MOST_EMPTY} empty lines in a row. Remove them")
            continue
        for i in range(empty):
            yield number - empty + i, b""
        empty = 0
        if is_long:
            skipped = len(line)
            while line and not line.endswith(b"\n"):
                line = file.readline(min(most, _BUFFER))
                skipped += len(line)
                allowance.take(decoded=len(line))
                if skipped > _SKIPPED * most:
                    raise FormatError(
                        f"expected lines of at most {most} bytes, got one of more than {skipped}. Split "
                        "the line, or raise input.max_row_bytes"
                    )
            yield number, None
        else:
            yield number, line
