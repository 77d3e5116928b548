"""What an object says about its sample, whether or not its codec is known here."""

from __future__ import annotations

from hsx_dist.errors import UnknownCodec
from hsx_dist.format.container_read import Part
from hsx_dist.format.header import Origin, parse_origin
from hsx_dist.format.header_source import header_of
from hsx_dist.format.part_source import PartSource


def origin_of(store: PartSource, name: str) -> Origin:
    """Read the header of the object ``name``. Raises like ``Part.open``, but not ``UnknownCodec``."""
    try:
        part = Part.open(store, name)
    except UnknownCodec:
        with header_of(store, name, None, store.head(name).size, 0, False) as (body, _):
            return parse_origin(body)
    return Origin(part.about, part.segments[0].segment.meta)
