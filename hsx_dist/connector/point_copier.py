"""Copy one point from the blocks of its cache into pages in the ring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hsx_dist.connector.columns import CapturedPoint
from hsx_dist.connector.copy_stream import CopyEvent
from hsx_dist.connector.gather import Order, Runs, block_runs, cache_order, mean_rows, page_shape, row_runs, to_device
from hsx_dist.connector.step import Save
from hsx_dist.errors import ConfigError
from hsx_dist.page import HIDDEN_STATES, Page, Segment

#: Limit of the input bytes of one compressed frame (one layer of one page).
FRAME_BYTES = 1 << 20
#: Limit of the pages that a device gathers at once, which is its staging memory.
STAGING_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Tokens per page and per segment. Both are whole blocks, so that pages are gathered by blocks."""

    page_tokens: int
    segment_tokens: int

    @classmethod
    def of(
        cls, *, block_size: int, layers: int, hidden_size: int, itemsize: int, page_bytes: int, segment_bytes: int
    ) -> CopyPlan:
        """Compute the plan from the limits of a page and a segment.

        Raises:
            ValueError: one block of all layers is larger than a segment may be.
        """
        row = hidden_size * itemsize
        block = block_size * layers * row
        if block > segment_bytes:
            raise ValueError(
                f"segment_bytes: expected at least {block} for one cache block ({block_size} tokens of {layers} "
                f"layers), got {segment_bytes}. Raise segment_bytes and in_flight_bytes, or capture fewer layers"
            )
        blocks = max(1, min(page_bytes // block, FRAME_BYTES // (block_size * row)))
        pages = max(1, segment_bytes // (blocks * block))
        return cls(blocks * block_size, pages * blocks * block_size)


def hidden_states_in(cache: torch.Tensor, layer_ids: tuple[int, ...]) -> tuple[CapturedPoint, torch.Tensor]:
    """Return vLLM's own hidden-state cache, ``[blocks, layers, block_size, hidden]``, as a captured point."""
    dtype = str(cache.dtype).removeprefix("torch.")
    return CapturedPoint(HIDDEN_STATES, layer_ids, cache.shape[3], dtype), cache


@dataclass(slots=True)
class ColumnCopy:
    """A column that is being copied. ``next``: the first token not yet copied. ``event``: the last copy's."""

    copier: PointCopier
    save: Save
    number: int  # the column's number in the sample
    #: int64, on the host: the blocks; or a slot for each token, if only some tokens or layers are copied
    places: torch.Tensor
    rows: bool
    layers: tuple[int, ...]  # entries of the cache's layer axis
    layer_ids: tuple[int, ...]
    dtype: torch.dtype
    sample_hash: str
    source: str
    next: int = 0
    segment: Segment | None = None  # the last page's
    runs: Runs | None = None  # of ``places``, on the cache's device
    event: CopyEvent | None = None

    @property
    def ended(self) -> bool:
        """Whether every page was placed."""
        return self.next == len(self.save.token_ids)


class PointCopier:
    """Copies one point on one rank. ``WorkerHalf`` owns the ring and the copy stream, and decides the order."""

    def __init__(
        self,
        point: CapturedPoint,
        cache: torch.Tensor,
        memory: torch.Tensor,
        *,
        ring_bytes: int,
        page_bytes: int,
        segment_bytes: int,
    ):
        """``cache``: the point's cache, ``[blocks, layers, block_size, width]``. ``memory``: the ring's memory, uint8.

        Raises:
            ConfigError: the ring cannot hold a page.
            ValueError: a block does not fit a segment.
        """
        _, layers, block_size, width = cache.shape
        self.point = point
        self._cache = cache
        self._memory, self._ring_bytes = memory, ring_bytes
        self._order: Order = cache_order(cache)
        self._block_size = block_size
        self.plan = CopyPlan.of(
            block_size=block_size,
            layers=layers,
            hidden_size=width,
            itemsize=cache.element_size(),
            page_bytes=page_bytes,
            segment_bytes=segment_bytes,
        )
        page = self.plan.page_tokens * layers * width * cache.element_size()
        if page > ring_bytes:
            raise ConfigError(
                f"in_flight_bytes: expected room for a page of {page} bytes ({self.plan.page_tokens} tokens of "
                f"{layers} layers), got a ring of {ring_bytes}. Raise in_flight_bytes or lower page_bytes"
            )

    def planned(self, save: Save, number: int, sample_hash: str, source: str) -> ColumnCopy:
        """Plan the copy of column ``number`` of ``save``.

        Raises:
            ConfigError: the ring cannot hold a page of this column.
        """
        chosen = save.columns[number].layers
        layers = chosen or tuple(range(len(self.point.layers)))
        places = torch.from_numpy(save.block_ids)
        rows = save.positions is not None or chosen is not None or save.mean_of > 0
        if rows:
            positions = save.positions if save.positions is not None else range(save.mean_of or len(save.token_ids))
            if isinstance(positions, range):
                at = torch.arange(positions.start, positions.stop, positions.step)
            else:
                at = torch.from_numpy(positions)
            places = places[at // self._block_size] * self._block_size + at % self._block_size
        copy = ColumnCopy(
            self,
            save,
            number,
            places,
            rows,
            layers,
            tuple(self.point.layers[i] for i in layers),
            torch.float32 if save.mean_of else self._cache.dtype,
            sample_hash,
            source,
        )
        nbytes = self.nbytes(copy, 0, min(self.plan.page_tokens, len(save.token_ids)))
        if nbytes > self._ring_bytes:
            raise ConfigError(
                f"in_flight_bytes: expected at least {nbytes} bytes in the ring for a page of this selection, got "
                f"{self._ring_bytes}. Raise in_flight_bytes"
            )
        return copy

    def _shape(self, copy: ColumnCopy, start: int, stop: int) -> tuple[int, int, int]:
        """Return the shape of the page of tokens ``[start, stop)``."""
        if copy.rows:
            return len(copy.layers), stop - start, self._cache.shape[3]
        # Page and segment lengths are whole blocks, so a page starts with a block.
        return page_shape(self._cache, -(-stop // self._block_size) - start // self._block_size, self._order)

    def nbytes(self, copy: ColumnCopy, start: int, stop: int) -> int:
        """Return the bytes of the page of tokens ``[start, stop)``."""
        return math.prod(self._shape(copy, start, stop)) * copy.dtype.itemsize

    def _next(self, copy: ColumnCopy) -> tuple[int, int]:
        """Return the tokens ``[start, stop)`` of the next page."""
        start = copy.next
        segment_stop = (start // self.plan.segment_tokens + 1) * self.plan.segment_tokens
        return start, min(start + self.plan.page_tokens, segment_stop, len(copy.save.token_ids))

    def next_nbytes(self, copy: ColumnCopy) -> int:
        """Return the bytes of the page of the first tokens that are not copied yet."""
        return self.nbytes(copy, *self._next(copy))

    def next_segment(self, copy: ColumnCopy) -> Segment:
        """Return the segment of the first tokens that are not copied yet."""
        index = copy.next // self.plan.segment_tokens
        if copy.segment is not None and copy.segment.index == index:
            return copy.segment
        save, total = copy.save, len(copy.save.token_ids)
        start = index * self.plan.segment_tokens
        column = save.columns[copy.number]
        about = copy.number == 0  # only column 0 carries the sample's meta, metadata and attached arrays
        copy.segment = Segment(
            key=save.key,
            index=index,
            start=start,
            stop=min(start + self.plan.segment_tokens, total),
            total=total,
            row=save.row,
            content=save.content,
            sample_hash=copy.sample_hash,
            source=copy.source,
            meta=save.meta if about else {},
            attached=save.attached if about and index == 0 else {},
            name=save.name,
            metadata=save.metadata if about else "",
            column=copy.number,
            columns=len(save.columns),
            point=column.point,
            shard=column.shard,
            shards=column.shards,
            head=self.point.head,
        )
        return copy.segment

    def next_page(self, copy: ColumnCopy, offset: int) -> Page:
        """Return the page of the first tokens that are not copied yet, at ``offset`` in the ring. They now count as
        copied."""
        start, stop = self._next(copy)
        page = Page(
            segment=self.next_segment(copy),
            start=start,
            stop=stop,
            chunk_tokens=self.plan.page_tokens,
            layer_ids=copy.layer_ids,
            dtype=str(copy.dtype).removeprefix("torch."),
            shape=self._shape(copy, start, stop),
            order="LTH" if copy.rows else self._order,
            token_ids=copy.save.token_ids[start:stop],
            offset=offset,
        )
        copy.next = stop
        return page

    def joins(self, page: Page, pages: Sequence[Page]) -> bool:
        """Whether ``page``, which follows ``pages`` of the same column, is copied with them."""
        staged = (len(pages) + 1) * page.nbytes
        return self._cache.device.type == "cuda" and page.shape == pages[0].shape and staged <= STAGING_BYTES

    def copy(self, copy: ColumnCopy, pages: Sequence[Page]) -> None:
        """Copy successive pages of one shape into the ring, concurrently with steps.

        For a cache on a device the steps' thread calls this and queues the copy; for a host cache another thread does.
        """
        outs = [self._memory[page.offset : page.offset + page.nbytes].view(copy.dtype) for page in pages]
        if copy.save.mean_of:
            (out,) = outs  # a mean is one row, so one page
            places = to_device(copy.places, self._cache.device)
            out.copy_(mean_rows(self._cache, places, copy.layers).view(-1), non_blocking=True)
            return
        if copy.runs is None:  # once for a column: on a GPU the host's work for a page takes longer than its copy
            places = to_device(copy.places, self._cache.device)
            copy.runs = (
                row_runs(self._cache, places, copy.layers)
                if copy.rows
                else block_runs(self._cache, places, self._order)
            )
        grain = 1 if copy.rows else self._block_size
        copy.runs.copy_to(*outs, start=pages[0].start // grain, stop=-(-pages[-1].stop // grain))
