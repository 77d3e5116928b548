"""The rows that the driver holds, and their bytes. Few bytes of a compressed file can become many GiB of rows."""

from __future__ import annotations

from collections.abc import Iterable

from hsx_dist.inputs.rows import Row

#: Bytes of rows, as Python objects, that end a task before it has ``task_rows``: a hundred thousand token ids.
TASK_BYTES = 4 << 20
#: Limit of the bytes of rows under way, in addition to ``TASK_BYTES`` for each task that replicas may have.
HELD_BYTES = 256 << 20


class UnderWay:
    """Rows without an outcome, by key. Measures each row once."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, row: Row) -> int:
        """Add a row, and return its bytes as Python objects."""
        self._sizes[row.key] = size = row.memory
        self.nbytes += size
        return size

    def drop(self, keys: Iterable[str]) -> None:
        """Remove rows. Does nothing for a row that is not under way."""
        for key in keys:
            self.nbytes -= self._sizes.pop(key, 0)

    def is_full(self, tasks: int) -> bool:
        """Whether no more rows may be read while replicas have up to ``tasks`` tasks."""
        return self.nbytes >= HELD_BYTES + tasks * TASK_BYTES
