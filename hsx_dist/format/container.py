"""The stored part: writing (``SegmentEncoder``, ``build_part``) and reading (``Part``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hsx_dist.errors import FormatError
from hsx_dist.format.container_read import Part
from hsx_dist.format.container_write import EncodedPart, EncodedSegment, SegmentEncoder, build_part
from hsx_dist.format.header import build_header
from hsx_dist.format.segment_info import SegmentInfo
from hsx_dist.store.base import Buffer, ObjectInfo

__all__ = ["EncodedPart", "EncodedSegment", "Part", "SegmentEncoder", "SegmentInfo", "build_part", "with_expires"]


def with_expires(data: bytes, part: Part, expires: float | None) -> list[Buffer] | None:
    """A stored object of one sample with another ``expires`` in its ``meta`` (None: without). All else is unchanged.

    Args:
        data: the whole object.
        part: the same object, opened.
        expires: seconds since the epoch.

    Returns:
        The object's buffers; None when ``data`` is not the object that was opened, because it was replaced since, or
        was damaged on the way: damaged bytes must not replace the stored ones.
    """
    if len(data) != part.size:
        return None
    try:
        got = Part.open(_WholeObject(part, data), part.name, size=len(data))
        if got.description != part.description:
            return None
        _check_all(got)
    except FormatError:
        return None
    info, *others = got.segments
    meta = {name: value for name, value in info.segment.meta.items() if name != "expires"}
    if expires is not None:
        meta["expires"] = expires
    info = replace(info, segment=replace(info.segment, meta=meta))
    return [build_header(replace(got.description, segments=(info, *others))), memoryview(data)[got.header_bytes :]]


class _WholeObject:
    """A source of one object whose bytes are in memory."""

    def __init__(self, part: Part, data: bytes):
        self.url = part.name
        self._data = memoryview(data)

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:  # noqa: ARG002
        return [self._data[a:b] for a, b in ranges]

    def head(self, name: str) -> ObjectInfo:
        return ObjectInfo(name, self._data.nbytes)


def _check_all(part: Part) -> None:
    """Check all bytes of a part against its checksums. Raises ``FormatError``."""
    for i in range(len(part.segments)):
        part.token_ids(i)
        part.attached(i)
        for _ in part.scan(i):
            pass
