"""The manifest: all receipts of a run, and which samples they prove. Pure data; ``runs`` reads and writes it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hsx_dist.format.receipt import Receipt, RowFate, SegmentProof, token_hash

__all__ = [
    "COMPLETE",
    "RUN",
    "Manifest",
    "Receipt",
    "RowFate",
    "SampleRecord",
    "SegmentProof",
    "attempt_name",
    "compacted_name",
    "heartbeat_name",
    "parse_receipt_name",
    "part_name",
    "receipt_name",
    "token_hash",
]

RUN = "run.json"
COMPLETE = "complete.json"
_WRITER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_RECEIPT = re.compile(r"manifest/(\d{4,})/([^/]+)/(\d{6,})\.json")


def attempt_name(attempt: int) -> str:
    """``attempts/0001.json``: who holds the attempt."""
    return f"attempts/{_number(attempt, 4)}.json"


def heartbeat_name(attempt: int) -> str:
    """``attempts/0001.heartbeat.json``: a value that changes while its holder lives."""
    return f"attempts/{_number(attempt, 4)}.heartbeat.json"


def receipt_name(attempt: int, writer: str, seq: int) -> str:
    """``manifest/0001/WRITER/000001.json``"""
    return f"manifest/{_number(attempt, 4)}/{_writer(writer)}/{_number(seq, 6)}.json"


def part_name(attempt: int, writer: str, seq: int) -> str:
    """``data/part-0001-WRITER-000001.safetensors``"""
    return f"data/part-{_number(attempt, 4)}-{_writer(writer)}-{_number(seq, 6)}.safetensors"


def compacted_name(attempt: int) -> str:
    """``manifest/compacted-0001.jsonl.zst``: all receipts that counted when the attempt completed the run."""
    return f"manifest/compacted-{_number(attempt, 4)}.jsonl.zst"


def parse_receipt_name(name: str) -> tuple[int, str, int] | None:
    """``(attempt, writer, seq)`` of a receipt's name; ``None`` for any other name."""
    found = _RECEIPT.fullmatch(name)
    return (int(found[1]), found[2], int(found[3])) if found else None


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """A sample that is proven whole: ``segments`` are ``(part, proof)`` in token order and cover all its tokens."""

    key: str
    num_tokens: int
    attempt: int
    row: int | None
    segments: tuple[tuple[str, SegmentProof], ...]


class Manifest:
    """What a run's receipts prove. Receipts may come in any order, and again; the outcome is the same.

    A sample exists when segments of one attempt cover its tokens. Of several attempts that prove it the highest
    counts; within an attempt the lowest part name. Not safe for concurrent ``add``.
    """

    def __init__(self, receipts: Iterable[Receipt] = ()):
        self._receipts: dict[tuple[int, str, int], Receipt] = {}
        self._parts: dict[str, Receipt] = {}
        self._proofs: dict[str, list[tuple[int, str, SegmentProof]]] = {}
        self._samples: dict[str, SampleRecord] = {}
        self._fates: dict[str, tuple[tuple[int, str, int], RowFate]] = {}
        self._refused: dict[str, RowFate] = {}
        self._failed: dict[str, RowFate] = {}
        self._conflicts: set[str] = set()
        self._disputed: dict[str, list[str]] = {}
        for receipt in receipts:
            self.add(receipt)

    @property
    def samples(self) -> Mapping[str, SampleRecord]:
        """By key; only whole ones. A live view."""
        return MappingProxyType(self._samples)

    @property
    def refused(self) -> Mapping[str, RowFate]:
        """By key: rows that cannot have a sample, and have none. A live view."""
        return MappingProxyType(self._refused)

    @property
    def failed(self) -> Mapping[str, RowFate]:
        """By key: rows that were given up, and have no sample. A live view."""
        return MappingProxyType(self._failed)

    @property
    def parts(self) -> Mapping[str, Receipt]:
        """The receipt of each stored part. A live view."""
        return MappingProxyType(self._parts)

    @property
    def conflicts(self) -> list[str]:
        """What contradicts itself, in words: a key with other tokens in the same attempt, receipts that differ."""
        return sorted({*self._conflicts, *(c for found in self._disputed.values() for c in found)})

    @property
    def receipts(self) -> list[Receipt]:
        """All receipts, by attempt, writer and number."""
        return [self._receipts[i] for i in sorted(self._receipts)]

    def add(self, receipt: Receipt) -> None:
        """Take one receipt into account; one that is known already changes nothing."""
        known = self._receipts.setdefault(receipt.id, receipt)
        if known is not receipt:
            if known != receipt:
                self._conflicts.add(f"{receipt_name(*receipt.id)}: two receipts of this name differ")
            return
        if receipt.part is not None:
            before = self._parts.setdefault(receipt.part, receipt)
            if before is not receipt:
                self._conflicts.add(f"{receipt.part}: two receipts name this part")
                self._parts[receipt.part] = max(before, receipt, key=lambda r: r.id)
            for proof in receipt.segments:
                self._proofs.setdefault(proof.segment.key, []).append((receipt.attempt, receipt.part, proof))
            for key in {proof.segment.key for proof in receipt.segments}:
                self._settle(key)
        for fate in receipt.rows:
            self._take_fate(receipt.id, fate)

    def _take_fate(self, told: tuple[int, str, int], fate: RowFate) -> None:
        known = self._fates.get(fate.key)
        if known is not None and known[0] > told:
            return
        self._fates[fate.key] = (told, fate)
        self._refused.pop(fate.key, None)
        self._failed.pop(fate.key, None)
        if fate.key in self._samples or fate.fate == "withdrawn":
            return
        (self._refused if fate.fate == "refused" else self._failed)[fate.key] = fate

    def _drop_fate(self, key: str) -> None:
        self._refused.pop(key, None)
        self._failed.pop(key, None)

    def _settle(self, key: str) -> None:
        """Decide anew which record, if any, stands for ``key``."""
        proofs = self._proofs[key]
        if len(proofs) == 1:  # nearly all of a run's samples
            [(attempt, part, proof)] = proofs
            s = proof.segment
            if s.index == 0 and s.start == 0 and s.stop == s.total:
                self._samples[key] = SampleRecord(key, s.total, attempt, proof.row, ((part, proof),))
                self._drop_fate(key)
            return
        disputes: list[str] = []
        record: SampleRecord | None = None
        for attempt in sorted({a for a, _, _ in proofs}, reverse=True):
            record, dispute = _whole(key, attempt, [(p, q) for a, p, q in proofs if a == attempt])
            disputes += [dispute] if dispute else []
            if record is not None:
                break  # what older attempts say does not matter any more
        self._disputed.pop(key, None)
        if disputes:
            self._disputed[key] = disputes
        if record is not None:
            self._samples[key] = record
            self._drop_fate(key)
        elif self._samples.pop(key, None) is not None and key in self._fates:
            self._take_fate(*self._fates[key])


