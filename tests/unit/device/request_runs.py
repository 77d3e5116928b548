"""Requests through the worker half on a device.

The model writes known numbers, the scheduler reuses blocks at once, and the writers read pages as late as the ring
allows. The same program runs on the simulated device and on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from hsx_dist.connector.columns import Column
from hsx_dist.connector.gather import Order, to_device
from hsx_dist.connector.outlet import Outlet
from hsx_dist.connector.point_copier import hidden_states_in
from hsx_dist.connector.step import Save, Step
from hsx_dist.connector.worker import WorkerHalf
from hsx_dist.page import Page
from hsx_dist.transport.local_end import LocalEnd

LAYERS, BLOCK, HIDDEN = 3, 4, 8
CACHE_BLOCKS = 40
PAGE_BYTES = 2 * BLOCK * LAYERS * HIDDEN * 4  # two blocks
#: Tokens per step.
CHUNK = 24
LAYER_IDS = (1, 2, 3)


class WrongNumbers(AssertionError):
    """A stored state differs from the model's."""


class Backend(Protocol):
    """A device to run on."""

    def put(self, host: torch.Tensor) -> torch.Tensor:
        """``host`` in the device's memory."""

    def before_forward(self) -> None:
        """Make the model's stream late."""

    def stuck(self) -> None:
        """Let the device progress: the host can do nothing until it does."""

    def stalled(self) -> int:
        """How often the host has waited for a copy."""


