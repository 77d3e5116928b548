"""The samples of a run in columns, from a manifest at one moment."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence, Set
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from hsx_dist.format.manifest import Manifest, Receipt, RowFate, SampleRecord
from hsx_dist.format.segments import SegmentProof
from hsx_dist.page import Segment

_Array = np.ndarray[Any, Any]


class Index:
    """All whole samples of a run, in the order of their rows. Samples without a row follow at the end, by key.

    Never changes, so that threads may share it and positions stay valid. Takes about a hundred bytes per sample.

    Arrays are ``[N]``:

    - ``tokens``: int64.
    - ``raw_bytes``: int64, size of the states.
    - ``part_of``: int32, the part of the first segment, an index into ``parts``.
    - ``group_of``: int32, the receipt that named the sample first, even if its part was lost later. An order by it does
      not change when lost samples are computed again.

    ``tokens_in``: a part's name → number of tokens in all its segments. ``complete``: whether the newest attempt
    recorded that it ended.
    """

    def __init__(self, manifest: Manifest, *, complete: bool = False):
        self.complete = complete
        self.conflicts = manifest.conflicts
        self.refused: dict[str, RowFate] = dict(manifest.refused)
        self.failed: dict[str, RowFate] = dict(manifest.failed)
        receipts, numbers, alone = manifest.columns()
        #: Receipts of parts, without their segments. Includes lost parts, which store no sample.
        self.parts = [replace(r, segments=()) for r in receipts]
        ranks = {r.id: i for i, r in enumerate(receipts)}
        self._several = several = _Several(manifest, {r.part: i for i, r in enumerate(receipts)}, ranks)
        self.parts_by_name = {name: self.parts[ranks[r.id]] for name, r in manifest.parts.items()}
        self._places: dict[str, int] | None = None

        tables = [r.table for r in receipts]
        sizes = np.array([len(table) for table in tables], np.int64)
        starts = np.cumsum(sizes) - sizes
        part = np.repeat(np.arange(len(receipts), dtype=np.int32), sizes)
        tokens = np.bincount(part, numbers[:, 2] - numbers[:, 1], len(receipts)).astype(np.int64).tolist()
        self.tokens_in = {r.part: n for r, n in zip(receipts, tokens, strict=True)}

        hashes = np.concatenate([np.empty((0, 2), "S16"), *(table.hashes[:, :2] for table in tables)])
        keys = [key for table in tables for key in table.keys()]  # noqa: SIM118 - an iterator, of a table
        at = np.flatnonzero(alone)
        found = [*([keys[i] for i in at] if len(at) < len(keys) else keys), *several.keys]
        row = _joined(numbers[at, 6], several.row)
        order = _order(found, row)
        self.keys = [found[i] for i in order]
        self.rows: _Array = row[order]
        self.tokens: _Array = _joined(numbers[at, 3], several.tokens)[order]
        self.raw_bytes: _Array = _joined(numbers[at, 4], several.raw_bytes)[order]
        self.stored_bytes: _Array = _joined(numbers[at, 5], several.stored_bytes)[order]
        self.part_of: _Array = _joined(part[at], several.part)[order]
        self.group_of: _Array = _joined(part[at], several.group)[order]
        #: Slot in the part. For a sample in several segments: -1 minus its position in ``_several``.
        self._slot: _Array = _joined(at - starts[part[at]], (-1 - i for i in range(len(several.keys))))[order]
        self._hash: _Array = _joined(hashes[at, 0], (b"" for _ in several.keys))[order]
        #: Hash of all token ids of the row. The stored tokens may be few of them, or none.
        of_rows = np.where(hashes[at, 1] == b"", hashes[at, 0], hashes[at, 1])
        self._row_hash: _Array = _joined(of_rows, (b"" for _ in several.keys))[order]
        if np.array_equal(self._row_hash, self._hash):
            self._row_hash = self._hash  # as for nearly all runs: one array less

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
        receipt = self.parts[int(self.part_of[i])]
        if slot < 0:
            return SampleRecord(
                key, total, receipt.attempt, None if row < 0 else row, self._several.segments(-1 - slot, self.parts)
            )
        assert receipt.part is not None, "receipts without a part prove no segments"
        sizes = int(self.raw_bytes[i]), int(self.stored_bytes[i])
        proof = SegmentProof(
            Segment(key, 0, 0, total, total),
            slot,
            self._hash[i].decode(),
            *sizes,
            None if row < 0 else row,
            part=receipt.part,
        )
        return SampleRecord(key, total, receipt.attempt, proof.row, (proof,))

    def parts_in_use(self) -> set[str]:
        """The names of all parts that store samples."""
        used = np.unique(np.concatenate([self.part_of, self._several.parts]))
        names = {self.parts[i].part for i in used}
        return {name for name in names if name is not None}

    def stored_in(self, parts: Set[str]) -> _Array:
        """bool ``[N]``: whether all segments of a sample are stored in ``parts``."""
        there = np.array([r.part in parts for r in self.parts], bool)
        found: _Array = there[self.part_of]
        at = np.flatnonzero(self._slot < 0)
        if len(at):
            found[at] = self._several.all_of(there)[-1 - self._slot[at]]
        return found

    def only(self, places: _Array) -> Index:
        """The samples at ``places`` alone, with their parts. Without rows' fates. Its size is that of these samples."""
        found = copy(self)
        found.conflicts, found.refused, found.failed = [], {}, {}
        found.keys, found._places = [self.keys[i] for i in places], None
        for name in ("rows", "tokens", "raw_bytes", "stored_bytes", "_slot", "_hash", "_row_hash"):
            setattr(found, name, getattr(self, name)[places])
        at = np.flatnonzero(found._slot < 0)
        found._several = self._several.only(-1 - found._slot[at])
        found._slot[at] = -1 - np.arange(len(at))
        several, parts, groups = found._several, self.part_of[places], self.group_of[places]
        used = np.unique(np.concatenate([parts, groups, several.parts]))
        found.part_of, found.group_of = (np.searchsorted(used, x).astype(x.dtype) for x in (parts, groups))
        several.move_parts(used)
        found.parts = [replace(self.parts[i], rows=(), void=()) for i in used]
        names = [(r.part, r) for r in found.parts if r.part is not None]
        found.parts_by_name = {name: r for name, r in names if name in self.parts_by_name}
        found.tokens_in = {name: self.tokens_in[name] for name, _ in names}
        return found

    def digest(self, *, cuts: bool = False) -> str:
        """Hash of all samples in order (keys, lengths, token ids of the rows), 32 hex digits.

        ``cuts``: the hash of earlier versions, of the stored tokens and of how samples are cut into segments. Empty if
        the run selects tokens: of means, it covers no text.
        """
        if cuts and not np.array_equal(self._hash, self._row_hash):
            return ""
        hashes = self._row_hash.copy()
        for i in np.flatnonzero(self._slot < 0):
            of = [p for p in self[i].segments if p.segment.column == 0]
            # Equal to the hash of a single segment, so that several copies of a whole sample do not change the digest.
            known = "" if cuts and len(of) > 1 else of[0].sample_hash or (of[0].token_hash if len(of) == 1 else "")
            text = " ".join(f"{p.segment.start} {p.token_hash}" for p in of)
            hashes[i] = known or hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        h = hashlib.blake2b("\0".join(self.keys).encode("utf-8", "surrogatepass"), digest_size=16)
        h.update(self.tokens.tobytes() + hashes.tobytes())
        return h.hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_places": None}  # workers rebuild it on demand


