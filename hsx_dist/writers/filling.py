"""What a sink collects: segments with missing pages, and the open part."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hsx_dist.format.container import EncodedSegment, SegmentEncoder
from hsx_dist.format.segment_info import SegmentInfo
from hsx_dist.page import Page, Segment
from hsx_dist.writers.sanity_checks import SanityChecks

#: Bytes of a segment's Python objects, without its texts and arrays.
_SEGMENT_BYTES = 4 << 10
#: Bytes of one encoded chunk's Python objects, and of the memory that its codec reserves and does not use.
_CHUNK_BYTES = 2 << 10


def bytes_besides(info: SegmentInfo) -> int:
    """Return an upper estimate of the bytes that a segment keeps until it is stored, besides the part's data."""
    return _besides(info.segment, info.num_layers * info.num_chunks)


def first_page_besides(page: Page) -> int:
    """Return ``bytes_besides`` of the segment whose first page this is, and the bytes of its attached arrays."""
    chunks = len(page.layer_ids) * -(-page.segment.num_tokens // max(page.chunk_tokens, 1))
    return _besides(page.segment, chunks) + sum(array.nbytes for array in page.segment.attached.values())


def tokens_of(segment: Segment) -> tuple[str, int, int]:
    """Return what identifies a segment's tokens among the copies of its key, column and index."""
    return segment.sample_hash, segment.start, segment.stop


def _besides(segment: Segment, chunks: int) -> int:
    # A part's header has each text again, up to twice as long because of its escapes.
    texts = sys.getsizeof(segment.key) + sys.getsizeof(segment.metadata) + len(str(segment.meta))
    return _SEGMENT_BYTES + _CHUNK_BYTES * chunks + 3 * texts


@dataclass(slots=True)
class Filling:
    """A segment with missing pages.

    ``touched``: when its last page was added, in seconds of the sink without outages. ``nbytes``: held so far.
    ``arrival``: number of its first page. ``left``: missing pages. ``tokens``: ``tokens_of`` the segment.
    ``lost``: a page could not be encoded.
    """

    encoder: SegmentEncoder
    touched: float
    scan: SanityChecks
    arrival: int
    left: int
    tokens: tuple[str, int, int]
    nbytes: int = 0
    began: float = field(default_factory=time.monotonic)
    lost: bool = False

    def drop(self) -> int:
        """Drop the segment. Returns the freed bytes. A thread that still encodes a page frees none again."""
        freed, self.nbytes, self.lost = self.nbytes, 0, True
        return freed


@dataclass(slots=True)
class OpenPart:
    """Complete segments of the next part.

    ``nbytes``: their data in the part. ``held``: bytes that they keep. ``since``: time of the first one. ``arrival``:
    number of the last one.
    """

    segments: list[EncodedSegment] = field(default_factory=list)
    names: set[tuple[str, int, int]] = field(default_factory=set)
    nbytes: int = 0
    held: int = 0
    header_bytes: int = 0
    since: float = 0.0
    arrival: int = 0

    def add(self, segments: Sequence[EncodedSegment], held: int, header_bytes: int, arrival: int) -> None:
        if not self.segments:
            self.since = time.monotonic()
        self.segments.extend(segments)
        self.names.update(segment.segment.id for segment in segments)
        self.nbytes += sum(segment.nbytes for segment in segments)
        self.held += held
        self.header_bytes += header_bytes
        self.arrival = arrival