@dataclass
class Request:
    name: str
    number: int
    tokens: int
    positions: Any = None
    layers: tuple[int, ...] | None = None
    mean: bool = False
    blocks: list[int] = field(default_factory=list)
    computed: int = 0

    def states(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """float32 ``[LAYERS, stop - start, HIDDEN]``: every number identifies its request, token, layer and channel."""
        token = np.arange(start, stop)[None, :, None]
        layer, channel = np.arange(LAYERS)[:, None, None], np.arange(HIDDEN)[None, None]
        return (((self.number * 128 + token) * LAYERS + layer) * HIDDEN + channel).astype(np.float32)

    def expected(self) -> np.ndarray[Any, Any]:
        states = self.states(0, self.tokens)
        if self.positions is not None:
            states = states[:, np.asarray(self.positions)]
        if self.layers is not None:
            states = states[list(self.layers)]
        return states.mean(axis=1, keepdims=True, dtype=np.float64).astype(np.float32) if self.mean else states

    def save(self) -> Save:
        stored = np.arange(self.tokens) if self.positions is None else np.asarray(self.positions)
        made = Save(
            request_id=self.name,
            key=self.name,
            token_ids=stored.astype(np.int64),
            block_ids=np.asarray(self.blocks, np.int64),
            owner=0,
            positions=self.positions,
            columns=(Column(layers=self.layers),),
        )
        if not self.mean:
            return made
        ids = {"request_token_ids": np.arange(self.tokens, dtype=np.int32)}
        return replace(made, token_ids=np.array([-1], np.int64), mean_of=self.tokens, attached=ids)


def requests(seed: int, count: int = 16) -> list[Request]:
    """Requests of random lengths. Some store only a few tokens or layers, or the mean."""
    rng = np.random.default_rng(seed)
    made = []
    for n in range(count):
        tokens = int(rng.integers(1, 61))
        r = Request(f"r{n}", n + 1, tokens)
        kind = rng.integers(0, 6)
        if kind == 1:
            r.positions = range(0, tokens, 2)
        elif kind == 2:
            r.positions = np.sort(rng.choice(tokens, size=(tokens + 1) // 2, replace=False))
        elif kind == 3:
            r.layers = (2, 0)
        elif kind == 4:
            r.mean = True
        made.append(r)
    return made


class LateReader:
    """A ``Sender`` that keeps pages, and reads a page only on ``read``."""

    def __init__(self) -> None:
        self.kept: list[tuple[Page, Callable[[Page], None]]] = []
        self.found: dict[str, dict[int, np.ndarray[Any, Any]]] = {}

    def send(self, pages: Sequence[Page], release: Callable[[Page], None]) -> None:
        self.kept += [(page, release) for page in pages]

    def read(self) -> bool:
        """Read the oldest page, and return its ring slot. False if there is no page."""
        if not self.kept:
            return False
        page, release = self.kept.pop(0)
        axis = 1 if page.order == "LTH" else 0
        rows = page.data.view(np.float32)
        rows = rows[:, : page.num_tokens] if axis else rows[: page.num_tokens].swapaxes(0, 1)
        self.found.setdefault(page.segment.key, {})[page.start] = rows.copy()
        release(page)
        return True

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class Run:
    """Steps of an engine. Blocks that ``worker`` reports as finished are used by the next request at once."""

    def __init__(self, backend: Backend, wanted: Sequence[Request], *, order: Order = "LTH", ring_pages: int = 4):
        self.backend = backend
        self.wanted = list(wanted)
        size = LAYERS * BLOCK * HIDDEN
        inner = (BLOCK * HIDDEN, HIDDEN) if order == "LTH" else (HIDDEN, LAYERS * HIDDEN)
        memory = backend.put(torch.full((CACHE_BLOCKS * size,), -1.0))
        self.cache = memory.as_strided((CACHE_BLOCKS, LAYERS, BLOCK, HIDDEN), (size, *inner, 1))
        self.reader = LateReader()
        self.outlet = Outlet(LocalEnd(self.reader, ring_pages * PAGE_BYTES))
        self.worker = WorkerHalf(
            [hidden_states_in(self.cache, LAYER_IDS)], self.outlet, page_bytes=PAGE_BYTES, segment_bytes=2 * PAGE_BYTES
        )
        self.free = list(range(1, CACHE_BLOCKS))  # vLLM reserves block 0
        self.waiting, self.running = list(self.wanted), list[Request]()
        self.held: dict[str, Request] = {}
        self.reported: list[str] = []
        self.host_waits = 0

    def run(self, *, ended: Sequence[Request] = (), drive: Callable[[Run], None] = lambda _: None) -> None:
        """Run until everything is stored. ``drive`` is called after each step. ``ended``: requests of the step before.

        Raises:
            WrongNumbers: a state differs.
        """
        ended = list(ended)
        deadline = time.monotonic() + 120
        while self.waiting or self.running or self.held or ended or self.outlet.pending or self.reader.kept:
            assert time.monotonic() < deadline, f"expected progress, got {len(self.held)} requests that hold blocks"
            before = (len(self.reported), len(self.running), len(self.waiting), len(self.reader.kept))
            ended = self.step(ended)
            drive(self)
            after = (len(self.reported), len(self.running), len(self.waiting), len(self.reader.kept))
            # Like an engine with nothing to schedule: device and writers are forced to progress only now.
            if before == after and not self.reader.read():
                self.backend.stuck()
                time.sleep(1e-4)  # for the shipping thread
        self.close()
        self.check()

    def step(self, ended: list[Request]) -> list[Request]:
        """Run one step. Returns the requests that it ended."""
        meta = Step(saves=[r.save() for r in ended], idle=not (self.waiting or self.running))
        self.worker.begin(meta)
        self.admit()
        now = self.forward()
        before = self.backend.stalled()
        self.worker.step(meta)
        finished = self.worker.finished()
        self.host_waits += self.backend.stalled() - before
        for name in sorted(finished):
            self.reported.append(name)
            self.free += self.held.pop(name).blocks
        self.held |= {r.name: r for r in now}
        return now

    def admit(self) -> None:
        while self.waiting and len(self.free) >= -(-self.waiting[0].tokens // BLOCK):
            request = self.waiting.pop(0)
            # The blocks freed last are taken first.
            request.blocks = [self.free.pop() for _ in range(-(-request.tokens // BLOCK))]
            self.running.append(request)

    def forward(self) -> list[Request]:
        """Queue the model's writes. Returns the requests whose last token is in them."""
        if self.running:
            self.backend.before_forward()
        left, ended = CHUNK, []
        for request in list(self.running):
            stop = min(request.computed + left, request.tokens)
            if stop > request.computed:
                self.write(request, request.computed, stop)
                left -= stop - request.computed
                request.computed = stop
            if stop == request.tokens:
                self.running.remove(request)
                ended.append(request)
        return ended

    def write(self, request: Request, start: int, stop: int) -> None:
        at = torch.arange(start, stop)
        blocks = to_device(torch.tensor(request.blocks)[at // BLOCK], self.cache.device)
        offsets = to_device(at % BLOCK, self.cache.device)
        states = torch.from_numpy(request.states(start, stop)).transpose(0, 1).contiguous()
        self.cache[blocks, :, offsets] = to_device(states, self.cache.device)

    def close(self) -> None:
        self.worker.close()
        self.outlet.close()

    def check(self) -> None:
        """Check that every request is stored once, with its numbers."""
        names = [r.name for r in self.wanted]
        if sorted(self.reported) != sorted(names):
            raise WrongNumbers(f"expected each request to be reported finished once, got {sorted(self.reported)}")
        for request in self.wanted:
            pages = sorted(self.reader.found.get(request.name, {}).items())
            got = np.concatenate([rows for _, rows in pages], axis=1) if pages else np.empty(0)
            expected = request.expected()
            if got.shape != expected.shape or not np.array_equal(got, expected):
                raise WrongNumbers(f"{request.name}: expected the model's states, got others")