def _whole(key: str, attempt: int, proofs: list[tuple[str, SegmentProof]]) -> tuple[SampleRecord | None, str | None]:
    """(the sample that one attempt proves, what contradicts itself in it), each ``None`` when there is none."""
    # Segments of one sample agree in their total and in the hash of all its tokens; only such are joined.
    chosen: dict[tuple[_Identity, int, int], tuple[str, SegmentProof]] = {}
    mixed = False
    for part, proof in sorted(proofs, key=lambda item: (item[0], item[1].slot)):  # the lowest part name first
        s = proof.segment
        first = chosen.setdefault(((s.total, proof.sample_hash), s.index, s.start), (part, proof))
        mixed |= (first[1].segment.stop, first[1].token_hash) != (s.stop, proof.token_hash)
    samples = sorted({sample for sample, _, _ in chosen})
    dispute = None
    if mixed or len(samples) > 1:
        names = ", ".join(sorted({part for part, _ in proofs}))
        dispute = f"sample {key!r}: attempt {attempt} stored it with different tokens ({names})"
    # Where the whole sample's hash is not known, runs whose tokens differ must not be joined either.
    runs = [run for run in (_cover(sample, chosen) for sample in samples) if run and not (mixed and len(run) > 1)]
    if not runs:
        return None, dispute
    best = min(runs, key=lambda run: run[0][0])
    return SampleRecord(key, best[0][1].segment.total, attempt, best[0][1].row, tuple(best)), dispute


#: What all segments of a sample share: its number of tokens, and the hash of their ids.
_Identity = tuple[int, str]


def _cover(
    sample: _Identity, chosen: Mapping[tuple[_Identity, int, int], tuple[str, SegmentProof]]
) -> list[tuple[str, SegmentProof]]:
    """Segments 0, 1, … that cover all the sample's tokens without a gap; empty when there are none."""
    run: list[tuple[str, SegmentProof]] = []
    at = 0
    while at < sample[0]:
        item = chosen.get((sample, len(run), at))
        if item is None:
            return []
        run.append(item)
        at = item[1].segment.stop
    return run


def _number(n: int, digits: int) -> str:
    if n < 1:
        raise ValueError(f"expected a number from 1 on, came {n}")
    return f"{n:0{digits}d}"


def _writer(name: str) -> str:
    if not _WRITER.fullmatch(name):
        raise ValueError(
            f"expected a writer's name of at most 128 letters, digits, '_', '-', '.', came {name!r}; "
            "object_name makes one"
        )
    return name
