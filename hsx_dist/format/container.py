"""The stored part: writing (``SegmentEncoder``, ``build_part``) and reading (``Part``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hsx_dist.format.container_read import Part
from hsx_dist.format.container_write import EncodedPart, EncodedSegment, SegmentEncoder, build_part
from hsx_dist.format.description import SegmentInfo

__all__ = ["EncodedPart", "EncodedSegment", "Part", "SegmentEncoder", "SegmentInfo", "build_part", "same_sample"]


def same_sample(part: Part, segment: EncodedSegment, about: Mapping[str, Any]) -> bool:
    """Whether a stored part holds the sample that ``segment`` is: the same key, tokens, layers and dtype of the same
    model. The states themselves may differ in their last bits, as batches do."""
    if len(part.segments) != 1 or any(part.about.get(k) != about.get(k) for k in ("model", "revision", "norm")):
        return False
    there, here = part.segments[0], segment.info
    return (
        (there.segment.key, there.segment.index, there.segment.total) == (here.segment.key, 0, here.segment.total)
        and (there.layer_ids, there.dtype, there.hidden_size) == (here.layer_ids, here.dtype, here.hidden_size)
        and all(there.segment.meta.get(k) == here.segment.meta.get(k) for k in ("tokens", "multimodal", "lora"))
        and np.array_equal(part.token_ids(0), segment.token_ids)
    )
