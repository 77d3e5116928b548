"""What an object says about its sample, whether or not its codec is known here."""

from __future__ import annotations

import struct

from hsx_dist.errors import FormatError, UnknownCodec
from hsx_dist.format.container_read import Part
from hsx_dist.format.description import MAX_HEADER_BYTES
from hsx_dist.format.header import Origin, parse_origin
from hsx_dist.format.part_source import PartSource, fetched


def origin_of(store: PartSource, name: str) -> Origin:
    """Read the header of the object ``name``. Raises like ``Part.open``, but not ``UnknownCodec``."""
    try:
        part = Part.open(store, name)
    except UnknownCodec:
        (length,) = struct.unpack("<Q", fetched(store, name, [(0, 8)], False)[0])
        if length > MAX_HEADER_BYTES:  # replaced since it was opened
            raise FormatError(f"expected a header of at most {MAX_HEADER_BYTES} bytes, got {length}") from None
        return parse_origin(bytes(fetched(store, name, [(8, 8 + length)], False)[0]))
    return Origin(part.about, part.segments[0].segment.meta)
