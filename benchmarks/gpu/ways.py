"""Ways from blocks of a device's cache into pinned host memory. On a CPU all of it is plain copies, for the tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hsx_dist.connector.gather import Order, cache_order, gather, page_shape, to_device

DTYPE = torch.bfloat16
BLOCK = 16
#: As ``connector/worker.py`` has it: a page, and the most of one layer in it.
PAGE_BYTES = 8 << 20
LAYER_BYTES = 1 << 20


@dataclass(frozen=True)
class Shape:
    """What one request holds in the cache of one rank.

    Under tensor parallelism every rank has all the states, and ships every ``tp``-th request whole: a request looks the
    same, and a rank has one of ``tp`` to copy.
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

    @property
    def page_blocks(self) -> int:
        return max(1, min(PAGE_BYTES // self.block_bytes, LAYER_BYTES // (BLOCK * self.hidden * DTYPE.itemsize)))


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
        """Block ids of ``count`` requests, int64 on the host, no two alike and none in order."""
        for _ in range(count):
            yield torch.randperm(self.blocks)[: self.shape.blocks]


class Ways:
    """The copies that are compared, with the buffers that they reuse."""

    def __init__(self, cache: Cache, ring_bytes: int):
        self.cache = cache
        self.cuda = cache.device.type == "cuda"
        self.stream = torch.cuda.Stream(cache.device) if self.cuda else None
        self.page_elements = cache.shape.page_blocks * cache.shape.block_bytes // DTYPE.itemsize
        self.ring = [
            torch.zeros(self.page_elements, dtype=DTYPE, pin_memory=self.cuda)
            for _ in range(max(2, ring_bytes // (self.page_elements * DTYPE.itemsize)))
        ]

    def on_side(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def event(self) -> Any:
        if self.stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def ours(self, requests: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Page by page into the ring; a slot is used again once its last copy is done. The last request's pages, as
        views on the ring (whole only where the ring holds a request)."""
        order, shape = cache_order(self.cache.view), self.cache.shape
        done: deque[Any] = deque()
        used = 0
        pages: list[torch.Tensor] = []
        with self.on_side():
            for ids in requests:
                places, pages = to_device(ids, self.cache.device), []
                for start in range(0, len(ids), shape.page_blocks):
                    if len(done) == len(self.ring) and (copied := done.popleft()) is not None:
                        copied.synchronize()  # the shipping thread's wait
                    some = places[start : start + shape.page_blocks]
                    dims = page_shape(self.cache.view, len(some), order)
                    page = self.ring[used % len(self.ring)][: dims[0] * dims[1] * dims[2]].view(dims)
                    gather(self.cache.view, some, page, order)
                    done.append(self.event())
                    pages.append(page)
                    used += 1
        self.synchronize()
        return pages

    def reference(self, requests: Sequence[torch.Tensor]) -> torch.Tensor:
        """As vLLM's ExampleHiddenStatesConnector does: fancy indexing of a whole request on the device, and a fresh
        pinned tensor for it. The last request's states, ``[tokens, layers, hidden]``."""
        host = torch.empty(0)
        before: list[torch.Tensor] = []
        with self.on_side():
            for ids in requests:
                slots = (torch.arange(BLOCK)[None] + ids[:, None] * BLOCK).flatten()
                slots = slots.to(self.cache.device, non_blocking=True)
                found = self.cache.view[slots // BLOCK, :, slots % BLOCK][: self.cache.shape.tokens]
                host = torch.empty(found.shape, dtype=DTYPE, pin_memory=self.cuda)
                host.copy_(found, non_blocking=True)
                before = [*before[-1:], host]  # one is being written to disk while the next is copied
        self.synchronize()
        return host

    def limit(self, nbytes: int) -> None:
        """As many bytes of one contiguous run after another into pinned memory: what the bus gives."""
        with self.on_side():
            at, left = 0, nbytes // DTYPE.itemsize
            while left > 0:
                n = min(left, self.page_elements)
                if at + n > self.cache.memory.numel():
                    at = 0
                slot = self.ring[(left // self.page_elements) % len(self.ring)]
                slot[:n].copy_(self.cache.memory[at : at + n], non_blocking=True)
                at, left = at + n, left - n
        self.synchronize()

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()
