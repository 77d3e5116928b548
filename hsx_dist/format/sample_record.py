"""Samples that receipts prove, and counts over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hsx_dist.format.segments import SegmentProof, exact_sum, tokens_once


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """A sample that is proven whole: ``segments`` are sorted by column, then by token. Those of each column cover all
    tokens."""

    key: str
    num_tokens: int
    attempt: int
    row: int | None
    segments: tuple[SegmentProof, ...]

    @property
    def raw_bytes(self) -> int:
        """Bytes of the sample's states before encoding."""
        return sum(proof.raw_bytes for proof in self.segments)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the sample's states as stored."""
        return sum(proof.stored_bytes for proof in self.segments)


@dataclass(slots=True)
class Totals:
    """Counts over samples. ``stored_bytes``: bytes of their encoded states; ``part_bytes``: bytes of their objects."""

    samples: int = 0
    tokens: int = 0
    segments: int = 0
    parts: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    part_bytes: int = 0

    def add(self, numbers: np.ndarray[Any, Any]) -> None:
        """Count segments of samples: rows of ``SegmentTable.numbers``."""
        self.segments += len(numbers)
        self.tokens += exact_sum(tokens_once(numbers))
        self.raw_bytes += exact_sum(numbers[:, 4])
        self.stored_bytes += exact_sum(numbers[:, 5])
