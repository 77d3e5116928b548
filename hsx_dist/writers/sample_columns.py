"""Columns of samples that are separate objects. Each object has all columns of its sample, or is not stored."""

from __future__ import annotations

from dataclasses import dataclass, field

from hsx_dist.format.container import EncodedSegment
from hsx_dist.page import Segment


@dataclass(slots=True)
class _Sample:
    left: int
    held: dict[int, EncodedSegment] = field(default_factory=dict)
    lost: bool = False


class SampleColumns:
    """Columns that wait for the other columns of their sample. Not thread-safe."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, str], _Sample] = {}

    def take(self, segment: EncodedSegment) -> list[EncodedSegment] | None:
        """Add a column.

        Returns:
            All columns of the sample, in order, if this is the last one; otherwise an empty list. ``None``: the sample
            is lost, and this column with it.
        """
        s = segment.segment
        sample = self._settle(s)
        if sample.lost:
            return None
        sample.held[s.column] = segment
        return [sample.held[column] for column in sorted(sample.held)] if not sample.left else []

    def lose(self, segment: Segment) -> list[EncodedSegment]:
        """Mark a column as lost.

        Returns:
            The columns that waited for it. They are lost too.
        """
        sample = self._settle(segment)
        held, sample.held, sample.lost = list(sample.held.values()), {}, True
        return held

    def _settle(self, segment: Segment) -> _Sample:
        key = segment.key, segment.source
        sample = self._samples.setdefault(key, _Sample(segment.columns))
        sample.left -= 1
        if not sample.left:
            del self._samples[key]
        return sample
