"""What a run's small objects are called and say: attempts, receipts, and the manifest that all receipts add up to.

Nothing makes a sample exist but a receipt that proves every token of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from hsx_dist.errors import FormatError, IntegrityError
from hsx_dist.format.checksum import crc32c
from hsx_dist.page import Segment

FORMAT = 1
RUN = "run.json"
COMPLETE = "complete.json"


def attempt_name(attempt: int) -> str:
    return f"attempts/{attempt:04d}.json"


def heartbeat_name(attempt: int) -> str:
    return f"attempts/{attempt:04d}.heartbeat.json"


def receipts_prefix(attempt: int) -> str:
    return f"manifest/{attempt:04d}/"


def receipt_name(attempt: int, writer: str, seq: int) -> str:
    """A writer's receipts count from 1 without gaps: who follows a run asks for the next instead of listing."""
    return f"{receipts_prefix(attempt)}{writer}/{seq:06d}.json"


def part_name(attempt: int, writer: str, seq: int) -> str:
    return f"data/part-{attempt:04d}-{writer}-{seq:06d}.safetensors"


def compacted_name(attempt: int) -> str:
    return f"manifest/compacted-{attempt:04d}.jsonl.zst"


def token_hash(token_ids: np.ndarray[Any, Any]) -> str:
    """16 hex digits of BLAKE2b over the ids as little-endian int64: the same tokens, the same hash."""
    return hashlib.blake2b(np.ascontiguousarray(token_ids, "<i8").tobytes(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class SegmentProof:
    """One stored segment: its place (``slot``: position in the part), its tokens' hash, its sizes in bytes."""

    segment: Segment
    slot: int
    token_hash: str
    raw_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class RowFate:
    """An input row that ended without a sample, and why. ``row`` counts from 0 in the input."""

    key: str
    row: int | None
    fate: Literal["refused", "failed"]
    reason: str
    tries: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """Proof of one stored part (size in bytes, CRC-32C), or (``part`` None) of rows that ended without a sample."""

    attempt: int
    writer: str
    seq: int
    part: str | None
    size: int
    crc32c: str
    header_bytes: int
    raw_bytes: int
    segments: tuple[SegmentProof, ...]
    rows: tuple[RowFate, ...]
    created: str

    def to_json(self) -> bytes:
        """One line of JSON; its last member is the CRC-32C of what stands before it."""
        body = asdict(self)
        body["format"] = FORMAT
        body["segments"] = [
            [*_segment_values(p.segment), p.slot, p.token_hash, p.raw_bytes, p.stored_bytes] for p in self.segments
        ]
        body["rows"] = [[r.key, r.row, r.fate, r.reason, r.tries] for r in self.rows]
        text = json.dumps(body, separators=(",", ":"), sort_keys=True)
        return f'{text[:-1]},"~crc32c":"{crc32c(text.encode()):08x}"}}'.encode()

    @classmethod
    def from_json(cls, data: bytes, name: str = "receipt") -> Receipt:
        """Raises:
        IntegrityError: the checksum does not match.
        FormatError: not a receipt, or of a format that is not known here.
        """
        tail = len(',"~crc32c":"00000000"}')
        text, end = data[:-tail] + b"}", data[-tail:]
        if end != f',"~crc32c":"{crc32c(text):08x}"}}'.encode():
            raise IntegrityError(
                f"{name}: its checksum does not match: it is no receipt, or was changed after it was written"
            )
        try:
            body = json.loads(text)
            if body.pop("format") != FORMAT:
                raise FormatError(f"{name}: expected format {FORMAT}; read it with a newer hsx-dist")
            segments = tuple(
                SegmentProof(Segment(s[0], s[1], s[2], s[3], s[4]), s[5], s[6], s[7], s[8])
                for s in body.pop("segments")
            )
            rows = tuple(RowFate(*r) for r in body.pop("rows"))
            return cls(segments=segments, rows=rows, **body)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as e:
            if isinstance(e, FormatError):
                raise
            raise FormatError(f"{name}: expected a receipt, got something else ({type(e).__name__}: {e})") from e


def _segment_values(s: Segment) -> list[Any]:
    return [s.key, s.index, s.start, s.stop, s.total]


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """A durable sample: where its segments lie, in the order of its tokens."""

    key: str
    num_tokens: int
    attempt: int
    segments: tuple[tuple[str, SegmentProof], ...]  # (part, proof)


@dataclass(slots=True)
class Manifest:
    """All receipts of a run, added up in any order.

    ``samples`` holds only what is whole: segments of *one* attempt that cover every token. A sample that is proven
    twice is the one of the highest attempt, then of the lowest part names. The same key with other tokens in one
    attempt is a conflict: told in ``conflicts``, for nobody can say which of the two is meant.
    """

    samples: dict[str, SampleRecord] = field(default_factory=dict)
    parts: dict[str, Receipt] = field(default_factory=dict)
    refused: dict[str, RowFate] = field(default_factory=dict)
    failed: dict[str, RowFate] = field(default_factory=dict)
    conflicts: list[str] = field(default_factory=list)
    receipts: dict[tuple[int, str, int], Receipt] = field(default_factory=dict)
    _partial: dict[tuple[int, str], dict[int, tuple[str, SegmentProof]]] = field(default_factory=dict)

    def add(self, receipt: Receipt) -> None:
        """Add a receipt; one that was added before changes nothing."""
        identity = (receipt.attempt, receipt.writer, receipt.seq)
        if identity in self.receipts:
            return
        self.receipts[identity] = receipt
        if receipt.part is not None:
            self.parts[receipt.part] = receipt
            for proof in receipt.segments:
                self._prove(receipt.attempt, receipt.part, proof)
        for row in receipt.rows:
            if row.fate == "refused":
                self.refused[row.key] = row
            elif row.key not in self.samples:
                self.failed[row.key] = row

    def _prove(self, attempt: int, part: str, proof: SegmentProof) -> None:
        segment = proof.segment
        whole = self.samples.get(segment.key)
        if whole is not None and whole.attempt == attempt:
            self._again(whole, part, proof)
            return
        found = self._partial.setdefault((attempt, segment.key), {})
        other = found.get(segment.index)
        if other is not None:
            self._compare(attempt, other[1], proof)
            if other[0] <= part:
                return
        found[segment.index] = (part, proof)
        self._complete(attempt, segment.key)

    def _complete(self, attempt: int, key: str) -> None:
        found = self._partial[(attempt, key)]
        at = 0
        for index in range(len(found)):
            if index not in found or found[index][1].segment.start != at:
                return
            at = found[index][1].segment.stop
        total = found[0][1].segment.total
        if at != total:
            return
        del self._partial[(attempt, key)]
        before = self.samples.get(key)
        if before is None or before.attempt < attempt:
            self.samples[key] = SampleRecord(key, total, attempt, tuple(found[i] for i in range(len(found))))
            self.failed.pop(key, None)

    def _again(self, whole: SampleRecord, part: str, proof: SegmentProof) -> None:
        """A segment of a sample that this attempt has proven already."""
        index = proof.segment.index
        if index >= len(whole.segments):
            self.conflicts.append(f"{whole.key}: attempt {whole.attempt} stored it twice, in different lengths")
            return
        have_part, have = whole.segments[index]
        self._compare(whole.attempt, have, proof)
        if part < have_part:
            segments = (*whole.segments[:index], (part, proof), *whole.segments[index + 1 :])
            self.samples[whole.key] = SampleRecord(whole.key, whole.num_tokens, whole.attempt, segments)

    def _compare(self, attempt: int, a: SegmentProof, b: SegmentProof) -> None:
        if a.segment != b.segment or a.token_hash != b.token_hash:
            self.conflicts.append(
                f"{a.segment.key}: attempt {attempt} stored segment {a.segment.index} twice with different tokens "
                f"({a.token_hash} and {b.token_hash}); two rows have one key"
            )

    def writers(self, attempt: int) -> Mapping[str, int]:
        """The attempt's writers, and how many receipts each has stored."""
        last: dict[str, int] = {}
        for n, writer, seq in self.receipts:
            if n == attempt:
                last[writer] = max(last.get(writer, 0), seq)
        return last

    def check_gapless(self) -> None:
        """Raises:
        IntegrityError: a writer's receipt is missing though a later one is there.
        """
        for attempt in {n for n, _, _ in self.receipts}:
            for writer, last in self.writers(attempt).items():
                missing = [s for s in range(1, last + 1) if (attempt, writer, s) not in self.receipts]
                if missing:
                    names = ", ".join(receipt_name(attempt, writer, s) for s in missing[:3])
                    raise IntegrityError(
                        f"expected receipts 1 to {last} of {writer}, found none at {names}: it was removed"
                    )

    @classmethod
    def of(cls, receipts: Iterable[Receipt]) -> Manifest:
        manifest = cls()
        for receipt in receipts:
            manifest.add(receipt)
        return manifest
