"""The samples of a run in columns: a million of them in seconds, and in a hundred bytes each.

Says the same as ``format.manifest.Manifest``, which decides the few that need deciding: samples in several segments,
and keys that were stored more than once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hsx_dist.format.manifest import Manifest, Receipt, RowFate, SampleRecord
from hsx_dist.format.receipt import SegmentRow, proof_of

_Array = np.ndarray[Any, Any]
#: Columns of a segment's row that are kept as numbers, by their place in the row.
_NUMBERS = {"index": 1, "start": 2, "stop": 3, "total": 4, "slot": 5, "raw_bytes": 7, "stored_bytes": 8}
_KEY, _TOKEN_HASH, _ROW, _SAMPLE_HASH = 0, 6, 9, 10


@dataclass(frozen=True, slots=True)
class SampleEntry:
    """Where one sample lies: pieces ``(part, slot, start, stop, token_hash)`` in token order."""

    key: str
    num_tokens: int
    pieces: tuple[tuple[str, int, int, int, str], ...]


class Index:
    """All whole samples of a run, in the order of their rows; those without a row last, by key.

    Arrays are ``[N]``: ``tokens`` int64, ``raw_bytes`` int64 (of the states), ``part_of`` int32 (the part of the first
    segment, an index into ``parts``).
    """

    def __init__(self, receipts: Iterable[tuple[Receipt, list[SegmentRow]]]):
        #: Receipts of parts, without their segments.
        self.parts: list[Receipt] = []
        table = _Table()
        others: list[Receipt] = []
        for receipt, rows in receipts:
            (others if receipt.part is None else self.parts).append(receipt)
            if receipt.part is not None:
                table.add(len(self.parts) - 1, rows)
        columns = table.columns()
        odd = _odd(table.keys, columns)
        manifest = _decide(self.parts, others, table.keys, columns, odd)
        self._many = dict(manifest.samples)
        self.conflicts = manifest.conflicts
        self._arrange(table.keys, columns, odd)
        del table
        self._places: dict[str, int] | None = None
        self.refused: dict[str, RowFate] = {k: f for k, f in manifest.refused.items() if k not in self}
        self.failed: dict[str, RowFate] = {k: f for k, f in manifest.failed.items() if k not in self}
        self.parts_by_name = {r.part: r for r in self.parts if r.part is not None}

    def _arrange(self, keys: list[str], columns: dict[str, _Array], odd: _Array) -> None:
        simple = np.flatnonzero(~odd)
        many = list(self._many.values())
        part_numbers = {r.part: i for i, r in enumerate(self.parts)}
        found = [keys[i] for i in simple] if len(simple) < len(keys) else keys
        found = found + [r.key for r in many]

        def joined(name: str, of: Any, dtype: Any) -> _Array:
            return np.concatenate([columns[name][simple], np.array([of(r) for r in many], dtype)])

        row = joined("row", lambda r: -1 if r.row is None else r.row, np.int64)
        order = _order(found, row)
        self.keys: list[str] = [found[i] for i in order]
        self.rows: _Array = row[order]
        self.tokens: _Array = joined("total", lambda r: r.num_tokens, np.int64)[order]
        self.raw_bytes: _Array = joined("raw_bytes", lambda r: sum(p.raw_bytes for _, p in r.segments), np.int64)[order]
        self.stored_bytes: _Array = joined(
            "stored_bytes", lambda r: sum(p.stored_bytes for _, p in r.segments), np.int64
        )[order]
        self.part_of: _Array = joined("part", lambda r: part_numbers[r.segments[0][0]], np.int32)[order]
        self._slot: _Array = joined("slot", lambda _: -1, np.int64)[order]
        self._hash: _Array = joined("token_hash", lambda _: b"", "S16")[order]

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

    def __getitem__(self, i: int) -> SampleEntry:
        key, total, slot = self.keys[i], int(self.tokens[i]), int(self._slot[i])
        if slot < 0:
            pieces = tuple(
                (part, p.slot, p.segment.start, p.segment.stop, p.token_hash) for part, p in self._many[key].segments
            )
            return SampleEntry(key, total, pieces)
        part = self.parts[int(self.part_of[i])].part
        assert part is not None, "receipts without a part prove no segments"
        return SampleEntry(key, total, ((part, slot, 0, total, self._hash[i].decode()),))

    def parts_in_use(self) -> set[str]:
        """The names of all parts that samples lie in."""
        names = {self.parts[i].part for i in np.unique(self.part_of)} | {
            p for r in self._many.values() for p, _ in r.segments
        }
        return {name for name in names if name is not None}

    def attempt(self, i: int) -> int:
        """The attempt that stored the sample."""
        return self.parts[int(self.part_of[i])].attempt

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_places": None}  # workers make their own, if they need it


class _Table:
    """Segments of all receipts, column by column."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self._chunks: list[dict[str, _Array]] = []

    def add(self, part: int, rows: Sequence[SegmentRow]) -> None:
        if not rows:
            return
        columns = list(zip(*rows, strict=True))
        self.keys.extend(columns[_KEY])
        chunk = {name: np.array(columns[i], np.int64) for name, i in _NUMBERS.items()}
        chunk["row"] = np.array([-1 if n is None else n for n in columns[_ROW]], np.int64)
        chunk["part"] = np.full(len(rows), part, np.int32)
        chunk["token_hash"] = np.array(columns[_TOKEN_HASH], "S16")
        chunk["sample_hash"] = np.array(columns[_SAMPLE_HASH], "S16")
        self._chunks.append(chunk)

    def columns(self) -> dict[str, _Array]:
        if not self._chunks:
            self._chunks = [{n: np.empty(0, np.int64) for n in (*_NUMBERS, "row", "part")}]
            self._chunks[0] |= {n: np.empty(0, "S16") for n in ("token_hash", "sample_hash")}
        chunks, self._chunks = self._chunks, []
        return {name: np.concatenate([c[name] for c in chunks]) for name in chunks[0]}


