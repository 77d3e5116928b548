"""The manifest: all receipts of a run, and which samples they prove. Pure data; ``runs`` reads and writes it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, islice
from types import MappingProxyType
from typing import Any

import numpy as np

from hsx_dist.format.copies import Copies, attempt_name, identity_of
from hsx_dist.format.key_index import KeyIndex
from hsx_dist.format.names import receipt_name
from hsx_dist.format.receipt import Receipt, RowFate, SegmentProof
from hsx_dist.format.sample_record import SampleRecord, Totals
from hsx_dist.format.segments import SegmentTable, whole
from hsx_dist.text import head

__all__ = [
    "Manifest",
    "Receipt",
    "RowFate",
    "SampleRecord",
    "SegmentProof",
    "Totals",
]


class Manifest:
    """The samples and row fates that a run's receipts prove. They are the same for receipts in any order, and for
    receipts that are added twice.

    A sample exists when segments of one attempt cover its tokens, in each of its columns. Of several attempts that
    prove it, the highest counts; within an attempt, the lowest part name. Not safe for concurrent ``add``.

    Memory per sample: its row of a ``SegmentTable`` (124 bytes and its key) and 16 bytes of index. Only samples stored
    in several segments, columns or copies, and rows that were refused or failed, have Python objects.
    """

    def __init__(self, receipts: Iterable[Receipt] = ()):
        self._receipts: dict[tuple[int, str, int], Receipt] = {}
        self._order: list[Receipt] = []
        self._parts: dict[str, Receipt] = {}
        self._numbers: dict[str, list[int]] = {}  # part → numbers of its receipts; nearly always one
        self._stored_bytes = 0
        # A place is a receipt's number in ``_order`` and a slot in it.
        self._index = KeyIndex(self._key_at)  # the first proof of every key
        self._partial: set[str] = set()  # keys with one proof, which is not all of the sample
        self._many: dict[str, list[int]] = {}  # keys with several proofs: all proofs …
        self._chosen: dict[str, tuple[int, ...]] = {}  # … and those that form the sample, if it is whole
        self._fates: dict[str, tuple[tuple[int, str, int], RowFate]] = {}
        self._refused: dict[str, RowFate] = {}
        self._failed: dict[str, RowFate] = {}
        self._conflicts: set[str] = set()
        self._disputed: dict[
            str, set[bytes]
        ] = {}  # key → ``attempt_name`` of those that stored it with different tokens
        self._void: set[str] = set()  # parts that prove nothing any more
        self._dirty: dict[str, None] = {}  # keys whose proofs or fate changed since ``_settle`` last handled them
        self._copies: dict[str, Copies] = {}  # keys that were looked up one by one, and may get more segments
        # Keys that lost parts: how many of their places were looked at, and those of them that were not lost.
        self._kept: dict[str, tuple[int, list[int]]] = {}
        for receipt in receipts:
            self.add(receipt)

    @property
    def samples(self) -> Mapping[str, SampleRecord]:
        """Whole samples by key. A live view, which creates a record at each access."""
        return _Samples(self)

    @property
    def refused(self) -> Mapping[str, RowFate]:
        """By key: refused rows without a sample. A view, up to date when the property is read."""
        self._decide()
        return MappingProxyType(self._refused)

    @property
    def failed(self) -> Mapping[str, RowFate]:
        """By key: ``failed`` and ``poison`` rows without a sample. A view, up to date when the property is read."""
        self._decide()
        return MappingProxyType(self._failed)

    @property
    def parts(self) -> Mapping[str, Receipt]:
        """The receipt of each stored part, except parts that a later receipt declares lost. A live view."""
        return MappingProxyType(self._parts)

    @property
    def void(self) -> frozenset[str]:
        """Parts that receipts name but a later attempt did not find. They prove nothing."""
        return frozenset(self._void)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all parts."""
        return self._stored_bytes

    @property
    def conflicts(self) -> list[str]:
        """Contradictions, as sentences: an attempt with different tokens for one key, or receipts that differ.

        Samples of different known hashes are no contradiction: the attempt computed the row again.
        Of more than ``MOST_CONFLICTS``, the last sentence has the number of the others.
        """
        self._decide()
        most = MOST_CONFLICTS
        disputed = sum(len(attempts) for attempts in self._disputed.values())
        named = heapq.nsmallest(most, self._disputed) if len(self._disputed) > most else self._disputed
        found = sorted([*self._conflicts, *(c for key in named for c in self._disputes(key))])
        others = len(self._conflicts) + disputed - most
        return found if others <= 0 else [*found[:most], f"{others} more conflicts, which are not listed"]

    @property
    def num_conflicts(self) -> int:
        """The number of contradictions, also of those that ``conflicts`` does not list."""
        self._decide()
        return len(self._conflicts) + sum(len(attempts) for attempts in self._disputed.values())

    @property
    def receipts(self) -> list[Receipt]:
        """All receipts, by attempt, writer and number."""
        return [self._receipts[i] for i in sorted(self._receipts)]

    def copy(self) -> Manifest:
        """A manifest of the same receipts and conflicts. Adding to one does not change the other."""
        made = Manifest(self.receipts)
        made._conflicts |= self._conflicts
        return made

    def has_receipt(self, name: tuple[int, str, int]) -> bool:
        """Whether the receipt of this attempt, writer and number was added."""
        return name in self._receipts

    def content_of(self, key: str) -> str | None:
        """Hash of the input row that the sample ``key`` was made of. Empty: unknown. ``None``: there is no sample."""
        places = self._places(key)
        if not places:
            return None
        found: bytes = self._receipt(places[0]).table.hashes[places[0] & _SLOTS, 2]
        return found.decode("ascii")

    def parts_of(self, key: str, *, lost: bool = False) -> set[str]:
        """The parts that hold a segment of any copy of ``key``. ``lost``: only parts that were declared lost, else only
        the others."""
        first = self._index.find(key)
        places = self._many.get(key) or ([] if first is None else [first])
        parts = {self._part(place) for place in places}
        return parts & self._void if lost else parts - self._void

    def outcomes_under(self, parts: Iterable[str]) -> list[RowFate]:
        """Outcomes that do not count because the row has a sample in one of ``parts``. They would count again if the
        parts were lost."""
        tables = [self._order[number].table for part in parts for number in self._numbers.get(part, ())]
        keys = dict.fromkeys(key for table in tables for key in table.keys() if key in self._fates)  # noqa: SIM118
        hidden = [self._fates[key][1] for key in keys if self._places(key)]
        return [fate for fate in hidden if fate.fate != "withdrawn"]

    def columns(self) -> tuple[list[Receipt], Any, Any]:
        """The receipts of parts, by attempt, writer and number; the numbers of all their segments; and a mask.

        The numbers are as in ``SegmentTable.numbers``. The mask selects segments that are a whole sample with no other
        proof: nearly all segments of a run.
        """
        order = sorted((i for i, r in enumerate(self._order) if r.part), key=lambda i: self._order[i].id)
        found = [self._order[i] for i in order]
        numbers = np.concatenate([np.empty((0, 9), np.int64), *(r.table.numbers for r in found)])
        alone = whole(numbers)
        starts = dict(zip(order, np.cumsum([0, *(len(r.table) for r in found)]).tolist(), strict=False))
        many = [place for places in self._many.values() for place in places]
        alone[[starts[place >> _SLOT_BITS] + (place & _SLOTS) for place in many]] = False
        return found, numbers, alone

    def several(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, str, int]]]:
        """The samples that the mask of ``columns`` does not select: key, places of the segments, and the id of the
        first receipt that proves the first segment. The part of that receipt may be lost since."""
        self._decide()
        for key, places in self._chosen.items():
            named = (self._receipt(p) for p in self._many[key] if self._begins(p))
            yield key, places, min(receipt.id for receipt in named)

    def at(self, place: int) -> tuple[str, int, list[int], list[bytes]]:
        """The segment at a place: its part and slot, and its rows of ``SegmentTable.numbers`` and ``hashes``."""
        table, slot = self._receipt(place).table, place & _SLOTS
        return self._part(place), slot, table.numbers[slot].tolist(), table.hashes[slot].tolist()

    def totals(self) -> Totals:
        """Counts over the samples that readers see."""
        self._decide()
        receipts, numbers, alone = self.columns()
        total = Totals(samples=len(self.samples))
        total.add(numbers[alone])
        owner = np.repeat(np.arange(len(receipts)), [len(r.table) for r in receipts])
        parts = {receipts[i].part or "" for i in np.unique(owner[alone])}
        for place in (place for places in self._chosen.values() for place in places):
            parts.add(self._part(place))
            total.add(self._receipt(place).table.numbers[[place & _SLOTS]])
        total.parts = len(parts)
        total.part_bytes = sum(self._parts[part].size for part in parts)
        return total

    def add(self, receipt: Receipt) -> None:
        """Add one receipt. A receipt that is already known changes nothing."""
        known = self._receipts.get(receipt.id)
        if known is not None:
            if known != receipt:
                self._conflicts.add(f"{receipt_name(*receipt.id)}: two receipts of this name differ")
            return
        self.declare_void(receipt.void)
        self._receipts[receipt.id] = receipt
        self._order.append(receipt)
        if receipt.part is not None and receipt.part in self._void:
            self._add_segments(len(self._order) - 1, receipt.table)
            self._take_back(len(self._order) - 1)
        elif receipt.part is not None:
            before = self._parts.setdefault(receipt.part, receipt)
            if before is not receipt:
                self._conflicts.add(f"{receipt.part}: two receipts name this part")
                self._parts[receipt.part] = max(before, receipt, key=lambda r: r.id)
            self._stored_bytes += self._parts[receipt.part].size - (0 if before is receipt else before.size)
            self._numbers.setdefault(receipt.part, []).append(len(self._order) - 1)
            self._add_segments(len(self._order) - 1, receipt.table)
        for fate in receipt.rows:
            self._take_fate(receipt.id, fate)

    def declare_void(self, parts: Sequence[str]) -> None:
        """Treat ``parts`` as lost, whether their receipts were added before or will be added later."""
        for part in (part for part in dict.fromkeys(parts) if part not in self._void):
            self._void.add(part)
            if part in self._parts:
                self._stored_bytes -= self._parts.pop(part).size
            for number in self._numbers.pop(part, ()):
                self._take_back(number)

    def _take_back(self, number: int) -> None:
        """Mark the receipt's keys for ``_settle``, which ignores void parts. Keys stay in the index."""
        for slot, key in enumerate(self._order[number].table.keys()):
            self._many.setdefault(key, [number << _SLOT_BITS | slot])
            self._partial.discard(key)
            self._copies.pop(key, None)
            self._dirty[key] = None

    def _add_segments(self, number: int, table: SegmentTable) -> None:
        is_whole, keys = whole(table.numbers).tolist(), list(table.keys())
        if all(is_whole) and self._fates.keys().isdisjoint(keys) and self._index.add_new(keys, number << _SLOT_BITS):
            return  # nearly all receipts
        for slot, key in enumerate(keys):
            place = number << _SLOT_BITS | slot
            known = self._many.get(key)
            first = self._index.find(key) if known is None else None
            if known is None and first is None:  # nearly all of a run's samples
                self._index.add(key, place)
                if not is_whole[slot]:
                    self._partial.add(key)
                if key in self._fates:
                    self._dirty[key] = None
                continue
            if known is None:
                assert first is not None
                known = self._many[key] = [first]
                if key in self._partial:
                    self._partial.remove(key)
                else:
                    self._chosen[key] = (first,)
            known.append(place)
            self._dirty[key] = None

    def _take_fate(self, source: tuple[int, str, int], fate: RowFate) -> None:
        known = self._fates.get(fate.key)
        if known is None or known[0] <= source:
            self._fates[fate.key] = (source, fate)
            self._dirty[fate.key] = None

    def _decide(self) -> None:
        """Settle all changed keys. Do not call it for each receipt: a sample in n receipts would take n² steps."""
        dirty, self._dirty = self._dirty, {}
        for key in dirty:
            self._settle(key)

    def _settle(self, key: str) -> Copies | None:
        """Decide again which segments, if any, are the sample of ``key``, and whether its fate counts. Returns the
        ``Copies`` of a key that may get more segments."""
        pending = self._choose(key) if key in self._many else None
        if key in self._fates:
            fate = self._fates[key][1]
            self._refused.pop(key, None)
            self._failed.pop(key, None)
            if fate.fate != "withdrawn" and not self._places(key):
                (self._refused if fate.fate == "refused" else self._failed)[key] = fate
        return pending

    def _choose(self, key: str) -> Copies | None:
        places = self._many[key]
        copies = self._copies.pop(key, None)
        again: list[int] = []
        fresh = copies is None
        if copies is None:
            copies = Copies(self._name, self._end)
            copies.added, again = self._kept.pop(key, (0, again))
        kept = list[int]()
        for place in chain(again, islice(places, copies.added, None)):
            part, _, (index, start, _, total, _, _, _, column, columns), (_, sample_hash, _) = self.at(place)
            if part not in self._void:
                kept.append(place)
                identity = identity_of(total, columns, sample_hash)
                copies.add(place, self._receipt(place).attempt, identity, column, index, start)
        if fresh and len(kept) < len(places):
            self._kept[key] = len(places), kept
        copies.added = len(places)
        was_whole = self._chosen.pop(key, None) is not None
        self._disputed.pop(key, None)
        if disputed := copies.disputed():
            self._disputed[key] = disputed
        if places := copies.sample():
            self._chosen[key] = tuple(places)
        # Nearly all samples get no segment after they are whole. Those that do may get thousands.
        return copies if was_whole or not places else None

    def _disputes(self, key: str) -> list[str]:
        """One sentence for each attempt that stored ``key`` with different tokens."""
        parts: dict[bytes, set[str]] = {attempt: set() for attempt in sorted(self._disputed[key])}
        for place in self._many[key]:
            attempt, part = attempt_name(self._receipt(place).attempt), self._part(place)
            if attempt in parts and part not in self._void:
                parts[attempt].add(part)
        what = f"sample {head(key, _SHOWN)!r}"
        return [
            f"{what}: attempt {int.from_bytes(attempt)} stored it with different tokens ({_some(names)})"
            for attempt, names in parts.items()
        ]

    # -- places --------------------------------------------------------------------------------------------------

    def _receipt(self, place: int) -> Receipt:
        return self._order[place >> _SLOT_BITS]

    def _key_at(self, place: int) -> str:
        return self._receipt(place).table.key(place & _SLOTS)

    def _part(self, place: int) -> str:
        return self._receipt(place).part or ""

    def _name(self, place: int) -> tuple[str, int]:
        return self._part(place), place & _SLOTS

    def _end(self, place: int) -> tuple[int, bytes]:
        """The last token and the token hash of the segment at ``place``."""
        table, slot = self._receipt(place).table, place & _SLOTS
        return table.numbers.item(slot, 2), table.hashes.item(slot, 0)

    def _begins(self, place: int) -> bool:
        """Whether the segment at ``place`` is the first of its sample's first column."""
        index, column = self._receipt(place).table.numbers[place & _SLOTS, [0, 7]].tolist()
        return index == column == 0

    def _proof(self, place: int) -> SegmentProof:
        return self._receipt(place).table.proof(place & _SLOTS, self._part(place))

    def _places(self, key: str) -> tuple[int, ...]:
        """The places of the segments that form the sample ``key``; empty when it is not whole."""
        if key in self._dirty:
            del self._dirty[key]
            pending = self._settle(key)
            if pending is not None and pending.added > _FEW:
                # A reader that follows a run looks the key up after each segment. Keep the state, to add the next one.
                self._copies[key] = pending
        if key in self._many:
            return self._chosen.get(key, ())
        place = None if key in self._partial else self._index.find(key)
        return () if place is None else (place,)

    def _record(self, key: str, places: tuple[int, ...]) -> SampleRecord:
        proofs = tuple(map(self._proof, places))
        return SampleRecord(key, proofs[0].segment.total, self._receipt(places[0]).attempt, proofs[0].row, proofs)


