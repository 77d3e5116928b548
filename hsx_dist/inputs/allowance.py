"""Limits the rows and decompressed bytes of an input by the stored bytes that arrived: very many consist of repetition.

The limits hold for all files together. For each file, a small zip file of many members would have them many times.
"""

from __future__ import annotations

from hsx_dist.errors import FormatError
from hsx_dist.inputs.row_cost import most_cost

#: Decompressed bytes that are accepted for each stored byte, and for any input. More cost the driver time.
MAX_EXPANSION, FREE_BYTES = 1000, 1 << 30
#: Lines and rows that are accepted for each stored byte, and for any input. Even a short one costs the driver an entry
#: of a hundred bytes. Rows that are worth training on have more stored bytes, also compressed.
MOST_ROWS, FREE_ROWS = 2, 1 << 20
#: Decompressed bytes as which a part counts: a page or a read of a table. A compressed frame counts as several. Each
#: takes microseconds of Python, also if it has no rows. In a zip file, one stored byte may be many of them.
PART_BYTES = 1 << 10


class Allowance:
    """Counts what the files of an input have so far."""

    def __init__(self, most_stored: int | None = None) -> None:
        """``most_stored``: limit of the stored bytes of all files, the size of a zip file. None: no limit."""
        self._most_stored = most_stored
        self._stated: int | None = 0
        self._arrived = self._rows = self._decoded = self._allocated = self._expanded = self._cost = 0
        self.arrive(0)

    def begin(self, stated: int | None) -> None:
        """Begin a file. ``stated``: its size, if it has one. Parts that are read again do not count beyond it."""
        self._stated = None if stated is None or self._stated is None else self._stated + stated

    def arrive(self, size: int) -> None:
        """Add stored bytes that were read. Not the stated size, which a server may invent."""
        self._arrived += size
        stored = min(x for x in (self._arrived, self._stated, self._most_stored) if x is not None)
        self._most_rows = max(FREE_ROWS, MOST_ROWS * stored)
        self._most_bytes = max(FREE_BYTES, MAX_EXPANSION * stored)
        self._most_cost = most_cost(self._most_bytes)

    def take(self, *, rows: int = 0, decoded: int = 0, allocated: int = 0, cost: int = 0) -> None:
        """Count rows, decompressed bytes, bytes that a library allocates, and the cost of rows as Python objects.

        Raises:
            FormatError: there are too many for the stored bytes.
        """
        self._rows += rows
        self._decoded += decoded
        self._allocated += allocated
        self._cost += cost
        if self._rows > self._most_rows:
            raise _too_much(f"{MOST_ROWS} rows", FREE_ROWS)
        if max(self._decoded, self._allocated) > self._most_bytes or self._cost > self._most_cost:
            raise _too_much(f"{MAX_EXPANSION} bytes", FREE_BYTES)

    @property
    def expands(self) -> bool:
        """Whether more bytes were decompressed than arrived. The cost of lines that are stored as they are is small."""
        return self._decoded > self._arrived

    def expand(self, size: int = 0, *, parts: int = 0) -> None:
        """Count ``size`` bytes of a zip file's member as they are decompressed, and parts of a file.

        Apart from the bytes of ``take``, which mostly are the same bytes, decoded.

        Raises:
            FormatError: there are too many for the stored bytes.
        """
        self._expanded += size + parts * PART_BYTES
        if self._expanded > self._most_bytes:
            raise _too_much(f"{MAX_EXPANSION} bytes", FREE_BYTES)


def _too_much(factor: str, free: int) -> FormatError:
    return FormatError(
        f"expected at most {factor} for each stored byte of the input so far, got more beyond {free}. Decompress the "
        "files, or write the rows without repetition"
    )
