"""A pool of Ray actors: pages travel through the object store of the node, as arrays, many to a call."""

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
from hsx_dist.logger import get_logger
from hsx_dist.memory.plasma_views import PlasmaViews
from hsx_dist.observe.logs import configure_logging
from hsx_dist.observe.metrics import Increments, Meter
from hsx_dist.observe.ray_metrics import RayExport
from hsx_dist.page import Page, Segment
from hsx_dist.ray_arguments import sendable
from hsx_dist.store import Store, open_store
from hsx_dist.store.opening import Backend
from hsx_dist.store.prefix import PrefixStore
from hsx_dist.text import bounded
from hsx_dist.writers.base import ABROAD_BYTES, CALL_BYTES
from hsx_dist.writers.events import Counted, Event, Lost
from hsx_dist.writers.sink import PartSink, SinkOptions

log = get_logger(__name__)


@dataclass(frozen=True)
class PoolWriterSpec:
    """What a writer actor needs. ``environment`` carries credentials: actor arguments are shown nowhere, while a
    ``runtime_env`` stands on Ray's dashboard."""

    output: str
    storage_options: Mapping[str, Any]
    backend: Backend
    retry_seconds: float
    environment: Mapping[str, str]
    options: SinkOptions
    #: Bytes of pages that all senders together may have unanswered.
    credit_bytes: int = 256 << 20
    #: Values of the tags ``run`` and ``writer`` of its metrics.
    tags: Mapping[str, str] = field(default_factory=dict)
    #: The run's folder in the output; empty where the run's objects lie in the output itself.
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A writer's answer to pages: they are encoded, and the sender may have ``credit`` bytes unanswered from now on.

    ``refused``: which of them were not taken, by their places in the call, and why.
    """

    credit: int
    refused: Mapping[int, str] = field(default_factory=dict)


class Credits:
    """A writer's ``total`` bytes in equal shares among the senders that were heard of lately.

    A sender's share shrinks when it is heard of again: until then a newcomer gets what the others' leave.
    """

    #: Seconds of silence after which a sender's share goes to the others.
    LATELY = 60.0

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic):
        self._total = total
        self._clock = clock
        self._heard: dict[str, float] = {}
        self._granted: dict[str, int] = {}
        self._lock = threading.Lock()

    def share(self, sender: str) -> int:
        """The share, in bytes, of ``sender``, which has just been heard of."""
        with self._lock:
            now = self._heard[sender] = self._clock()
            self._heard = {s: at for s, at in self._heard.items() if now - at < self.LATELY}
            others = sum(granted for s, granted in self._granted.items() if s in self._heard and s != sender)
            share = max(min(self._total // len(self._heard), self._total - others), 0)
            self._granted = {s: self._granted.get(s, 0) for s in self._heard} | {sender: share}
            return share


class WriterActor:
    """One writer. ``add_pages`` answers when the pages are encoded: the answer is the credit coming back."""

    def __init__(self, spec: PoolWriterSpec):
        os.environ.update(spec.environment)
        configure_logging(logging.INFO, **spec.tags)
        self._events: queue.SimpleQueue[Event | Counted] = queue.SimpleQueue()
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
        except HsxError as e:
            # Told, not raised: an actor whose constructor fails is dead for good, and says so to nobody.
            self._broken = f"{type(e).__name__}: {e}"
            self._events.put(Lost((), self._broken, fatal=True))
        else:
            if spec.folder:
                store = PrefixStore(store, spec.folder)
            self._sink = PartSink(store, spec.options, self._events.put, self._meter)

    @ray.method(concurrency_group="control")
    def name(self) -> str:
        """Of the sink, another one in each life; empty when there is none."""
        return self._sink.name if self._sink is not None else ""

    def add_pages(self, sender: str, pages: Sequence[Page]) -> Answer:
        """Encode pages of ``sender`` (a dead sink has told by ``events`` what it lost)."""
        if self._sink is None:
            return Answer(self._credits.share(sender), dict.fromkeys(range(len(pages)), self._broken))
        refused: dict[int, str] = {}
        for i, page in enumerate(pages):
            try:
                self._plasma_views.bring(page.data)
                self._sink.add(page)
                self._plasma_views.let_go(page.data)
            except Exception as e:
                # A page that is refused costs its own segment: the call goes on, and answers.
                if not isinstance(e, HsxError | ValueError):
                    log.exception("a page of %s was not taken", page.segment.key)
                refused[i] = bounded(f"{type(e).__name__}: {e}")
        self._plasma_views.let_go_between([page.data for page in pages])
        return Answer(self._credits.share(sender), refused)

    @ray.method(concurrency_group="control")
    def flush(self) -> None:
        if self._sink is not None:
            self._sink.flush()
        self._export.push()

    @ray.method(concurrency_group="control")
    def events(self, timeout: float) -> list[Event | Counted]:
        """What happened since the last call; waits up to ``timeout`` seconds for something to happen."""
        found: list[Event | Counted] = []
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
        """Let the call of ``events`` that waits return: a call that is under way when its actor ends counts as failed,
        and stands in red on Ray's dashboard."""
        self._events.put(Counted({}))

    def __repr__(self) -> str:
        # What Ray's log lines and its dashboard call this process.
        return f"hsx writer {self._tags.get('writer', '')}"