def _odd(keys: list[str], columns: dict[str, _Array]) -> _Array:
    """bool ``[N]``: segments that are no whole sample, or whose key is there more than once."""
    odd = (columns["index"] != 0) | (columns["start"] != 0) | (columns["stop"] != columns["total"])
    if len(set(keys)) < len(keys):
        seen: dict[str, int] = {}
        for i, key in enumerate(keys):
            first = seen.setdefault(key, i)
            if first != i:
                odd[i] = odd[first] = True
    return odd


def _decide(
    parts: Sequence[Receipt], others: Sequence[Receipt], keys: list[str], columns: dict[str, _Array], odd: _Array
) -> Manifest:
    """A manifest of the odd segments, and of everybody's fates."""
    segments: dict[int, list[Any]] = {}
    for i in np.flatnonzero(odd):
        row: list[Any] = [None] * 11
        for name, place in _NUMBERS.items():
            row[place] = int(columns[name][i])
        number = int(columns["row"][i])
        row[_KEY], row[_ROW] = keys[i], None if number < 0 else number
        row[_TOKEN_HASH], row[_SAMPLE_HASH] = columns["token_hash"][i].decode(), columns["sample_hash"][i].decode()
        segments.setdefault(int(columns["part"][i]), []).append(proof_of(row))
    manifest = Manifest(replace(r, segments=tuple(segments.get(i, ()))) for i, r in enumerate(parts))
    for receipt in others:
        manifest.add(receipt)
    return manifest


def _order(keys: list[str], rows: _Array) -> _Array:
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    if len(rows) and (ordered[0] < 0 or np.any(ordered[1:] == ordered[:-1])):
        plain = rows.tolist()
        return np.array(sorted(range(len(keys)), key=lambda i: (plain[i] < 0, plain[i], keys[i])), np.int64)
    return order


def entry_of(record: SampleRecord) -> SampleEntry:
    """The entry of a manifest's record."""
    pieces = tuple((part, p.slot, p.segment.start, p.segment.stop, p.token_hash) for part, p in record.segments)
    return SampleEntry(record.key, record.num_tokens, pieces)
