"""Worker half: copies finished requests' blocks into the ring, page by page, and reports when vLLM may reuse them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from uuid import uuid4

import torch

from hsx_dist.connector.columns import CapturedPoint
from hsx_dist.connector.copy_stream import copy_stream_for
from hsx_dist.connector.outlet import Outlet
from hsx_dist.connector.point_copier import ColumnCopy, CopyPlan, PointCopier
from hsx_dist.connector.step import Expect, Save, Skip, Step
from hsx_dist.format.markers import OBJECT
from hsx_dist.logger import get_logger
from hsx_dist.page import Page, object_name, token_hash
from hsx_dist.text import bounded, shown_error

_R = TypeVar("_R", Expect, Skip)

log = get_logger(__name__)

#: Seconds that a step without tokens waits for the ring, so that an idle engine does not spin.
IDLE_WAIT_S = 0.002


@dataclass(slots=True)
class _Held:
    """A request whose blocks are held until all its columns are copied."""

    blocks: int
    copies: int


class WorkerHalf:
    """State of the connector in one worker rank that stores samples. Its steps have only this rank's requests."""

    def __init__(
        self,
        caches: Sequence[tuple[CapturedPoint, torch.Tensor]],
        outlet: Outlet,
        *,
        page_bytes: int,
        segment_bytes: int,
    ):
        """``caches``: each captured point and its cache ``[blocks, layers, block_size, width]``."""
        self._outlet = outlet
        self._memory = torch.from_numpy(outlet.memory)
        sizes = {"ring_bytes": outlet.ring.capacity, "page_bytes": page_bytes, "segment_bytes": segment_bytes}
        self._points = {point.name: PointCopier(point, cache, self._memory, **sizes) for point, cache in caches}
        first = caches[0][1]
        self._copy_stream = copy_stream_for(first)
        self._pinned = first.is_cuda and not self._memory.is_pinned()
        if self._pinned:
            pin(self._memory)
        self._followed = False  # copies of this step's saves wait for the model's earlier steps
        self._waiting: deque[ColumnCopy] = deque()  # columns with pages not yet started, oldest first
        self._copied: list[ColumnCopy] = []  # columns whose copies are all started, but not all done
        self._held: dict[str, _Held] = {}  # by request id
        self._refused: set[str] = set()  # requests whose copy could not be planned: vLLM may reuse their blocks at once
        self._meter = outlet.meter
        self._meter.watch("blocks_held", lambda: self.blocks_held)

    @property
    def plans(self) -> dict[str, CopyPlan]:
        """Plan of each point, by name."""
        return {name: copier.plan for name, copier in self._points.items()}

    def begin(self, meta: Step) -> None:
        """Accept the requests that ended since the last step. Then prepare this step before the model runs.

        Queues its lock files, and lets copies wait for earlier steps only. A key is free when its request has ended, so
        another request may use it in the same step.
        """
        self._each(self._outlet.skip, meta.skipped)
        self._each(self._outlet.expect, meta.expected)
        if meta.saves:
            self._follow()

    def _follow(self) -> None:
        """Make copies wait for the steps that wrote their states.

        Called before this step's model run is queued. Otherwise copies would wait for that run too, and hold their
        blocks for longer.
        """
        self._copy_stream.follow()
        self._followed = True

    def step(self, meta: Step) -> None:
        """Copy as many pages as the ring can hold.

        vLLM's calls after ``begin`` may have any order: an earlier step wrote the states of a finished request.
        """
        self._outlet.prepared()  # before this step's answers are sent: their readers rely on the lock files
        if not meta.saves and not self._waiting:
            if self._copied and meta.idle:
                self._copy_stream.wait(IDLE_WAIT_S)
            return
        before = time.monotonic()
        if meta.saves and not self._followed:
            self._follow()
        self._followed = False
        for save in meta.saves:
            self._waiting.extend(self._planned(save))
        self._pump()
        copied = time.monotonic()
        self._meter.add("copy_seconds", copied - before)
        if self._waiting and meta.idle:
            self._outlet.ring.wait(IDLE_WAIT_S)
            self._meter.add("store_wait_seconds", time.monotonic() - copied)

    def _each(self, call: Callable[[_R], None], requests: Sequence[_R]) -> None:
        """Call ``call`` for each request. Logs an error instead of raising, which would end the engine's step."""
        for request in requests:
            try:
                call(request)
            except Exception:
                log.exception("request %s failed in the connector; its sample may be missing", request.request_id)

    def _planned(self, save: Save) -> list[ColumnCopy]:
        """Plan the copies of this rank's columns of a request.

        If this fails for one column, returns no copies. The request's blocks are then released, and it is reported as
        failed.
        """
        numbers = save.copied if save.copied is not None else tuple(range(len(save.columns)))
        try:
            sample_hash = save.sample_hash or token_hash(save.token_ids)
            source = f"{save.id or save.request_id}:{uuid4().hex[:12]}"
            copies = [self._points[save.columns[n].point].planned(save, n, sample_hash, source) for n in numbers]
        except Exception as e:
            log.exception("hidden states of %s cannot be copied", save.key)
            self._refused.add(save.request_id)
            name = save.name or object_name(save.key) + OBJECT
            why = bounded(f"the request's states cannot be copied: {shown_error(e)}")
            skip = Skip(
                save.id or save.request_id, save.key, name, save.owner, why, columns=numbers, of=len(save.columns)
            )
            self._each(self._outlet.skip, [skip])
            return []
        held = self._held.setdefault(save.request_id, _Held(0, 0))
        held.blocks += len(save.block_ids)
        held.copies += len(copies)
        return copies

    def drain(self, seconds: float) -> int:
        """Copy the waiting pages at the engine's end, for at most ``seconds``. Returns how many requests are left."""
        end = time.monotonic() + seconds
        while self._waiting and time.monotonic() < end:
            self.step(Step(idle=True))
        return len({copy.save.request_id for copy in self._waiting})

    def close(self) -> None:
        """Block until the started copies end. No copy may be started later."""
        self._copy_stream.close()
        if self._pinned:  # otherwise a later engine in the same process could not pin its memory
            unpin(self._memory)
            self._pinned = False

    def finished(self) -> set[str]:
        """Return requests whose last copy has ended since the last call. Their blocks may be reused."""
        done: set[str] = set()
        open_ones = []
        for copy in self._copied:
            if copy.event is not None and not copy.event.query():
                open_ones.append(copy)
                continue
            held = self._held[copy.save.request_id]
            held.copies -= 1
            if not held.copies:
                del self._held[copy.save.request_id]
                done.add(copy.save.request_id)
        self._copied = open_ones
        refused, self._refused = self._refused, set()
        return done | refused

    @property
    def pending(self) -> int:
        """Number of requests whose blocks are still held."""
        return len(self._held)

    @property
    def blocks_held(self) -> int:
        """Number of cache blocks that vLLM may not reuse before they are copied."""
        return sum(held.blocks for held in list(self._held.values()))  # a copied list: other threads call this too

    def _pump(self) -> None:
        """Copy as many pages as the ring can hold. Other pages' blocks stay held, and vLLM's scheduler waits for
        them."""
        groups: list[tuple[ColumnCopy, list[Page]]] = []  # each group is copied at once
        whole: list[ColumnCopy] = []
        while self._waiting:
            copy = self._waiting[0]
            pages: list[Page] = []
            while not copy.ended and (page := self._place(copy)) is not None:
                if pages and copy.copier.joins(page, pages):
                    pages.append(page)
                else:
                    pages = [page]
                    groups.append((copy, pages))
            if not copy.ended:
                break
            whole.append(self._waiting.popleft())
        if groups:
            events = self._copy_stream.start([partial(copy.copier.copy, copy, pages) for copy, pages in groups])
            for (copy, _), event in zip(groups, events, strict=True):
                copy.event = event
            started = zip(groups, events, strict=True)
            self._outlet.submit(*[(page, event.synchronize) for (_, pages), event in started for page in pages])
        self._copied += whole  # only after the start: a column without an event would count as copied

    def _place(self, copy: ColumnCopy) -> Page | None:
        """Return the next page with its offset in the ring; None if the ring is full."""
        copier = copy.copier
        if copy.next == 0 and not self._outlet.admit(copier.next_segment(copy)):
            return None
        offset = self._outlet.ring.allocate(copier.next_nbytes(copy))
        return None if offset is None else copier.next_page(copy, offset)


def pin(memory: torch.Tensor) -> None:
    """Page-lock host memory that torch did not allocate, so that device copies into it need no staging.

    Raises:
        RuntimeError: CUDA refused (often: the limit of locked memory).
    """
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code != 0:
        raise RuntimeError(
            f"cudaHostRegister of {memory.numel()} bytes failed with error {code}. Lower in_flight_bytes, or raise the "
            "limit of locked memory (ulimit -l)"
        )


def unpin(memory: torch.Tensor) -> None:
    """Undo ``pin``.

    Memory that is freed without this call stays registered. Later memory at its address then counts as registered too.
    """
    code = int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
    if code != 0:
        log.warning("cudaHostUnregister of %d bytes failed with error %d", memory.numel(), code)
