"""The samples of a run in columns: a million of them in seconds, and in a hundred bytes each.

Says the same as ``format.manifest.Manifest``, which decides the few that need deciding: samples in several segments,
and keys that were stored more than once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hsx_dist.format.manifest import Manifest, Receipt, RowFate, SampleRecord

_Array = np.ndarray[Any, Any]
#: The columns of ``SegmentTable.numbers``.
_NUMBERS = ("index", "start", "stop", "total", "raw_bytes", "stored_bytes", "row")


@dataclass(frozen=True, slots=True)
class SampleEntry:
    """Where one sample lies: pieces ``(part, slot, start, stop, token_hash)`` in token order."""

    key: str
    num_tokens: int
    pieces: tuple[tuple[str, int, int, int, str], ...]


class Index:
    """All whole samples of a run, in the order of their rows; those without a row last, by key.

    Arrays are ``[N]``: ``tokens`` int64, ``raw_bytes`` int64 (of the states), ``part_of`` int32 (the part of the first
    segment, an index into ``parts``), ``group_of`` int32 (which receipt named the sample first, also of a part that was
    lost since: an order by it stays when lost samples are computed again). ``tokens_in``: a part's name → tokens of all
    its segments. ``complete``: whether the newest attempt had ended and said so. Never changes: threads may share it,
    and positions in it stay.
    """

    def __init__(self, receipts: Iterable[Receipt], *, complete: bool = False):
        self.complete = complete
        #: Receipts of parts, without their segments.
        self.parts: list[Receipt] = []
        found = list(receipts)
        lost = {part for r in found for part in r.void}
        stored = [r for r in found if r.part is not None]
        with_part = [r for r in stored if r.part not in lost]
        keys = [key for r in with_part for key in r.table.keys()]  # noqa: SIM118 - an iterator, of a table
        columns = _columns(with_part)
        odd = _odd(keys, columns)
        rest = [replace(r, part=None, segments=()) for r in found if r.part is None or r.part in lost]
        manifest = _decide([*rest, *with_part], odd)
        several = dict.fromkeys(keys[i] for i in np.flatnonzero(odd))
        self._many = {key: manifest.samples[key] for key in several if key in manifest.samples}
        self.conflicts = manifest.conflicts
        self.parts = [replace(r, segments=()) for r in with_part]
        first = _first_receipts(stored, lost, set(several))
        columns["group"] = np.flatnonzero([r.part not in lost for r in stored])[columns["part"]]
        if first:
            columns["group"] = np.array([first.get(k, g) for k, g in zip(keys, columns["group"], strict=True)])
        self._arrange(keys, columns, odd, first)
        self._places: dict[str, int] | None = None
        self.refused: dict[str, RowFate] = {k: f for k, f in manifest.refused.items() if k not in self}
        self.failed: dict[str, RowFate] = {k: f for k, f in manifest.failed.items() if k not in self}
        self.parts_by_name = {r.part: r for r in self.parts if r.part is not None}
        lengths = columns["stop"] - columns["start"]
        totals = np.bincount(columns["part"], lengths, len(with_part)).astype(np.int64)
        self.tokens_in = {r.part: int(n) for r, n in zip(with_part, totals, strict=True) if r.part is not None}

    def _arrange(self, keys: list[str], columns: dict[str, _Array], odd: _Array, first: dict[str, int]) -> None:
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
        self.raw_bytes: _Array = joined("raw_bytes", lambda r: _total(p.raw_bytes for _, p in r.segments), np.int64)[
            order
        ]
        self.stored_bytes: _Array = joined(
            "stored_bytes", lambda r: _total(p.stored_bytes for _, p in r.segments), np.int64
        )[order]
        self.part_of: _Array = joined("part", lambda r: part_numbers[r.segments[0][0]], np.int32)[order]
        self.group_of: _Array = joined("group", lambda r: first[r.key], np.int32)[order]
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

    def lie_in(self, parts: Set[str]) -> _Array:
        """bool ``[N]``: whether all of a sample lies in ``parts``."""
        found: _Array = np.array([r.part in parts for r in self.parts], bool)[self.part_of]
        for i in np.flatnonzero(self._slot < 0):
            found[i] = all(part in parts for part, _ in self._many[self.keys[i]].segments)
        return found

    def why_not(self, key: str) -> str:
        """Why there is no sample of ``key``, for people."""
        fate = self.refused.get(key) or self.failed.get(key)
        if fate is not None:
            return f"its row was {'refused' if fate.fate == 'refused' else 'given up'}: {fate.reason}"
        if not self.complete:
            return f"it is not stored yet; the run has {len(self)} samples and is not complete"
        return f"the run is complete, with {len(self)} samples, and none has this key; see Run.keys(), or hsx ls"

    def digest(self) -> str:
        """32 hex digits of all samples in order: keys, lengths, token ids."""
        hashes = self._hash.copy()
        for i in np.flatnonzero(self._slot < 0):
            of = [f"{start} {token_hash}" for _, _, start, _, token_hash in self[i].pieces]
            # A whole sample counts as what it is, also where the run holds several copies.
            hashes[i] = of[0][2:] if len(of) == 1 else hashlib.blake2b(" ".join(of).encode(), digest_size=8).hexdigest()
        h = hashlib.blake2b("\0".join(self.keys).encode("utf-8", "surrogatepass"), digest_size=16)
        h.update(self.tokens.tobytes() + hashes.tobytes())
        return h.hexdigest()

    def attempt(self, i: int) -> int:
        """The attempt that stored the sample."""
        return self.parts[int(self.part_of[i])].attempt

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_places": None}  # workers make their own, if they need it


def _total(numbers: Iterable[int]) -> int:
    """Their sum, as far as an array can hold it: receipts may claim more."""
    return min(sum(numbers), np.iinfo(np.int64).max)


def _columns(receipts: Sequence[Receipt]) -> dict[str, _Array]:
    """Segments of all receipts, column by column, ``[N]`` each."""
    empty = (np.empty((0, len(_NUMBERS)), np.int64), np.empty((0, 2), "S16"))
    numbers = np.concatenate([empty[0], *(r.table.numbers for r in receipts)])
    sizes = [len(r.table) for r in receipts]
    columns = {name: numbers[:, i].copy() for i, name in enumerate(_NUMBERS)}
    columns["token_hash"] = np.concatenate([empty[1], *(r.table.hashes for r in receipts)])[:, 0].copy()
    columns["part"] = np.repeat(np.arange(len(receipts), dtype=np.int32), sizes)
    columns["slot"] = np.concatenate([np.empty(0, np.int64), *(np.arange(n) for n in sizes)])
    return columns


def _odd(keys: list[str], columns: dict[str, _Array]) -> _Array:
    """bool ``[N]``: segments that are no whole sample, or whose key is there more than once."""
    odd: _Array = (columns["index"] != 0) | (columns["start"] != 0) | (columns["stop"] != columns["total"])
    if len(set(keys)) < len(keys):
        seen: dict[str, int] = {}
        for i, key in enumerate(keys):
            first = seen.setdefault(key, i)
            if first != i:
                odd[i] = odd[first] = True
    return odd


def _first_receipts(receipts: Sequence[Receipt], lost: Set[str], several: Set[str]) -> dict[str, int]:
    """Which receipt (a position in ``receipts``) was the first that named the begin of each sample of ``several`` keys,
    and of those that a ``lost`` part held."""
    keys = several | {key for r in receipts if r.part in lost for key in list(r.table.keys())}
    first: dict[str, int] = {}
    for i, receipt in enumerate(receipts if keys else ()):
        for key, index in zip(receipt.table.keys(), receipt.table.numbers[:, 0], strict=True):
            if index == 0 and key in keys:
                first.setdefault(key, i)
    return first


def _decide(receipts: Sequence[Receipt], odd: _Array) -> Manifest:
    """A manifest of all receipts that have odd segments, and of everybody's fates."""
    manifest = Manifest()
    at = 0
    for receipt in receipts:
        n = len(receipt.table) if receipt.part is not None else 0
        manifest.add(receipt if odd[at : at + n].any() else replace(receipt, segments=()))
        at += n
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
