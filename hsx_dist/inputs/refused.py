"""Limits the rows without a sample: the driver keeps the key and the reason of each."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from hsx_dist.errors import FormatError
from hsx_dist.format.manifest import RowFate

#: Refused rows that an input may have, and how many more for each usable row. Each takes about 500 bytes of the driver,
#: its key and its reason.
FREE_ROWS, _MORE_A_ROW = 1_000_000, 10
#: Bytes in memory of the keys and reasons of refused rows, for each refused row that an input may have. The key begins
#: with its file's name, so a long name in a small zip file would fill the driver's memory.
_BYTES_A_ROW = 384
#: Divisor of ``FREE_ROWS`` for rows that a resumed run may refuse in any case. Its input may be corrected by now.
_SHARE_OF_RESUME = 100


class RefusedRows:
    """Counts refused and failed rows, and the memory of their keys and reasons, against the rows that are usable."""

    def __init__(self, earlier: Iterable[RowFate] = ()) -> None:
        """``earlier``: outcomes that are stored already. They count, and alone exceed no limit."""
        self._rows = self._held = self._at_least = 0
        self._last = ""
        for fate in earlier:
            self.add(fate)
        if self._rows:
            self._at_least = max(self._rows, -(-self._held // _BYTES_A_ROW)) + FREE_ROWS // _SHARE_OF_RESUME

    def add(self, fate: RowFate) -> None:
        self._rows += 1
        self._held += sys.getsizeof(fate.key) + sys.getsizeof(fate.reason)
        self._last = fate.reason

    def excess(self, usable: int, where: str) -> FormatError | None:
        """The error that ends an input with ``usable`` other rows ``where``. ``None`` within the limits."""
        most = max(FREE_ROWS + _MORE_A_ROW * usable, self._at_least)
        if self._rows <= most and self._held <= _BYTES_A_ROW * most:
            return None
        return FormatError(
            f"expected rows that can be used, got {self._rows} refused rows ({self._held} bytes of keys and reasons) "
            f"and {usable} usable rows {where}. The last: {self._last}. Correct the input, or input.format and the "
            "names of its columns"
        )
