"""A pool of Ray actors. Pages are passed as arrays through the node's object store, many per call."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from hsx_dist.errors import HsxError
from hsx_dist.format.same_run import require_same_run
from hsx_dist.logger import get_logger
from hsx_dist.memory.plasma_views import PlasmaViews
from hsx_dist.observe.logs import configure_logging
from hsx_dist.observe.metrics import Increments, Meter
from hsx_dist.observe.ray_metrics import RayExport
from hsx_dist.page import Page, Segment
from hsx_dist.ray_arguments import sendable
from hsx_dist.ray_calls import remote
from hsx_dist.store import Store, open_store
from hsx_dist.store.opening import Backend
from hsx_dist.store.prefix import PrefixStore
from hsx_dist.text import bounded, shown_error
from hsx_dist.writers.base import ABROAD_BYTES, CALL_BYTES, sent_bytes
from hsx_dist.writers.credits import Credits
from hsx_dist.writers.events import Counted, Event, Lost, Unusable
from hsx_dist.writers.sink import PartSink, SinkOptions

log = get_logger(__name__)


@dataclass(frozen=True)
class PoolWriterSpec:
    """Settings of a writer actor.

    ``environment`` holds credentials. They are an actor argument, which Ray does not show; its dashboard shows a
    ``runtime_env``.
    """

    output: str
    storage_options: Mapping[str, Any]
    backend: Backend
    retry_seconds: float
    environment: Mapping[str, str]
    options: SinkOptions
    #: Limit of unacknowledged bytes of pages, for all senders together.
    credit_bytes: int = 256 << 20
    #: Values of the tags ``run`` and ``writer`` of the writer's metrics.
    tags: Mapping[str, str] = field(default_factory=dict)
    #: The run's folder in the output; empty if the run's objects are in the output itself.
    folder: str = ""
    #: ``attempt_token`` of the driver's store, which the writer compares with its own store's. None: no comparison.
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A writer's response after it encoded a call's pages.

    ``credit``: the sender's new limit of unacknowledged bytes. ``refused``: index within the call of each page that was
    not encoded, and the reason.
    """

    credit: int
    refused: Mapping[int, str] = field(default_factory=dict)


class WriterActor:
    """One writer. ``add_pages`` returns after the pages are encoded, with the sender's new credit."""

    def __init__(self, spec: PoolWriterSpec):
        os.environ.update(spec.environment)
        configure_logging(logging.INFO, **spec.tags)
        self._events: queue.SimpleQueue[Event | Counted | Unusable] = queue.SimpleQueue()
        self._credits = Credits(spec.credit_bytes)
        self._plasma_views = PlasmaViews()
        self._sink: PartSink | None = None
        self._broken = ""
        self._tags = dict(spec.tags)
        self._meter = Meter()
        self._increments = Increments(self._meter)
        self._export = RayExport(self._meter, "writer", spec.tags)
        try:
            store: Store = open_store(
                spec.output,
                spec.storage_options,
                backend=spec.backend,
                retry_seconds=spec.retry_seconds,
                on_retry=self._meter.retried,
            )
            if spec.folder:
                store = PrefixStore(store, spec.folder)
            if spec.token is not None:
                # A local path may be another disk on this node: its parts would have receipts, and no reader.
                require_same_run(store, spec.options.attempt, spec.token)
        except HsxError as e:
            # An event instead of an exception: an actor whose constructor raises is dead forever, without a reason.
            self._broken = f"node {os.uname().nodename}: {type(e).__name__}: {e}"
            self._events.put(Unusable(self._broken))
        else:
            self._sink = PartSink(store, spec.options, self._events.put, self._meter)

    @ray.method(concurrency_group="control")
    def name(self) -> str:
        """Name of the sink, different in each incarnation of the actor; empty without a sink."""
        return self._sink.name if self._sink is not None else ""

    def add_pages(self, sender: str, pages: Sequence[Page]) -> Answer:
        """Encode pages of ``sender``. A dead sink has reported its lost segments as events."""
        if self._sink is None:
            return Answer(self._credits.share(sender), dict.fromkeys(range(len(pages)), self._broken))
        refused: dict[int, str] = {}
        for i, page in enumerate(pages):
            try:
                self._plasma_views.bring(page.data)
                self._sink.add(page)
                self._plasma_views.let_go(page.data)
            except Exception as e:
                # A refused page loses only its segment: the call continues with the next page.
                if not isinstance(e, HsxError | ValueError):
                    log.exception("a page of %s was not encoded", page.segment.key)
                refused[i] = bounded(shown_error(e))
        self._plasma_views.let_go_between([page.data for page in pages])
        return Answer(self._credits.share(sender), refused)

    @ray.method(concurrency_group="control")
    def flush(self) -> None:
        if self._sink is not None:
            self._sink.flush()
        self._export.push()

    @ray.method(concurrency_group="control")
    def events(self, timeout: float) -> list[Event | Counted | Unusable]:
        """Return the events since the last call. Waits up to ``timeout`` seconds for the first one."""
        found: list[Event | Counted | Unusable] = []
        try:
            found.append(self._events.get(timeout=timeout))
            while True:
                found.append(self._events.get_nowait())
        except queue.Empty:
            pass
        if grown := self._increments.counters():
            found.append(Counted(grown))
        return found

    @ray.method(concurrency_group="control")
    def hang_up(self) -> None:
        """Wake the waiting call of ``events``.

        Otherwise the call would still run when the actor ends, and Ray's dashboard would show it as failed.
        """
        self._events.put(Counted({}))

    def __repr__(self) -> str:
        # The name of this process in Ray's log lines and on its dashboard.
        return f"hsx writer {self._tags.get('writer', '')}"


