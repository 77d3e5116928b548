"""The worker half: copies finished requests' blocks into the ring, page by page, and reports when the blocks may go."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from uuid import uuid4

import torch

from hsx_dist.connector.copy_stream import Event, copy_stream_for
from hsx_dist.connector.gather import Order, cache_order, gather, gather_rows, mean_rows, page_shape, to_device
from hsx_dist.connector.outlet import Outlet
from hsx_dist.connector.step import Expect, Save, Skip, Step
from hsx_dist.errors import ConfigError
from hsx_dist.format.markers import OBJECT
from hsx_dist.logger import get_logger
from hsx_dist.page import Page, Segment, object_name, token_hash
from hsx_dist.text import bounded

_R = TypeVar("_R", Expect, Skip)

log = get_logger(__name__)

#: How long a step without tokens waits for the ring, so that an engine that has nothing to do does not spin.
IDLE_WAIT_S = 0.002

#: Input of one compressed frame is at most this (one layer of one page).
FRAME_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """How many tokens go into a page and a segment: whole blocks, so that pages are gathered by blocks."""

    page_tokens: int
    segment_tokens: int

    @classmethod
    def of(
        cls, *, block_size: int, layers: int, hidden_size: int, itemsize: int, page_bytes: int, segment_bytes: int
    ) -> CopyPlan:
        """Raises:
        ValueError: one block of all layers is larger than a page or a segment may be.
        """
        row = hidden_size * itemsize
        block = block_size * layers * row
        if block > segment_bytes:
            raise ValueError(
                f"one cache block of {block_size} tokens of {layers} layers takes {block} bytes, more than "
                f"segment_bytes ({segment_bytes}): raise segment_bytes and in_flight_bytes, or capture fewer layers"
            )
        blocks = max(1, min(page_bytes // block, FRAME_BYTES // (block_size * row)))
        pages = max(1, segment_bytes // (blocks * block))
        return cls(blocks * block_size, pages * blocks * block_size)


@dataclass(slots=True)
class _PageCopy:
    """A save under way: ``next`` is the first token not yet copied, ``event`` the last copy's."""

    save: Save
    #: int64, on the host: the blocks, or (where only some tokens or layers are wanted) a slot for each token
    places: torch.Tensor
    rows: bool
    layers: tuple[int, ...]  # entries of the cache's layer axis
    layer_ids: tuple[int, ...]
    dtype: torch.dtype
    sample_hash: str
    source: str
    next: int = 0
    event: Event | None = None


