"""Where the worker half puts pages: an ``Outlet`` owns the ring and takes pages off it on a thread of its own.

Steps only ever call ``allocate`` and ``submit``, which take no lock that a writer or the network holds.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from hsx_dist.connector.ring import Ring
from hsx_dist.page import CARRIER, Page, Segment
from hsx_dist.writers.base import Sender

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PageRef:
    """A page that lies in a ring: ``Page`` with a place instead of its data. Crosses process borders."""

    offset: int
    shape: tuple[int, int, int]
    segment: Segment
    start: int
    stop: int
    chunk_tokens: int
    layer_ids: tuple[int, ...]
    dtype: str
    order: Literal["LTH", "TLH"]
    token_ids: np.ndarray[Any, Any]

    @property
    def nbytes(self) -> int:
        a, b, c = self.shape
        return a * b * c * np.dtype(CARRIER[self.dtype]).itemsize

    @property
    def last(self) -> bool:
        """The last page of its sample."""
        return self.stop == self.segment.total

    def page(self, memory: np.ndarray[Any, Any]) -> Page:
        """The page as a view on the ring's ``memory`` (uint8)."""
        data = memory[self.offset : self.offset + self.nbytes].view(CARRIER[self.dtype]).reshape(self.shape)
        return Page(
            segment=self.segment,
            start=self.start,
            stop=self.stop,
            chunk_tokens=self.chunk_tokens,
            layer_ids=self.layer_ids,
            dtype=self.dtype,
            hidden_size=self.shape[2],
            order=self.order,
            token_ids=self.token_ids,
            data=data,
        )


@dataclass(frozen=True, slots=True)
class Shipped:
    """Every page of ``key`` has been handed to the writers, or (``reason``) nothing of it is stored."""

    key: str
    reason: str | None = None


class Outlet(Protocol):
    """What the worker half sees."""

    ring: Ring
    memory: np.ndarray[Any, Any]  # uint8 [ring.capacity]

    def submit(self, ref: PageRef, ready: Callable[[], None] | None) -> None:
        """Ship a page; ``ready`` blocks until its copy into the ring is done. Returns at once."""
        ...

    def skip(self, key: str, reason: str) -> None:
        """Tell that nothing of ``key`` will be shipped. Returns at once."""
        ...

    def close(self) -> None: ...


#: How many bytes of pages travel in one call to a writer, at most (a single page may be larger).
COALESCE_BYTES = 8 << 20


class LocalOutlet:
    """Ships from this process, through a ``Sender``."""

    def __init__(
        self,
        sender: Sender,
        in_flight_bytes: int,
        on_shipped: Callable[[Shipped], None] = lambda _: None,
        memory: np.ndarray[Any, Any] | None = None,
    ):
        self.ring = Ring(in_flight_bytes)
        # Touch the memory once, here: page faults in the step path cost three times the copy.
        self.memory = np.zeros(self.ring.capacity, np.uint8) if memory is None else memory
        self.memory.fill(0)
        self._sender = sender
        self._on_shipped = on_shipped
        self._queue: queue.SimpleQueue[tuple[PageRef, Callable[[], None] | None] | Shipped | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=ship, args=(self._queue, self._ship), name="hsx-ship", daemon=True)
        self._thread.start()

    def submit(self, ref: PageRef, ready: Callable[[], None] | None) -> None:
        self._queue.put((ref, ready))

    def skip(self, key: str, reason: str) -> None:
        self._queue.put(Shipped(key, reason))

    def _ship(self, refs: list[PageRef], told: list[Shipped]) -> None:
        if refs:
            offsets: dict[int, int] = {}
            pages = []
            for ref in refs:
                page = ref.page(self.memory)
                offsets[id(page)] = ref.offset
                pages.append(page)
            self._sender.send(pages, lambda p: self.ring.free(offsets[id(p)]))
        for shipped in told:
            self._on_shipped(shipped)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self._sender.flush()


def ship(
    source: queue.SimpleQueue[tuple[PageRef, Callable[[], None] | None] | Shipped | None],
    deliver: Callable[[list[PageRef], list[Shipped]], None],
) -> None:
    """Body of a shipping thread: takes what is there, up to ``COALESCE_BYTES``, and delivers it in order."""
    # The thread may be born of one that vLLM has pinned to the engine's cores; shipping belongs on any core.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    ended = False
    while not ended:
        item = source.get()
        refs: list[PageRef] = []
        told: list[Shipped] = []
        nbytes = 0
        while True:
            if item is None:
                ended = True
                break
            if isinstance(item, Shipped):
                told.append(item)
            else:
                ref, ready = item
                if ready is not None:
                    ready()
                refs.append(ref)
                nbytes += ref.nbytes
                if ref.last:
                    told.append(Shipped(ref.segment.key))
            if nbytes >= COALESCE_BYTES:
                break
            try:
                item = source.get_nowait()
            except queue.Empty:
                break
        try:
            deliver(refs, told)
        except Exception:
            log.exception("%d pages were not shipped", len(refs))


_REGISTERED: dict[str, Outlet] = {}


def register(name: str, outlet: Outlet) -> None:
    """Make an outlet known to an engine that will be started in this process (``via="process"``)."""
    _REGISTERED[name] = outlet


def unregister(name: str) -> None:
    _REGISTERED.pop(name, None)


def registered(name: str) -> Outlet:
    return _REGISTERED[name]