def start_writer(
    spec: PoolWriterSpec, *, node_id: str, num_cpus: float, threads: int, name: str, namespace: str | None = None
) -> Any:
    """Start a writer actor pinned to a node. Ray restarts it without limit.

    ``threads`` calls encode at once. ``namespace``: the Ray namespace of ``name``, by default the job's.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return (
        remote(WriterActor, concurrency_groups={"control": 4})
        .options(
            name=name,
            namespace=namespace,
            num_cpus=num_cpus,
            max_restarts=-1,
            max_concurrency=threads,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(sendable(spec))
    )


@dataclass(slots=True)
class _Writer:
    """A sender's view of one writer."""

    node: str
    actor: Any
    credit: int = 0
    asked: bool = False  # it has responded, with its credit
    answered: float = 0.0  # time of its last response
    unanswered: dict[Any, tuple[int, tuple[Segment, ...]]] = field(default_factory=dict)  # bytes, each page's segment
    nbytes: int = 0  # unacknowledged
    epoch: int = 0  # number of deaths
    deaths: int = 0  # number of deaths since its last response
    down_until: float = 0.0


class RaySender:
    """Sends a replica's pages to the writers of its node, or to other nodes' writers while those are down or full.

    A writer's unacknowledged bytes are at most its credit. Those of all other nodes' writers together are at most
    ``abroad_bytes``. A single page may exceed both limits. All pages of a segment go to one writer. If that writer
    dies, the rest of the segment is dropped, since no writer could complete it.
    """

    #: Limit of unacknowledged bytes at a writer until its first response states its credit.
    FIRST_CALL = 8 << 20

    def __init__(
        self,
        writers: Sequence[tuple[str, Any]],
        on_lost: Callable[[Lost], None],
        *,
        node: str | None = None,
        meter: Meter | None = None,
        abroad_bytes: int = ABROAD_BYTES,
    ):
        """``writers``: (node id, actor handle). ``node``: id of this sender's node, by default the caller's."""
        self._abroad_bytes = abroad_bytes
        self._node = ray.get_runtime_context().get_node_id() if node is None else node
        self._name = uuid.uuid4().hex
        self._on_lost = on_lost
        self._meter = Meter() if meter is None else meter
        self._meter.watch("credit_bytes", lambda: sum(w.credit for w in self._writers))
        self._meter.watch("unanswered_bytes", lambda: sum(w.nbytes for w in self._writers))
        self._writers: list[_Writer] = []
        self._route: dict[tuple[str, int, int, str], _Writer | None] = {}  # None: its writer died, the rest is dropped
        # Other threads than ``send``'s call ``flush`` and ``update``.
        self._lock = threading.Lock()
        self.update(writers)

    def update(self, writers: Sequence[tuple[str, Any]]) -> None:
        """Take the pool's new writers, after nodes joined or left. Removed writers' open segments are dropped."""
        with self._lock:
            known = {w.actor: w for w in self._writers}
            self._writers = [known.get(a) or _Writer(n, a) for n, a in writers]
            for gone in (w for w in known.values() if w not in self._writers):
                self._settle([gone], 0)
                self._abandon(gone)

    def send(self, pages: Sequence[Page], release: Callable[[Page], None]) -> None:
        try:
            with self._lock:
                for writer, batch in self._routed(pages):
                    self._send_to(writer, batch)
        finally:
            for page in pages:
                release(page)

    def flush(self) -> None:
        with self._lock:
            self._settle(self._writers, 0)

    def close(self) -> None:
        self.flush()

    # -- where pages go ------------------------------------------------------------------------------------------

    def _routed(self, pages: Sequence[Page]) -> list[tuple[_Writer, list[Page]]]:
        """Group pages by writer, in order."""
        batches: dict[int, tuple[_Writer, list[Page]]] = {}
        planned: dict[int, int] = {}
        for page in pages:
            segment = page.segment
            key = (*segment.id, segment.source)
            if key not in self._route:
                self._route[key] = self._choose(sent_bytes(page), planned)
                if self._route[key] is None:
                    self._on_lost(Lost((segment,), "there is no writer"))
            writer = self._route[key]
            if page.stop == segment.stop:
                del self._route[key]
            if writer is None:
                continue  # reported when its writer died or was removed
            batches.setdefault(id(writer), (writer, []))[1].append(page)
            planned[id(writer)] = planned.get(id(writer), 0) + sent_bytes(page)
        return list(batches.values())

    def _choose(self, nbytes: int, planned: dict[int, int]) -> _Writer | None:
        """Return the live writer of this node with the fewest bytes. If those are down or full, another node's."""
        if not self._writers:
            return None
        now = time.monotonic()

        def held(w: _Writer) -> int:
            return w.nbytes + planned.get(id(w), 0)

        def has_credit(w: _Writer) -> bool:
            if w.node != self._node and away and away + nbytes > self._abroad_bytes:
                return False
            return held(w) + nbytes <= self._limit(w) or not held(w)

        self._settle(self._writers, None)
        away = sum(map(held, self._abroad()))
        up = [w for w in self._writers if w.down_until <= now]
        here = [w for w in up if w.node == self._node]
        for candidates in (here, up):
            free = [w for w in candidates if has_credit(w)]
            if free:
                # Small calls are filled first; otherwise many writers would mean many small calls.
                small = [w for w in free if 0 < planned.get(id(w), 0) < CALL_BYTES]
                return min(small or free, key=held)
        # If all are full, waits for one of this node. If all are down, Ray keeps the call for the writer that is
        # expected back first.
        return min(here or up, key=held, default=None) or min(self._writers, key=lambda w: w.down_until)

    def _send_to(self, writer: _Writer, pages: list[Page]) -> None:
        at = 0
        while at < len(pages):
            nbytes = sent_bytes(pages[at])
            end = at + 1
            limit, abroad = self._limit(writer), writer.node != self._node
            if abroad:
                limit = min(limit, self._abroad_bytes)
            while end < len(pages) and nbytes + sent_bytes(pages[end]) <= limit:
                nbytes += sent_bytes(pages[end])
                end += 1
            epoch = writer.epoch
            before = time.monotonic()
            self._settle([writer], limit - nbytes)
            if abroad:
                self._settle(self._abroad(), self._abroad_bytes - nbytes)
            self._meter.add("credit_wait_seconds", time.monotonic() - before)
            batch = pages[at:end]
            at = end
            if writer.epoch != epoch:
                # The writer died during the wait: its open segments cannot be completed.
                lost = tuple(dict.fromkeys(p.segment for p in [*batch, *pages[at:]]))
                self._on_lost(Lost(lost, "their writer died"))
                return
            try:
                self._call(writer, batch)
            except Exception as e:
                log.exception("%d pages cannot be sent in one call; sending them one by one", len(batch))
                self._call_each(writer, batch, e)

    def _call(self, writer: _Writer, batch: Sequence[Page]) -> None:
        # Ray copies the arrays into its object store before .remote() returns. After that the ring may reuse them.
        ref = writer.actor.add_pages.remote(self._name, list(batch))
        nbytes = sum(map(sent_bytes, batch))
        writer.unanswered[ref] = (nbytes, tuple(page.segment for page in batch))
        writer.nbytes += nbytes

    def _call_each(self, writer: _Writer, batch: Sequence[Page], error: Exception) -> None:
        """Send each page in a separate call. A page that cannot be sent loses only its segment."""
        for page in batch:
            try:
                if len(batch) == 1:
                    raise error
                self._call(writer, [page])
            except Exception as e:  # noqa: BLE001 - any error in pickling the page
                self._lose([page.segment], bounded(f"its page cannot be sent: {shown_error(e)}"))

    def _abroad(self) -> list[_Writer]:
        """The other nodes' writers."""
        return [w for w in self._writers if w.node != self._node]

    def _limit(self, writer: _Writer) -> int:
        """Limit of unacknowledged bytes at ``writer``: its credit, or less if that may have gone to other senders."""
        if writer.asked and time.monotonic() - writer.answered < Credits.LATELY / 2:
            return writer.credit
        return min(self.FIRST_CALL, writer.credit or self.FIRST_CALL)

    # -- responses -----------------------------------------------------------------------------------------------

    def _settle(self, writers: Sequence[_Writer], limit: int | None) -> None:
        """Process responses until at most ``limit`` bytes are unacknowledged at ``writers`` together.

        A negative ``limit`` means 0: one batch may exceed the credit. None: process available responses only.
        """
        while limit is None or sum(w.nbytes for w in writers) > max(limit, 0):
            asked = {ref: w for w in writers for ref in w.unanswered}
            if not asked:
                return
            done, _ = ray.wait(list(asked), num_returns=1, timeout=0 if limit is None else None)
            if not done:
                return
            for ref in done:
                writer = asked[ref]
                nbytes, segments = writer.unanswered.pop(ref)
                writer.nbytes -= nbytes
                self._answered(writer, ref, segments)

    def _answered(self, writer: _Writer, ref: Any, segments: tuple[Segment, ...]) -> None:
        try:
            answer: Answer = ray.get(ref)
        except RayTaskError as e:  # the writer is alive, and could not unpickle the call
            self._lose(segments, bounded(f"its writer raised: {e.cause}"))
            return
        except RayError as e:
            if writer.down_until <= time.monotonic():  # several calls fail at one death
                writer.epoch += 1
                writer.deaths += 1
                writer.down_until = time.monotonic() + min(2.0**writer.deaths / 2, 30.0)
                writer.credit, writer.asked = 0, False  # the restarted actor has granted nothing yet
            self._on_lost(Lost(tuple(dict.fromkeys(segments)), f"writer died: {type(e).__name__}"))
            self._abandon(writer)
            return
        writer.deaths = 0
        writer.credit, writer.asked, writer.answered = answer.credit, True, time.monotonic()
        for why in dict.fromkeys(answer.refused.values()):
            refused = dict.fromkeys(segments[i] for i, its in answer.refused.items() if its == why)
            self._on_lost(Lost(tuple(refused), why))

    def _lose(self, segments: Sequence[Segment], why: str) -> None:
        """Report segments with a missing page as lost. Their later pages are dropped."""
        segments = tuple(dict.fromkeys(segments))
        self._on_lost(Lost(segments, why))
        for segment in segments:
            key = (*segment.id, segment.source)
            if key in self._route:
                self._route[key] = None

    def _abandon(self, writer: _Writer) -> None:
        """Drop the later pages of a dead writer's open segments, which cannot be completed."""
        for key, chosen in self._route.items():
            if chosen is writer:
                self._route[key] = None