class WorkerHalf:
    """State of the connector in one worker rank that stores samples. Its steps have this rank's requests alone."""

    def __init__(
        self,
        cache: torch.Tensor,
        outlet: Outlet,
        *,
        layer_ids: tuple[int, ...],
        page_bytes: int,
        segment_bytes: int,
    ):
        """``cache``: the hidden-state cache as vLLM registers it, ``[blocks, layers, block_size, hidden]``."""
        _, layers, block_size, hidden = cache.shape
        self._cache = cache
        self._order: Order = cache_order(cache)
        self._outlet = outlet
        self._layer_ids = layer_ids
        self._block_size = block_size
        self.plan = CopyPlan.of(
            block_size=block_size,
            layers=layers,
            hidden_size=hidden,
            itemsize=cache.element_size(),
            page_bytes=page_bytes,
            segment_bytes=segment_bytes,
        )
        page = self.plan.page_tokens * layers * hidden * cache.element_size()
        if page > outlet.ring.capacity:
            raise ConfigError(
                f"in_flight_bytes: expected room for a page of {page} bytes ({self.plan.page_tokens} tokens of "
                f"{layers} layers), got a ring of {outlet.ring.capacity}. Raise in_flight_bytes or lower page_bytes"
            )
        self._memory = torch.from_numpy(outlet.memory)
        self._copy_stream = copy_stream_for(cache)
        self._pinned = cache.is_cuda and not self._memory.is_pinned()
        if self._pinned:
            pin(self._memory)
        self._followed = False  # copies out of this step's saves wait for the model's earlier steps
        self._waiting: deque[_PageCopy] = deque()  # not all pages copied, oldest first
        self._copied: list[_PageCopy] = []  # all copies started, not all done
        self._refused: set[str] = set()  # requests that could not be planned: their blocks may go at once
        self._meter = outlet.meter
        self._meter.watch("blocks_held", lambda: self.blocks_held)

    def begin(self, meta: Step) -> None:
        """Prepare a step before the model runs: its lock files are made, and copies wait for earlier steps alone."""
        self._each(self._outlet.expect, meta.expected)
        if meta.saves:
            self._follow()

    def _follow(self) -> None:
        """Let copies wait for the steps that wrote their states. Called before this step's model run is queued:
        otherwise copies would wait for that as well, and hold their blocks for longer."""
        self._copy_stream.follow()
        self._followed = True

    def step(self, meta: Step) -> None:
        """Take what finished since the last step, and copy what there is room for. Depends on no order of vLLM's calls
        after ``begin``: the states of a finished request were written in an earlier step."""
        self._each(self._outlet.skip, meta.skipped)
        self._outlet.prepared()  # the answers of this step are not out yet
        if not meta.saves and not self._waiting:
            if self._copied and meta.idle:
                self._copy_stream.wait(IDLE_WAIT_S)
            return
        before = time.monotonic()
        if meta.saves and not self._followed:
            self._follow()
        self._followed = False
        self._waiting.extend(copy for save in meta.saves if (copy := self._planned(save)) is not None)
        self._pump()
        copied = time.monotonic()
        self._meter.add("copy_seconds", copied - before)
        if self._waiting and meta.idle:
            self._outlet.ring.wait(IDLE_WAIT_S)
            self._meter.add("store_wait_seconds", time.monotonic() - copied)

    def _each(self, call: Callable[[_R], None], requests: Sequence[_R]) -> None:
        """``call`` for each request. An error costs its own request: it would end the engine's step."""
        for request in requests:
            try:
                call(request)
            except Exception:
                log.exception("request %s is not accounted for", request.request_id)

    def _planned(self, save: Save) -> _PageCopy | None:
        """How a request is copied; None where that fails: then its blocks may go, and its failure is told."""
        try:
            return self._plan_copy(save)
        except Exception as e:
            log.exception("hidden states of %s cannot be copied", save.key)
            self._refused.add(save.request_id)
            name = save.name or object_name(save.key) + OBJECT
            why = bounded(f"its states cannot be copied: {type(e).__name__}: {e}")
            self._each(self._outlet.skip, [Skip(save.id or save.request_id, save.key, name, save.owner, why)])
            return None

    def _plan_copy(self, save: Save) -> _PageCopy:
        places = torch.from_numpy(save.block_ids)
        rows = save.positions is not None or save.layers is not None or save.mean_of > 0
        if rows:
            positions = save.positions if save.positions is not None else range(save.mean_of or len(save.token_ids))
            if isinstance(positions, range):
                at = torch.arange(positions.start, positions.stop, positions.step)
            else:
                at = torch.from_numpy(positions)
            places = places[at // self._block_size] * self._block_size + at % self._block_size
        # A mean has no token ids of its own: what tells two of them apart is over which it was taken.
        ids = save.attached["request_token_ids"] if save.mean_of else save.token_ids
        layers = save.layers or tuple(range(len(self._layer_ids)))
        copy = _PageCopy(
            save,
            places,
            rows,
            layers,
            tuple(self._layer_ids[i] for i in layers),
            torch.float32 if save.mean_of else self._cache.dtype,
            token_hash(ids),
            f"{save.id or save.request_id}:{uuid4().hex[:12]}",
        )
        nbytes = self._nbytes(copy, 0, min(self.plan.page_tokens, len(save.token_ids)))
        if nbytes > self._outlet.ring.capacity:
            raise ConfigError(
                f"in_flight_bytes: expected at least {nbytes} bytes in the ring for a page of this selection, got "
                f"{self._outlet.ring.capacity}. Raise in_flight_bytes"
            )
        return copy

    def _shape(self, copy: _PageCopy, start: int, stop: int) -> tuple[int, int, int]:
        """Shape of the page of tokens ``[start, stop)``."""
        if copy.rows:
            return len(copy.layers), stop - start, self._cache.shape[3]
        # Page and segment lengths are whole blocks, so a page starts with a block.
        return page_shape(self._cache, -(-stop // self._block_size) - start // self._block_size, self._order)

    def _nbytes(self, copy: _PageCopy, start: int, stop: int) -> int:
        return math.prod(self._shape(copy, start, stop)) * copy.dtype.itemsize

    def drain(self, seconds: float) -> int:
        """At the end of the engine: copy what still waits, for at most ``seconds``; how many requests were left."""
        end = time.monotonic() + seconds
        while self._waiting and time.monotonic() < end:
            self.step(Step(idle=True))
        return len(self._waiting)

    def close(self) -> None:
        """Wait for the copies that were started; there will be no more."""
        self._copy_stream.close()
        if self._pinned:  # else an engine that comes after this one, in the same process, could not pin its own
            unpin(self._memory)
            self._pinned = False

    def finished(self) -> set[str]:
        """Requests whose last copy is done since the last call: their blocks may be reused. Each is named once."""
        done = {c.save.request_id for c in self._copied if c.event is None or c.event.query()}
        self._copied = [c for c in self._copied if c.save.request_id not in done]
        refused, self._refused = self._refused, set()
        return done | refused

    @property
    def pending(self) -> int:
        """Requests whose blocks are still held."""
        return len(self._waiting) + len(self._copied)

    @property
    def blocks_held(self) -> int:
        """Cache blocks that vLLM may not use again before they are copied."""
        return sum(len(c.save.block_ids) for c in (*self._waiting, *self._copied))

    def _pump(self) -> None:
        """Copy what there is room for. The blocks of the rest stay held, and vLLM's scheduler waits for them."""
        pages: list[tuple[_PageCopy, Page]] = []
        whole: list[_PageCopy] = []
        while self._waiting:
            copy = self._waiting[0]
            while copy.next < len(copy.save.token_ids) and (page := self._place(copy)) is not None:
                pages.append((copy, page))
            if copy.next < len(copy.save.token_ids):
                break
            whole.append(self._waiting.popleft())
        if pages:
            events = self._copy_stream.start([partial(self._copy, *page) for page in pages])
            for (copy, _), event in zip(pages, events, strict=True):
                copy.event = event
            self._outlet.submit(*[(page, event.synchronize) for (_, page), event in zip(pages, events, strict=True)])
        self._copied += whole  # once they were started: what has no event would count as copied

    def _place(self, copy: _PageCopy) -> Page | None:
        """The next page, with its place in the ring; None where there is no room now."""
        tokens = copy.save.token_ids
        total, start = len(tokens), copy.next
        index = start // self.plan.segment_tokens
        segment_start = index * self.plan.segment_tokens
        segment_stop = min(segment_start + self.plan.segment_tokens, total)
        stop = min(start + self.plan.page_tokens, segment_stop)
        segment = Segment(
            key=copy.save.key,
            index=index,
            start=segment_start,
            stop=segment_stop,
            total=total,
            row=copy.save.row,
            sample_hash=copy.sample_hash,
            source=copy.source,
            meta=copy.save.meta,
            attached=copy.save.attached if index == 0 else {},
            name=copy.save.name,
            metadata=copy.save.metadata,
        )
        if start == 0 and not self._outlet.admit(segment):
            return None
        offset = self._outlet.ring.allocate(self._nbytes(copy, start, stop))
        if offset is None:
            return None
        copy.next = stop
        return Page(
            segment=segment,
            start=start,
            stop=stop,
            chunk_tokens=self.plan.page_tokens,
            layer_ids=copy.layer_ids,
            dtype=str(copy.dtype).removeprefix("torch."),
            shape=self._shape(copy, start, stop),
            order="LTH" if copy.rows else self._order,
            token_ids=tokens[start:stop],
            offset=offset,
        )

    def _copy(self, copy: _PageCopy, page: Page) -> None:
        """Into its place, beside the steps: on their thread where the cache is on a device, else on another one."""
        places = copy.places
        if not copy.save.mean_of:
            grain = 1 if copy.rows else self._block_size
            places = places[page.start // grain : -(-page.stop // grain)]
        places = to_device(places, self._cache.device)
        out = self._memory[page.offset : page.offset + page.nbytes].view(copy.dtype).view(page.shape)
        if copy.save.mean_of:
            out.copy_(mean_rows(self._cache, places, copy.layers), non_blocking=True)
        elif copy.rows:
            gather_rows(self._cache, places, copy.layers, out)
        else:
            gather(self._cache, places, out, page.order)


def pin(memory: torch.Tensor) -> None:
    """Page-lock host memory that torch did not allocate, so that device copies into it need no staging.

    Raises:
        RuntimeError: CUDA refused (often: the limit of locked memory).
    """
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code != 0:
        raise RuntimeError(
            f"cudaHostRegister of {memory.numel()} bytes failed with error {code}: lower in_flight_bytes or raise the "
            "limit of locked memory (ulimit -l)"
        )


def unpin(memory: torch.Tensor) -> None:
    """Undo ``pin``. Host memory that is given back while it is registered stays so, for whoever gets its addresses."""
    code = int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
    if code != 0:
        log.warning("cudaHostUnregister of %d bytes failed with error %d", memory.numel(), code)
