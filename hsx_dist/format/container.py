"""The stored part: writing (``SegmentEncoder``, ``build_part``) and reading (``Part``)."""

from __future__ import annotations

from hsx_dist.format.container_read import Part
from hsx_dist.format.container_write import EncodedPart, EncodedSegment, SegmentEncoder, build_part
from hsx_dist.format.description import SegmentInfo

__all__ = ["EncodedPart", "EncodedSegment", "Part", "SegmentEncoder", "SegmentInfo", "build_part"]