def start_writer(
    spec: PoolWriterSpec, *, node_id: str, num_cpus: float, threads: int, name: str, namespace: str | None = None
) -> Any:
    """An actor pinned to a node, restarted for ever; ``threads`` calls encode at once. ``namespace``: Ray's, in which
    it is named, by default the job's own."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return (
        ray.remote(concurrency_groups={"control": 4})(WriterActor)
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
    """A writer as one sender sees it."""

    node: str
    actor: Any
    credit: int = 0
    asked: bool = False  # it has answered, and said what its credit is
    answered: float = 0.0  # when it last did
    unanswered: dict[Any, tuple[int, tuple[Segment, ...]]] = field(default_factory=dict)  # bytes, each page's segment
    nbytes: int = 0  # of what is unanswered
    epoch: int = 0  # how often it was found dead
    deaths: int = 0  # the same, since it last answered
    down_until: float = 0.0


class RaySender:
    """Sends from one replica to the writers of its own node, and to others' while those are gone or full.

    It never has more than a writer's credit unanswered there, and no more than ``abroad_bytes`` at other nodes' writers
    together, but for one page at a time. All pages of a segment go to one writer; when that one dies in between, the
    rest of the segment is dropped, as nothing could ever complete it.
    """

    #: A writer says what it can hold with its first answer; until then one call is under way, of at most so many bytes.
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
        """``writers``: (node id, actor handle). ``node``: where this sender is, by default where it is called."""
        self._abroad_bytes = abroad_bytes
        self._node = ray.get_runtime_context().get_node_id() if node is None else node
        self._name = uuid.uuid4().hex
        self._on_lost = on_lost
        self._meter = Meter() if meter is None else meter
        self._meter.watch("credit_bytes", lambda: sum(w.credit for w in self._writers))
        self._meter.watch("unanswered_bytes", lambda: sum(w.nbytes for w in self._writers))
        self._writers: list[_Writer] = []
        self._route: dict[tuple[str, int, int, str], _Writer | None] = {}  # None: its writer died, the rest is dropped
        # ``flush`` and ``update`` come from other threads than ``send``.
        self._lock = threading.Lock()
        self.update(writers)

    def update(self, writers: Sequence[tuple[str, Any]]) -> None:
        """The pool has changed: nodes came, or went."""
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
        """Pages by writer, in order."""
        batches: dict[int, tuple[_Writer, list[Page]]] = {}
        planned: dict[int, int] = {}
        for page in pages:
            segment = page.segment
            key = (*segment.id, segment.source)
            if key not in self._route:
                self._route[key] = self._choose(page.nbytes, planned)
                if self._route[key] is None:
                    self._on_lost(Lost((segment,), "there is no writer"))
            writer = self._route[key]
            if page.stop == segment.stop:
                del self._route[key]
            if writer is None:
                continue  # told when its writer was found dead, or gone
            batches.setdefault(id(writer), (writer, []))[1].append(page)
            planned[id(writer)] = planned.get(id(writer), 0) + page.nbytes
        return list(batches.values())

    def _choose(self, nbytes: int, planned: dict[int, int]) -> _Writer | None:
        """The emptiest writer of this node that lives; another node's only when those are down or full."""
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
                # A call that is still small is filled first; else many writers were many small calls.
                small = [w for w in free if 0 < planned.get(id(w), 0) < CALL_BYTES]
                return min(small or free, key=held)
        # All are full: wait for one here. All are down: the one that is back first gets it; Ray keeps the call for it.
        return min(here or up, key=held, default=None) or min(self._writers, key=lambda w: w.down_until)

    def _send_to(self, writer: _Writer, pages: list[Page]) -> None:
        at = 0
        while at < len(pages):
            nbytes = pages[at].nbytes
            end = at + 1
            limit, abroad = self._limit(writer), writer.node != self._node
            if abroad:
                limit = min(limit, self._abroad_bytes)
            while end < len(pages) and nbytes + pages[end].nbytes <= limit:
                nbytes += pages[end].nbytes
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
                # Found dead while waiting for room: of what had begun there nothing more is sent.
                lost = tuple(dict.fromkeys(p.segment for p in [*batch, *pages[at:]]))
                self._on_lost(Lost(lost, "their writer died"))
                return
            try:
                self._call(writer, batch)
            except Exception as e:
                log.exception("%d pages cannot be sent in one call; they are sent one by one", len(batch))
                self._call_each(writer, batch, e)

    def _call(self, writer: _Writer, batch: Sequence[Page]) -> None:
        # Ray copies the arrays into its object store before .remote() returns: then the ring may reuse them.
        ref = writer.actor.add_pages.remote(self._name, list(batch))
        nbytes = sum(page.nbytes for page in batch)
        writer.unanswered[ref] = (nbytes, tuple(page.segment for page in batch))
        writer.nbytes += nbytes

    def _call_each(self, writer: _Writer, batch: Sequence[Page], error: Exception) -> None:
        """A page that cannot be sent costs its own segment."""
        for page in batch:
            try:
                if len(batch) == 1:
                    raise error
                self._call(writer, [page])
            except Exception as e:  # noqa: BLE001 - whatever the page's is
                self._lose([page.segment], bounded(f"its page cannot be sent: {type(e).__name__}: {e}"))

    def _abroad(self) -> list[_Writer]:
        """The other nodes' writers."""
        return [w for w in self._writers if w.node != self._node]

    def _limit(self, writer: _Writer) -> int:
        """Bytes that may be unanswered there: what it granted, unless it may have given that to others meanwhile."""
        if writer.asked and time.monotonic() - writer.answered < Credits.LATELY / 2:
            return writer.credit
        return min(self.FIRST_CALL, writer.credit or self.FIRST_CALL)

    # -- what comes back -----------------------------------------------------------------------------------------

    def _settle(self, writers: Sequence[_Writer], limit: int | None) -> None:
        """Take answers until at most ``limit`` bytes are unanswered at all of them (or none: one batch may exceed the
        credit); without ``limit`` those that are there."""
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
        except RayTaskError as e:  # the writer lives, and could not read the call
            self._lose(segments, bounded(f"its writer raised: {e.cause}"))
            return
        except RayError as e:
            if writer.down_until <= time.monotonic():  # several calls meet one death
                writer.epoch += 1
                writer.deaths += 1
                writer.down_until = time.monotonic() + min(2.0**writer.deaths / 2, 30.0)
                writer.credit, writer.asked = 0, False  # its next life counts what it grants from nothing
            self._on_lost(Lost(tuple(dict.fromkeys(segments)), f"writer died: {type(e).__name__}"))
            self._abandon(writer)
            return
        writer.deaths = 0
        writer.credit, writer.asked, writer.answered = answer.credit, True, time.monotonic()
        for why in dict.fromkeys(answer.refused.values()):
            refused = dict.fromkeys(segments[i] for i, its in answer.refused.items() if its == why)
            self._on_lost(Lost(tuple(refused), why))

    def _lose(self, segments: Sequence[Segment], why: str) -> None:
        """Segments of which a page is missing: what is still to come of them goes nowhere."""
        segments = tuple(dict.fromkeys(segments))
        self._on_lost(Lost(segments, why))
        for segment in segments:
            key = (*segment.id, segment.source)
            if key in self._route:
                self._route[key] = None

    def _abandon(self, writer: _Writer) -> None:
        """What had begun at a writer that died cannot be completed: the rest of it goes nowhere."""
        for key, chosen in self._route.items():
            if chosen is writer:
                self._route[key] = None
