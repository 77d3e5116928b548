"""Ways to copy blocks of a device's cache into pinned host memory. On a CPU, for tests, these are plain copies."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.null_sender import NullSender
from hsx_dist.connector.gather import Order
from hsx_dist.connector.outlet import Outlet
from hsx_dist.connector.point_copier import hidden_states_in
from hsx_dist.connector.step import Save, Step
from hsx_dist.connector.worker import WorkerHalf
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.transport.local_end import LocalEnd
from hsx_dist.writers.base import Sender

DTYPE = torch.bfloat16
BLOCK = 16
#: Defaults of ``ConnectorConfig``, which has dependencies that this module must not need.
PAGE_BYTES = 8 << 20
SEGMENT_BYTES = 64 << 20


@dataclass(frozen=True)
class Shape:
    """Shape of one request's states in the cache of one rank.

    Under tensor parallelism every rank has all the states, and ships each ``tp``-th request whole. So the shape does
    not depend on ``tp``.
    """

    model: str
    layers: int
    hidden: int
    tokens: int
    order: Order
    tp: int = 1

    @property
    def blocks(self) -> int:
        return -(-self.tokens // BLOCK)

    @property
    def block_bytes(self) -> int:
        return BLOCK * self.layers * self.hidden * DTYPE.itemsize

    @property
    def request_bytes(self) -> int:
        return self.blocks * self.block_bytes


class Cache:
    """A cache of ``blocks`` blocks, ``[blocks, layers, BLOCK, hidden]`` in the shape's memory order."""

    def __init__(self, shape: Shape, blocks: int, device: torch.device):
        self.shape, self.device = shape, device
        run = BLOCK * shape.hidden
        size = run * shape.layers
        self.memory = torch.randint(-9999, 9999, (blocks * size,), dtype=torch.int16, device=device).view(DTYPE)
        strides = (run, shape.hidden) if shape.order == "LTH" else (shape.hidden, shape.layers * shape.hidden)
        self.view = self.memory.as_strided((blocks, shape.layers, BLOCK, shape.hidden), (size, *strides, 1))
        self.blocks = blocks

    def requests(self, count: int) -> Iterator[torch.Tensor]:
        """Random block ids of ``count`` requests: int64 on the host, without duplicates in a request."""
        for _ in range(count):
            yield torch.randperm(self.blocks)[: self.shape.blocks]


class Ways:
    """The compared copies. ``sender`` receives our pages."""

    def __init__(self, cache: Cache, ring_bytes: int, sender: Sender | None = None):
        self.cache = cache
        self.cuda = cache.device.type == "cuda"
        self.stream = torch.cuda.Stream(cache.device) if self.cuda else None
        self._outlet = Outlet(LocalEnd(sender or NullSender(), ring_bytes))
        self._worker = WorkerHalf(
            [hidden_states_in(cache.view, tuple(range(cache.shape.layers)))],
            self._outlet,
            page_bytes=PAGE_BYTES,
            segment_bytes=SEGMENT_BYTES,
        )
        #: Size of our pages, in elements.
        self.page = self._worker.plans[HIDDEN_STATES].page_tokens * cache.shape.layers * cache.shape.hidden
        self._host = torch.from_numpy(self._outlet.memory).view(DTYPE)
        self._ids = np.arange(cache.shape.tokens, dtype=np.int64)

    @property
    def copied_bytes(self) -> int:
        """Bytes of our pages that have left the ring so far."""
        return int(self._outlet.meter.sums().get(("page_bytes", ""), 0))

    @property
    def host_seconds(self) -> tuple[float, float]:
        """(seconds that the steps' thread spent to start our copies, number of our pages that have left the ring)."""
        sums = self._outlet.meter.sums()
        return float(sums.get(("copy_seconds", ""), 0)), float(sums.get(("pages", ""), 0))

    def close(self) -> None:
        """Free the pinned memory."""
        self._worker.close()
        self._outlet.close()

    def on_side(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def apart(self) -> AbstractContextManager[Any]:
        """Give the thread an empty current stream. Copies wait for work queued on the current stream, which in an
        engine is the model's own steps."""
        return torch.cuda.stream(torch.cuda.Stream(self.cache.device)) if self.cuda else nullcontext()

    def ours(self, requests: Sequence[torch.Tensor]) -> None:
        """Copy with the connector's worker half, page by page into the ring, which a thread empties.

        Steps follow each other without a model. Returns when all requests' blocks are free and the ring is empty.
        """
        saves = [
            Save(request_id=str(i), key=str(i), token_ids=self._ids, block_ids=ids.numpy(), owner=0)
            for i, ids in enumerate(requests)
        ]
        self._worker.step(Step(saves=saves, idle=True))
        self._worker.finished()
        while self._worker.pending:
            self._worker.step(Step(idle=True))
            self._worker.finished()
        while self._outlet.pending:
            time.sleep(1e-4)

    def reference(self, requests: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copy as vLLM's ExampleHiddenStatesConnector does: advanced indexing of a whole request on the device, then a
        copy into a new pinned tensor. Returns the last request's states, ``[tokens, layers, hidden]``."""
        host = torch.empty(0)
        before: list[torch.Tensor] = []
        with self.on_side():
            for ids in requests:
                slots = (torch.arange(BLOCK)[None] + ids[:, None] * BLOCK).flatten()
                slots = slots.to(self.cache.device, non_blocking=True)
                found = self.cache.view[slots // BLOCK, :, slots % BLOCK][: self.cache.shape.tokens]
                host = torch.empty(found.shape, dtype=DTYPE, pin_memory=self.cuda)
                host.copy_(found, non_blocking=True)
                before = [*before[-1:], host]  # keeps two tensors: vLLM writes one to disk while it copies the next
        self.synchronize()
        return host

    def limit(self, nbytes: int) -> None:
        """Copy ``nbytes`` in contiguous runs into the same pinned memory: the limit of the bus."""
        memory, slots = self.cache.memory, self._host.numel() // self.page
        with self.on_side():
            at, left = 0, nbytes // DTYPE.itemsize
            while left > 0:
                n = min(left, self.page)
                if at + n > memory.numel():
                    at = 0
                slot = (left // self.page) % slots * self.page
                self._host[slot : slot + n].copy_(memory[at : at + n], non_blocking=True)
                at, left = at + n, left - n
        self.synchronize()

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()
