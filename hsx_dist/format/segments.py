"""Many segment proofs in few arrays: a run of a million samples has a million, and objects would take 1 KiB each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from hsx_dist.page import Segment

_NUMBERS = ("index", "start", "stop", "total", "raw_bytes", "stored_bytes", "row", "column", "columns")
#: The row number of a sample without one, as all numbers of segments are in one int64 array.
_NO_ROW = -1


@dataclass(frozen=True, slots=True)
class SegmentProof:
    """One segment of a stored part. ``segment`` has only the key, ``id`` and tokens; the part has the point.

    ``slot``: its position among the part's segments. ``token_hash``: ``token_hash`` of its ids. ``raw_bytes`` and
    ``stored_bytes``: size of its states before and after encoding. ``row``: the number of its input row, if known.
    ``sample_hash``: ``token_hash`` of all ids of the sample, if known. Only segments with equal ``sample_hash`` form a
    sample. ``part``: the object's name, in proofs of a sample; empty in a receipt, which has the name once.
    ``content``: hash of the content of its input row, if known.
    """

    segment: Segment
    slot: int
    token_hash: str
    raw_bytes: int
    stored_bytes: int
    row: int | None = None
    sample_hash: str = ""
    part: str = ""
    content: str = ""


def segment_numbers(s: Segment, raw_bytes: int, stored_bytes: int, row: int | None) -> tuple[int, ...]:
    """A row of ``SegmentTable.numbers``."""
    known = _NO_ROW if row is None else row
    return s.index, s.start, s.stop, s.total, raw_bytes, stored_bytes, known, s.column, s.columns


class SegmentTable(Sequence[SegmentProof]):
    """The proofs of one part, by slot: a sequence that creates an item at each access.

    Takes 124 bytes per segment and the UTF-8 of its key. ``numbers``: int64 ``[n, 9]``, columns index, start, stop,
    total, raw_bytes, stored_bytes, row (or -1), column, columns. ``hashes``: ``S16`` ``[n, 3]``, columns token_hash,
    sample_hash, content. The keys are concatenated.
    """

    __slots__ = ("_ends", "_keys", "hashes", "numbers")

    def __init__(self, keys: Sequence[str], numbers: Any, hashes: Any):
        """``numbers``: integers ``[n, 9]``; ``hashes``: ``[n, 3]`` strings of at most 16 ASCII characters."""
        encoded = [key.encode("utf-8", "surrogatepass") for key in keys]
        self._keys = b"".join(encoded)
        self._ends = np.cumsum([len(key) for key in encoded], dtype=np.int64).astype(np.uint32)
        self.numbers = np.asarray(numbers, dtype=np.int64).reshape(len(keys), len(_NUMBERS))
        self.hashes = np.asarray(hashes, dtype="S16").reshape(len(keys), 3)

    @classmethod
    def of(cls, proofs: Iterable[SegmentProof]) -> SegmentTable:
        """The same proofs as a table; the slot of a proof is its position."""
        if isinstance(proofs, SegmentTable):
            return proofs
        proofs = tuple(proofs)
        numbers = [segment_numbers(p.segment, p.raw_bytes, p.stored_bytes, p.row) for p in proofs]
        return cls([p.segment.key for p in proofs], numbers, [(p.token_hash, p.sample_hash, p.content) for p in proofs])

    def key(self, slot: int) -> str:
        """The key of one segment, without creating its proof."""
        start = int(self._ends[slot - 1]) if slot else 0
        return self._keys[start : int(self._ends[slot])].decode("utf-8", "surrogatepass")

    def keys(self) -> Iterator[str]:
        """The key of every segment, in order; repeated for a key with several segments."""
        start = 0
        for end in self._ends.tolist():
            yield self._keys[start:end].decode("utf-8", "surrogatepass")
            start = end

    def json_rows(self) -> list[list[Any]]:
        """Rows of the receipt's table of segments, as JSON values; with column numbers if a sample has several."""
        hashes, last = self.hashes.astype("U16").tolist(), 9 if self.several_columns else 7
        return [
            [key, *n[:4], slot, h[0], *n[4:6], None if n[6] == _NO_ROW else n[6], h[1], *n[7:last]]
            for slot, (key, n, h) in enumerate(zip(self.keys(), self.numbers.tolist(), hashes, strict=True))
        ]

    @property
    def contents(self) -> list[str]:
        """The hash of each segment's input row. Empty if none is known."""
        found: list[str] = self.hashes[:, 2].astype("U16").tolist()
        return found if any(found) else []

    @property
    def several_columns(self) -> bool:
        """Whether a sample has more than one column."""
        return bool((self.numbers[:, 8] > 1).any())

    @property
    def tokens(self) -> int:
        """Number of tokens of all segments."""
        return exact_sum(self.numbers[:, 2] - self.numbers[:, 1])

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, slot: int) -> SegmentProof: ...
    @overload
    def __getitem__(self, slot: slice) -> tuple[SegmentProof, ...]: ...
    def __getitem__(self, slot: int | slice) -> SegmentProof | tuple[SegmentProof, ...]:
        if isinstance(slot, slice):
            return tuple(self[i] for i in range(*slot.indices(len(self))))
        if slot < 0:
            slot += len(self)
        if not 0 <= slot < len(self):
            raise IndexError(f"expected a slot below {len(self)}, got {slot}")
        return self.proof(slot)

    def proof(self, slot: int, part: str = "") -> SegmentProof:
        """The proof of one segment, with the name of its part."""
        index, start, stop, total, raw, stored, row, column, columns = self.numbers[slot].tolist()
        token_hash, sample_hash, content = (h.decode("ascii") for h in self.hashes[slot].tolist())
        segment = Segment(self.key(slot), index, start, stop, total, column=column, columns=columns)
        known = None if row == _NO_ROW else row
        return SegmentProof(segment, slot, token_hash, raw, stored, known, sample_hash, part, content)

    def __iter__(self) -> Iterator[SegmentProof]:
        return (self[slot] for slot in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SegmentTable):
            return (
                self._keys == other._keys
                and np.array_equal(self._ends, other._ends)
                and np.array_equal(self.numbers, other.numbers)
                and np.array_equal(self.hashes, other.hashes)
            )
        return NotImplemented if not isinstance(other, (tuple, list)) else tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash((self._keys, len(self)))

    def __repr__(self) -> str:
        return f"SegmentTable({list(self)!r})" if len(self) < 4 else f"SegmentTable({len(self)} segments)"


def whole(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """For rows of ``SegmentTable.numbers``, bool ``[n]``: whether each segment is a whole sample."""
    index, start, stop, total = numbers[:, :4].T
    found: np.ndarray[Any, np.dtype[np.bool_]] = (index == 0) & (start == 0) & (stop == total) & (numbers[:, 8] == 1)
    return found


def tokens_once(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """For rows of ``SegmentTable.numbers``, int64 ``[n]``: the number of tokens of each segment. It is 0 except in the
    first column, as all columns of a sample have the same tokens."""
    found: np.ndarray[Any, Any] = np.where(numbers[:, 7] == 0, numbers[:, 2] - numbers[:, 1], 0)
    return found


def exact_sum(numbers: np.ndarray[Any, Any]) -> int:
    """The sum of int64 ``[n]`` as a Python integer. It may exceed 64 bits, where numpy's sum would overflow."""
    return (int((numbers >> 32).sum()) << 32) + int((numbers & 0xFFFFFFFF).sum())
