"""The stored part: writing (``SegmentEncoder``, ``build_part``) and reading (``Part``)."""

from __future__ import annotations

import struct
from dataclasses import replace

from hsx_dist.format.container_read import Part
from hsx_dist.format.container_write import EncodedPart, EncodedSegment, SegmentEncoder, build_part
from hsx_dist.format.description import SegmentInfo
from hsx_dist.format.header import build_header, parse_header
from hsx_dist.store.base import Buffer

__all__ = ["EncodedPart", "EncodedSegment", "Part", "SegmentEncoder", "SegmentInfo", "build_part", "with_expires"]


def with_expires(data: bytes, part: Part, expires: float | None) -> list[Buffer] | None:
    """A stored object of one sample with another ``expires`` in its ``meta`` (None: without). All else is unchanged.

    Args:
        data: the whole object.
        part: the same object, opened.
        expires: seconds since the epoch.

    Returns:
        The object's buffers; None when ``data`` is not the object that was opened, because it was replaced since.
    """
    if len(data) != part.size:
        return None
    length = 8 + struct.unpack_from("<Q", data)[0]
    description, _ = parse_header(data[8:length], len(data) - length)
    if description != part.description:
        return None
    info, *others = description.segments
    meta = {name: value for name, value in info.segment.meta.items() if name != "expires"}
    if expires is not None:
        meta["expires"] = expires
    info = replace(info, segment=replace(info.segment, meta=meta))
    return [build_header(replace(description, segments=(info, *others))), memoryview(data)[length:]]
