"""The samples of a run in columns, as a manifest knows them at one moment."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Set
from dataclasses import replace
from typing import Any

import numpy as np

from hsx_dist.format.manifest import Manifest, RowFate, SampleRecord
from hsx_dist.format.segments import SegmentProof
from hsx_dist.page import Segment

_Array = np.ndarray[Any, Any]


class Index:
    """All whole samples of a run, in the order of their rows; those without a row last, by key.

    Never changes: threads may share it, and positions in it stay. A hundred bytes a sample.

    Arrays are ``[N]``: ``tokens`` int64, ``raw_bytes`` int64 (of the states), ``part_of`` int32 (the part of the first
    segment, an index into ``parts``), ``group_of`` int32 (which receipt named the sample first, also of a part that was
    lost since: an order by it stays when lost samples are computed again). ``tokens_in``: a part's name → tokens of all
    its segments. ``complete``: whether the newest attempt had ended and said so.
    """

    def __init__(self, manifest: Manifest, *, complete: bool = False):
        self.complete = complete
        self.conflicts = manifest.conflicts
        self.refused: dict[str, RowFate] = dict(manifest.refused)
        self.failed: dict[str, RowFate] = dict(manifest.failed)
        receipts, numbers, alone = manifest.columns()
        several = list(manifest.several())
        self._many = {record.key: record for record, _ in several}
        #: Receipts of parts, without their segments; also of those that were lost, in which no sample lies.
        self.parts = [replace(r, segments=()) for r in receipts]
        ranks = {r.id: i for i, r in enumerate(receipts)}
        self.parts_by_name = {name: self.parts[ranks[r.id]] for name, r in manifest.parts.items()}
        self._places: dict[str, int] | None = None

        tables = [r.table for r in receipts]
        sizes = np.array([len(table) for table in tables], np.int64)
        starts = np.cumsum(sizes) - sizes
        part = np.repeat(np.arange(len(receipts), dtype=np.int32), sizes)
        tokens = np.bincount(part, numbers[:, 2] - numbers[:, 1], len(receipts)).astype(np.int64).tolist()
        self.tokens_in = {r.part: n for r, n in zip(receipts, tokens, strict=True)}

        hashes = np.concatenate([np.empty((0, 2), "S16"), *(table.hashes for table in tables)])
        keys = [key for table in tables for key in table.keys()]  # noqa: SIM118 - an iterator, of a table
        at = np.flatnonzero(alone)
        found = [*([keys[i] for i in at] if len(at) < len(keys) else keys), *self._many]
        row = _joined(numbers[at, 6], (-1 if r.row is None else r.row for r, _ in several))
        order = _order(found, row)
        self.keys = [found[i] for i in order]
        self.rows: _Array = row[order]
        self.tokens: _Array = _joined(numbers[at, 3], (r.num_tokens for r, _ in several))[order]
        self.raw_bytes: _Array = _joined(numbers[at, 4], (_total(r.raw_bytes) for r, _ in several))[order]
        self.stored_bytes: _Array = _joined(numbers[at, 5], (_total(r.stored_bytes) for r, _ in several))[order]
        place_of = {r.part: i for i, r in enumerate(receipts)}
        self.part_of: _Array = _joined(part[at], (place_of[r.segments[0][0]] for r, _ in several))[order]
        self.group_of: _Array = _joined(part[at], (ranks[first] for _, first in several))[order]
        self._slot: _Array = _joined(at - starts[part[at]], (-1 for _ in several))[order]
        self._hash: _Array = _joined(hashes[at, 0], (b"" for _ in several))[order]

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: object) -> bool:
        return key in self._by_key()

    def place(self, key: str) -> int | None:
        """The position of ``key`` in the order, or ``None``."""
        return self._by_key().get(key)

    def _by_key(self) -> dict[str, int]:
        if self._places is None:
            self._places = {key: i for i, key in enumerate(self.keys)}
        return self._places

    def __getitem__(self, i: int) -> SampleRecord:
        key, total, slot, row = self.keys[i], int(self.tokens[i]), int(self._slot[i]), int(self.rows[i])
        if slot < 0:
            return self._many[key]
        receipt = self.parts[int(self.part_of[i])]
        assert receipt.part is not None, "receipts without a part prove no segments"
        sizes = int(self.raw_bytes[i]), int(self.stored_bytes[i])
        proof = SegmentProof(
            Segment(key, 0, 0, total, total), slot, self._hash[i].decode(), *sizes, None if row < 0 else row
        )
        return SampleRecord(key, total, receipt.attempt, proof.row, ((receipt.part, proof),))

    def parts_in_use(self) -> set[str]:
        """The names of all parts that samples lie in."""
        names = {self.parts[i].part for i in np.unique(self.part_of)} | {
            p for r in self._many.values() for p, _ in r.segments
        }
        return {name for name in names if name is not None}

    def lie_in(self, parts: Set[str]) -> _Array:
        """bool ``[N]``: whether all of a sample lies in ``parts``."""
        found: _Array = np.array([r.part in parts for r in self.parts], bool)[self.part_of]
        for i in np.flatnonzero(self._slot < 0):
            found[i] = all(part in parts for part, _ in self._many[self.keys[i]].segments)
        return found

    def digest(self) -> str:
        """32 hex digits of all samples in order: keys, lengths, token ids."""
        hashes = self._hash.copy()
        for i in np.flatnonzero(self._slot < 0):
            of = [f"{p.segment.start} {p.token_hash}" for _, p in self[i].segments if p.segment.column == 0]
            # A whole sample counts as what it is, also where the run holds several copies.
            hashes[i] = of[0][2:] if len(of) == 1 else hashlib.blake2b(" ".join(of).encode(), digest_size=8).hexdigest()
        h = hashlib.blake2b("\0".join(self.keys).encode("utf-8", "surrogatepass"), digest_size=16)
        h.update(self.tokens.tobytes() + hashes.tobytes())
        return h.hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_places": None}  # workers make their own, if they need it


def _total(n: int) -> int:
    """The number, as far as an array can hold it: receipts may claim more."""
    return min(n, np.iinfo(np.int64).max)


def _joined(column: _Array, more: Iterable[Any]) -> _Array:
    return np.concatenate([column, np.array(list(more), column.dtype)])


def _order(keys: list[str], rows: _Array) -> _Array:
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    if len(rows) and (ordered[0] < 0 or np.any(ordered[1:] == ordered[:-1])):
        plain = rows.tolist()
        return np.array(sorted(range(len(keys)), key=lambda i: (plain[i] < 0, plain[i], keys[i])), np.int64)
    return order
