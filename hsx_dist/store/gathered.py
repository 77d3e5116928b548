"""Several buffers as one sequence of bytes, for uploads in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class Gathered:
    """Several buffers as one sequence of bytes. Only slices are copied."""

    def __init__(self, pieces: Sequence[memoryview], size: int):
        self._pieces = pieces
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, which: slice) -> bytes:
        start, stop, _ = which.indices(self._size)
        parts: list[memoryview] = []
        at = 0
        for piece in self._pieces:
            if at + piece.nbytes > start and at < stop:
                parts.append(piece[max(0, start - at) : stop - at])
            at += piece.nbytes
        return b"".join(parts)
