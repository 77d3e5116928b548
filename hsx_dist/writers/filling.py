"""What a sink collects: segments with missing pages, and the open part."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from hsx_dist.format.container import EncodedSegment, SegmentEncoder
from hsx_dist.writers.sanity_checks import SanityChecks


@dataclass(slots=True)
class Filling:
    """A segment with missing pages.

    ``touched``: when its last page was added, in seconds of the sink without outages. ``nbytes``: encoded so far.
    ``arrival``: number of its first page. ``left``: missing pages. ``lost``: a page could not be encoded.
    """

    encoder: SegmentEncoder
    touched: float
    scan: SanityChecks
    arrival: int
    left: int
    nbytes: int = 0
    began: float = field(default_factory=time.monotonic)
    lost: bool = False

    def drop(self) -> int:
        """Drop the segment. Returns the freed bytes. A thread that still encodes a page frees none again."""
        freed, self.nbytes, self.lost = self.nbytes, 0, True
        return freed


@dataclass(slots=True)
class OpenPart:
    """Complete segments of the next part. ``since``: time of the first one. ``arrival``: number of the last one."""

    segments: list[EncodedSegment] = field(default_factory=list)
    names: set[tuple[str, int, int]] = field(default_factory=set)
    nbytes: int = 0
    header_bytes: int = 0
    since: float = 0.0
    arrival: int = 0
