"""Places of chunks within their layer."""

from __future__ import annotations

from array import array
from itertools import accumulate

from hsx_dist.format.segment_info import SegmentInfo

#: Up to so many sizes are added up for each read. For later chunks of a layer the places of all its chunks are kept.
_FEW_CHUNKS = 16


class ChunkPlaces:
    """Where the chunks of a part's layers begin. Safe to share between threads.

    A long sample is read a few chunks at a time. If each read added up the sizes of all chunks before, the reads of the
    whole sample would take quadratic time.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], array[int]] = {}

    def bytes_before(self, i: int, info: SegmentInfo, k: int, chunk: int) -> int:
        """Stored bytes of the chunks before ``chunk``. ``info``: the ``i``-th segment. ``k``: place of the layer."""
        if not info.sizes:
            return info.chunk_span(chunk)[0] * info.row_bytes
        if chunk <= _FEW_CHUNKS:
            return sum(info.sizes[k][:chunk])
        places = self._kept.get((i, k))
        if places is None:
            places = self._kept[i, k] = array("q", accumulate(info.sizes[k], initial=0))
        return places[chunk]
