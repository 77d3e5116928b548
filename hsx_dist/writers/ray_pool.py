"""A pool of Ray actors: pages travel through the object store of the node, as arrays, many to a call."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from hsx_dist.errors import HsxError
from hsx_dist.page import Page, Segment
from hsx_dist.store import open_store
from hsx_dist.store.opening import Backend
from hsx_dist.writers.sink import Event, Lost, PartSink, SinkOptions

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WriterSpec:
    """What a writer actor needs. ``environment`` carries credentials: actor arguments are shown nowhere, while a
    ``runtime_env`` stands on Ray's dashboard."""

    output: str
    storage_options: Mapping[str, Any]
    backend: Backend
    retry_seconds: float
    environment: Mapping[str, str]
    options: SinkOptions


class WriterActor:
    """One writer. ``add_pages`` answers when the pages are encoded: the answer is the credit coming back."""

    def __init__(self, spec: WriterSpec):
        os.environ.update(spec.environment)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        store = open_store(spec.output, spec.storage_options, backend=spec.backend, retry_seconds=spec.retry_seconds)
        self._sink = PartSink(store, spec.options, self._events.put)

    @ray.method(concurrency_group="control")
    def name(self) -> str:
        return self._sink.name

    def add_pages(self, pages: Sequence[Page]) -> str | None:
        """None when all were taken, else why not (a dead sink has told by ``events`` what it lost)."""
        try:
            for page in pages:
                self._sink.add(page)
        except (HsxError, ValueError) as e:
            return f"{type(e).__name__}: {e}"
        return None

    @ray.method(concurrency_group="control")
    def flush(self) -> None:
        self._sink.flush()

    @ray.method(concurrency_group="control")
    def events(self, timeout: float) -> list[Event]:
        """What happened since the last call; waits up to ``timeout`` seconds for something to happen."""
        found: list[Event] = []
        try:
            found.append(self._events.get(timeout=timeout))
            while True:
                found.append(self._events.get_nowait())
        except queue.Empty:
            return found


def start_writer(spec: WriterSpec, *, node_id: str, num_cpus: float, threads: int, name: str) -> Any:
    """An actor pinned to a node, restarted for ever; ``threads`` calls encode at once."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return (
        ray.remote(concurrency_groups={"control": 4})(WriterActor)
        .options(
            name=name,
            num_cpus=num_cpus,
            max_restarts=-1,
            max_concurrency=threads,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(spec)
    )


class RaySender:
    """Sends from one replica to the writers of its node (or, where there is none, to all), never more than
    ``credit_bytes`` unanswered a writer."""

    def __init__(self, writers: Sequence[tuple[str, Any]], credit_bytes: int, on_lost: Callable[[Lost], None]):
        """``writers``: (node id, actor handle). ``credit_bytes``: this sender's share of what a writer can hold."""
        here = ray.get_runtime_context().get_node_id()
        local = [actor for node, actor in writers if node == here]
        self._writers = local or [actor for _, actor in writers]
        self._credit = credit_bytes
        self._on_lost = on_lost
        self._unanswered: list[dict[Any, tuple[int, tuple[Segment, ...]]]] = [{} for _ in self._writers]
        self._route: dict[tuple[str, int], int] = {}
        self._turn = 0
        # ``flush`` comes from another thread than ``send``.
        self._lock = threading.Lock()

    def send(self, pages: Sequence[Page], release: Callable[[Page], None]) -> None:
        try:
            with self._lock:
                for writer, batch in self._routed(pages).items():
                    self._send_to(writer, batch)
        finally:
            for page in pages:
                release(page)

    def _send_to(self, writer: int, batch: list[Page]) -> None:
        nbytes = sum(p.nbytes for p in batch)
        self._settle(writer, self._credit - nbytes)
        segments = tuple(dict.fromkeys(p.segment for p in batch))
        # Ray copies the arrays into its object store before .remote() returns: then the ring may reuse them.
        ref = self._writers[writer].add_pages.remote(batch)
        self._unanswered[writer][ref] = (nbytes, segments)

    def _routed(self, pages: Sequence[Page]) -> dict[int, list[Page]]:
        """Pages by writer: a segment's pages all go to one, segments in turn."""
        batches: dict[int, list[Page]] = {}
        for page in pages:
            key = (page.segment.key, page.segment.index)
            if key not in self._route:
                self._route[key] = self._turn
                self._turn = (self._turn + 1) % len(self._writers)
            batches.setdefault(self._route[key], []).append(page)
            if page.stop == page.segment.stop:
                del self._route[key]
        return batches

    def _settle(self, writer: int, room: int) -> None:
        """Take answers until at most ``room`` bytes are unanswered (or none: one batch may exceed the credit)."""
        unanswered = self._unanswered[writer]
        while unanswered and sum(n for n, _ in unanswered.values()) > max(room, 0):
            done, _ = ray.wait(list(unanswered), num_returns=1)
            for ref in done:
                _, segments = unanswered.pop(ref)
                try:
                    refused = ray.get(ref)
                except RayError as e:
                    refused = f"writer died: {type(e).__name__}"
                if refused is not None:
                    self._on_lost(Lost(segments, refused))

    def flush(self) -> None:
        with self._lock:
            for writer in range(len(self._writers)):
                self._settle(writer, 0)

    def close(self) -> None:
        self.flush()