class _Samples(Mapping[str, SampleRecord]):
    """The samples of a manifest."""

    def __init__(self, manifest: Manifest):
        self._manifest = manifest

    def __len__(self) -> int:
        m = self._manifest
        m._decide()
        return len(m._index) - len(m._partial) - len(m._many) + len(m._chosen)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and bool(self._manifest._places(key))

    def __getitem__(self, key: str) -> SampleRecord:
        places = self._manifest._places(key)
        if not places:
            raise KeyError(key)
        return self._manifest._record(key, places)

    def __iter__(self) -> Iterator[str]:
        receipts, _, alone = self._manifest.columns()
        keys = (key for receipt in receipts for key in receipt.table.keys())  # noqa: SIM118 - an iterator, of a table
        yield from compress(keys, alone)
        yield from (key for key, _, _ in self._manifest.several())


#: The most conflicts that are listed, and characters of a key or part that are shown in one.
MOST_CONFLICTS, _SHOWN = 1000, 200


def _some(names: set[str]) -> str:
    """The first part names, shortened, and the number of the others."""
    first = [head(name, _SHOWN) for name in heapq.nsmallest(4, names)]
    return ", ".join(first if len(names) <= 4 else [*first, f"{len(names) - 4} more"])


#: The most segments of a key that are compared again after each new one. A state takes the memory of many segments.
_FEW = 16
#: A place is one integer: the receipt's number in the high bits, the slot in its table in the low bits.
_SLOT_BITS = 32
_SLOTS = (1 << _SLOT_BITS) - 1
