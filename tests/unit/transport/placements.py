"""A transport in each of its three placements. The writers store one object per sample into a folder."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import hsx_dist
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.observe.metrics import Meter
from hsx_dist.page import Page, Segment
from hsx_dist.store import open_store
from hsx_dist.transport.attach import AttachedEnd
from hsx_dist.transport.local_end import LocalEnd
from hsx_dist.transport.page_server import PageServer
from hsx_dist.transport.remote_sender import RemoteSender
from hsx_dist.transport.shipping import Shipped
from hsx_dist.transport.writer_process import WriterProcessSpec, spawn
from hsx_dist.writers.base import Sender
from hsx_dist.writers.events import Event, Lost
from hsx_dist.writers.sink import PartSink, SinkOptions
from hsx_dist.writers.threads import ThreadSender

LAYERS, HIDDEN = (1, 2), 8
RING = 1 << 19


def some(n: int = 5, seed: int = 0) -> np.ndarray:
    """float32 ``[L, n, H]``."""
    return np.random.default_rng(seed).standard_normal((len(LAYERS), n, HIDDEN)).astype(np.float32)


@dataclass
class Placement:
    """``meter`` counts shipped and stored pages. ``outcomes``: key → each segment's failure, None if stored."""

    folder: Path
    end: LocalEnd = field(init=False)
    meter: Meter = field(default_factory=Meter)
    outcomes: dict[str, list[str | None]] = field(default_factory=lambda: defaultdict(list))
    shipped: list[Shipped] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def on_event(self, event: Event) -> None:
        for segment in event.segments:
            self.note(segment, event.reason if isinstance(event, Lost) else None)

    def note(self, segment: Segment, why: str | None) -> None:
        with self._lock:
            self.outcomes[segment.key].append(why)

    def pages(self, key: str, states: np.ndarray, *, page_tokens: int | None = None, **extra: Any) -> Iterator[Page]:
        """A sample's pages, copied into the ring. Waits while the ring is full."""
        total = states.shape[1]
        chunk = page_tokens or total
        segment = Segment(key, 0, 0, total, total, source=f"{key}:0", **extra)
        for start in range(0, total, chunk):
            stop = min(start + chunk, total)
            rows = np.ascontiguousarray(states[:, start:stop])
            while (offset := self.end.ring.allocate(rows.nbytes)) is None:
                self.end.ring.wait(1.0)
            self.end.memory[offset : offset + rows.nbytes] = rows.reshape(-1).view(np.uint8)
            ids = np.arange(start, stop, dtype=np.int64)
            yield Page(segment, start, stop, chunk, LAYERS, "float32", rows.shape, "LTH", ids, offset=offset)

    def submit(
        self,
        key: str,
        states: np.ndarray,
        *,
        page_tokens: int | None = None,
        ready: Callable[[], None] | None = None,
        **extra: Any,
    ) -> None:
        for page in self.pages(key, states, page_tokens=page_tokens, **extra):
            self.end.submit((page, ready))

    def stored(self, key: str) -> dict[str, Any]:
        return hsx_dist.load_hidden_states(str(self.folder / f"{key}.safetensors"), framework="numpy")

    def states(self, key: str) -> np.ndarray:
        return self.stored(key)["hidden_states"].transpose(1, 0, 2)

    def wait_for(self, *keys: str) -> None:
        """Block until each key has an outcome and the whole ring is free."""
        until(lambda: set(keys) <= self.outcomes.keys() and not self.end.ring.used_bytes)


def place(offset: int, nbytes: int) -> Page:
    """A page of ``nbytes`` bytes. Its other fields do not matter."""
    segment = Segment("k", 0, 0, 1, 1)
    return Page(segment, 0, 1, 1, (1,), "float16", (1, 1, nbytes // 2), "LTH", np.zeros(1, np.int64), offset=offset)


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def options() -> SinkOptions:
    return SinkOptions(
        resolve_codec("none"), {"model": "m", "revision": None, "norm": "pre"}, "worker", layout="sample"
    )


def threads(to: Placement, wrap: Callable[[Sender], Sender]) -> Sender:
    """Writers in threads of this process."""
    return wrap(ThreadSender(PartSink(open_store(str(to.folder)), options(), to.on_event, to.meter), 2))


@contextmanager
def inline(folder: Path, wrap: Callable[[Sender], Sender] = lambda sender: sender) -> Iterator[Placement]:
    """``wrap``: applied to the sender that has the pages' data."""
    made = Placement(folder)
    made.end = LocalEnd(threads(made, wrap), RING, made.shipped.append, on_lost=made.note, meter=made.meter)
    yield made
    made.end.close(10)


@contextmanager
def attach(folder: Path, wrap: Callable[[Sender], Sender] = lambda sender: sender) -> Iterator[Placement]:
    made = Placement(folder)

    def on_shipped(shipped: Shipped) -> None:
        made.shipped.append(shipped)
        if (shipped.reason or "").startswith(("its page", "not all")):  # the writers report all others
            made.note(Segment(shipped.key, 0, 0, 1, 1), shipped.reason)

    server = PageServer(lambda: threads(made, wrap), on_shipped, meter=made.meter)
    made.end = AttachedEnd(server.address, server.key, RING)
    yield made
    made.end.close(10)
    server.close()


@contextmanager
def spawned(
    folder: Path, on_event: Callable[[Event], None] | None = None, drain_seconds: float = 4.0
) -> Iterator[Placement]:
    """``on_event``: called instead of the placement's ``on_event``."""
    made = Placement(folder)
    spec = WriterProcessSpec(str(folder), {}, options(), 2, RING, drain_seconds)
    sender = RemoteSender(
        partial(spawn, spec), RING, on_event or made.on_event, made.meter, drain_seconds=drain_seconds
    )
    made.end = LocalEnd(sender, RING, made.shipped.append, on_lost=made.note, meter=made.meter, memory=sender.memory)
    yield made
    made.end.close(10)
    sender.close()


PLACEMENTS = {"inline": inline, "attach": attach, "spawn": spawned}