class _Several:
    """The samples with several segments or copies, in arrays. An object for each segment would take about 1 KiB.

    ``_numbers``: int64 ``[S, 11]``, by sample, in the order of its segments. Arrays and lists over samples are ``[N]``.
    """

    def __init__(self, manifest: Manifest, place_of: dict[str | None, int], ranks: dict[tuple[int, str, int], int]):
        self.keys: list[str] = []
        facts, numbers, hashes = array("q"), array("q"), bytearray()
        for key, places, first in manifest.several():
            self.keys.append(key)
            raw_bytes = stored_bytes = 0
            for place in places:
                part, slot, found, (token_hash, sample_hash, _) = manifest.at(place)
                index, start, stop, total, raw, stored, row, column, columns = found
                numbers.extend((index, start, stop, total, column, columns, slot, raw, stored, row, place_of[part]))
                hashes += token_hash.ljust(16, b"\0") + sample_hash.ljust(16, b"\0")
                raw_bytes, stored_bytes = raw_bytes + raw, stored_bytes + stored
            _, _, (_, _, _, total, _, _, row, _, _), _ = manifest.at(places[0])
            facts.extend((row, total, _total(raw_bytes), _total(stored_bytes), ranks[first], len(places)))
        self._numbers: _Array = np.array(numbers, np.int64).reshape(-1, 11)
        self._hashes: _Array = np.frombuffer(bytes(hashes), "S16").reshape(-1, 2)
        self.row, self.tokens, self.raw_bytes, self.stored_bytes, self.group, sizes = (
            np.array(facts, np.int64).reshape(-1, 6).T
        )
        self._ends: _Array = np.cumsum(sizes)
        self._starts: _Array = self._ends - sizes
        self.part: _Array = self.parts[self._starts]

    def only(self, chosen: _Array) -> _Several:
        """The samples at ``chosen`` alone."""
        found = copy(self)
        found.keys = [self.keys[i] for i in chosen]
        for name in ("row", "tokens", "raw_bytes", "stored_bytes", "group", "part"):
            setattr(found, name, getattr(self, name)[chosen])
        spans = [np.arange(self._starts[i], self._ends[i]) for i in chosen]
        segments = np.concatenate([np.empty(0, np.int64), *spans])
        found._numbers, found._hashes = self._numbers[segments], self._hashes[segments]
        found._ends = np.cumsum([0, *map(len, spans)])[1:]
        found._starts = found._ends - [len(span) for span in spans]
        return found

    def move_parts(self, used: _Array) -> None:
        """Count parts within ``used``, ascending positions of parts. Changes this object: it must be of ``only``."""
        self._numbers[:, 10] = np.searchsorted(used, self._numbers[:, 10])
        self.part, self.group = np.searchsorted(used, self.part), np.searchsorted(used, self.group)

    @property
    def parts(self) -> _Array:
        """The part of each segment, int64 ``[S]``."""
        found: _Array = self._numbers[:, 10]
        return found

    def all_of(self, there: _Array) -> _Array:
        """bool ``[N]``: whether all segments of a sample are in parts that ``there`` marks."""
        found: _Array = np.logical_and.reduceat(there[self.parts], self._starts)
        return found

    def segments(self, i: int, parts: Sequence[Receipt]) -> tuple[SegmentProof, ...]:
        """The segments of sample ``i``, as in ``SampleRecord.segments``."""
        key, span = self.keys[i], slice(int(self._starts[i]), int(self._ends[i]))
        found = []
        for row, hashes in zip(self._numbers[span].tolist(), self._hashes[span].tolist(), strict=True):
            index, start, stop, total, column, columns, slot, raw, stored, number, part = row
            segment = Segment(key, index, start, stop, total, column=column, columns=columns)
            token_hash, sample_hash = (h.decode() for h in hashes)
            known = None if number < 0 else number
            name = parts[part].part or ""
            found.append(SegmentProof(segment, slot, token_hash, raw, stored, known, sample_hash, name))
        return tuple(found)


def _total(n: int) -> int:
    """Limit a number to int64, since receipts may claim more."""
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
