"""The driver: rows to replicas, receipts to certainty. It knows no Ray; a fleet does."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from hsx_dist.errors import AlreadyExists, EngineError, Fenced, StoreError
from hsx_dist.format.manifest import Manifest, Receipt, RowFate, receipt_name
from hsx_dist.format.runs import beat, is_fenced, load_manifest
from hsx_dist.jobs.fleet import Fleet, FleetEvent, ReplicaDied, ReplicaReady, TaskDone
from hsx_dist.jobs.rows import Row
from hsx_dist.jobs.tasks import Task, TaskResult
from hsx_dist.observe.progress import Progress
from hsx_dist.store import Store
from hsx_dist.writers.sink import Counted, Lost

log = logging.getLogger(__name__)

#: Tasks handed to a replica: one that runs, one that is there when the first drains.
TASKS_A_REPLICA = 2
HEARTBEAT_S = 5.0
#: After so many seconds without any engine the driver says so, again and again.
WAITING_S = 120.0


class RowLedger:
    """The driver's own receipts: rows that end without a sample, and why."""

    def __init__(self, store: Store, attempt: int, manifest: Manifest, *, batch: int = 1000):
        self.store = store
        self._attempt = attempt
        self._manifest = manifest
        self._writer = f"driver-{uuid.uuid4().hex[:8]}"
        self._rows: list[RowFate] = []
        self._batch = batch
        self._seq = 0

    def add(self, fate: RowFate) -> None:
        self._rows.append(fate)
        if len(self._rows) >= self._batch:
            self.flush()

    def flush(self) -> None:
        """Store what was added since the last flush.

        Raises:
            Fenced: a newer attempt owns the run.
        """
        if not self._rows:
            return
        if is_fenced(self.store, self._attempt):
            raise Fenced(f"attempt {self._attempt} of {self.store.url} is no longer the newest")
        receipt = Receipt(
            attempt=self._attempt,
            writer=self._writer,
            seq=self._seq + 1,
            part=None,
            size=0,
            crc32c="00000000",
            header_bytes=0,
            raw_bytes=0,
            segments=(),
            rows=tuple(self._rows),
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )
        name, body = receipt_name(self._attempt, self._writer, receipt.seq), receipt.to_json()
        try:
            self.store.put_if_absent(name, body)
        except AlreadyExists:
            if self.store.get(name) != body:  # the name is ours alone: a put that was sent twice
                raise
        self._seq += 1
        self._rows.clear()
        self._manifest.add(receipt)


class Heartbeat:
    """Changes the attempt's heartbeat every few seconds, on a thread; whoever sees it stand still may take over."""

    def __init__(self, store: Store, attempt: int, tell: Callable[[], Mapping[str, Any]] = dict):
        """``tell``: what is said with each beat of how far the attempt has come."""
        self._store = store
        self._attempt = attempt
        self._tell = tell
        self._value = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="hsx-heartbeat", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while not self._end.wait(HEARTBEAT_S):
            self._beat("running")

    def _beat(self, state: str) -> None:
        self._value += 1
        try:
            beat(self._store, self._attempt, self._value, state, self._tell())
        except StoreError as e:
            log.warning("heartbeat %d was not stored: %s", self._value, e)

    def stop(self, state: str) -> None:
        """Last value: ``finished``, ``failed`` or ``stopped``."""
        self._end.set()
        self._thread.join()
        self._beat(state)


class Driver:
    """Runs rows through a fleet until each is stored, refused or failed.

    What is done is what receipts prove; what replicas answer only says when to look. A row whose task or pages were
    lost is run again, up to ``max_tries`` times in all (the last time alone), and then counts as failed.
    """

    def __init__(
        self,
        fleet: Fleet,
        manifest: Manifest,
        ledger: RowLedger,
        progress: Progress,
        *,
        task_rows: int,
        max_tries: int,
    ):
        self._fleet = fleet
        self._manifest = manifest
        self._ledger = ledger
        self._progress = progress
        self._task_rows = task_rows
        self._max_tries = max_tries
        self._ready: dict[int, list[Task]] = {}  # replica → its tasks, as far as they have not come back
        self._again: deque[Task] = deque()
        self._shipped: dict[str, tuple[Row, int]] = {}  # key → row and tries: handed to writers, not proven yet
        self._numbers = 0
        self._since = time.monotonic()
        self._stop = threading.Event()
        self._given: dict[int, float] = {}  # task number → when it was given to a replica
        progress.meter.watch("replicas_ready", lambda: len(self._ready))
        progress.meter.watch("tasks_open", lambda: len(self._given))
        progress.meter.watch("oldest_task_seconds", self._oldest_task)

    def _oldest_task(self) -> float:
        given = list(self._given.values())
        return time.monotonic() - min(given) if given else 0.0

    def stop(self) -> None:
        """Hand out no more rows; ``run`` then closes what is under way and returns. Safe in a signal handler."""
        self._stop.set()

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def run(self, rows: Iterator[Row | RowFate]) -> None:
        """Raises:
        EngineError: no replica is left and none can be started.
        Fenced: a newer attempt took the run over.
        StoreError: the store refuses (credentials, bucket): nothing more can be stored.
        """
        self._since = time.monotonic()
        self._fleet.start()
        self._progress.say("starting engines")
        exhausted = False
        while True:
            while not self._stop.is_set() and (replica := self._free_replica()) is not None:
                task = self._next_task(rows, idle=not self._ready[replica])
                if task is None:
                    exhausted = not self._again
                    break
                self._ready[replica].append(task)
                self._given[task.number] = time.monotonic()
                self._fleet.submit(replica, task)
            if self._stop.is_set():
                # Little time may be left: what is shipped is made durable, what is still computed is left to a resume.
                self._handle_all(self._fleet.flush())
                break
            if not any(self._ready.values()) and exhausted and not self._again:
                self._handle_all(self._fleet.flush())
                self._try_unproven_again()
                if not self._again:
                    break
                continue
            self._handle_all(self._fleet.poll(0.5))
            self._say_what_is_waited_for()
            self._progress.show(running=sum(len(t.rows) for ts in self._ready.values() for t in ts))
        self._ledger.flush()

    def _say_what_is_waited_for(self) -> None:
        waited = time.monotonic() - self._since
        if not self._ready and waited >= WAITING_S:
            self._since += WAITING_S
            self._progress.say(
                "no engine is ready yet: they load, or wait for room on the cluster (see Ray's dashboard)"
            )

    def _free_replica(self) -> int | None:
        free = [
            r
            for r, tasks in self._ready.items()
            if len(tasks) < TASKS_A_REPLICA and not any(task.alone for task in tasks)
        ]
        return min(free, key=lambda r: len(self._ready[r]), default=None)

    def _next_task(self, rows: Iterator[Row | RowFate], *, idle: bool) -> Task | None:
        """The next task for a replica, which has nothing else to do if ``idle``; None when it can have none now."""
        if self._again and not (self._again[0].alone and not idle):
            return self._again.popleft()
        batch: list[Row] = []
        while len(batch) < self._task_rows and (item := next(rows, None)) is not None:
            if isinstance(item, RowFate):
                self._give_up(item)
            else:
                batch.append(item)
        return self._task(tuple(batch), 0) if batch else None

    def _task(self, rows: tuple[Row, ...], tries: int, *, alone: bool = False) -> Task:
        self._numbers += 1
        return Task(self._numbers, rows, tries, alone)

    def _give_up(self, fate: RowFate) -> None:
        self._ledger.add(fate)
        if fate.fate == "withdrawn":
            return
        self._progress.ended(fate.fate)
        about = {"key": fate.key, "row": fate.row}
        log.info("row %s (%s) %s: %s", fate.row, fate.key, fate.fate, fate.reason, extra=about)

    def _handle_all(self, events: list[FleetEvent]) -> None:
        for event in events:
            match event:
                case ReplicaReady(replica):
                    self._ready[replica] = []
                    self._progress.started()
                    self._progress.say(f"replica {replica} is ready")
                case TaskDone():
                    self._done(event.replica, event.result)
                case ReplicaDied():
                    self._lost_replica(event)
                case Receipt():
                    self._proven(event)
                case Lost():
                    self._lost_segments(event)
                case Counted():
                    self._progress.counted(event.numbers)

    def _done(self, replica: int, result: TaskResult) -> None:
        task = next(t for t in self._ready[replica] if t.number == result.number)
        self._ready[replica].remove(task)
        self._given.pop(task.number, None)
        rows = {r.key: r for r in task.rows}
        for fate in result.refused:
            self._give_up(fate)
        for key in result.shipped:
            if key not in self._manifest.samples:  # its receipt may have been quicker than its replica's answer
                self._shipped[key] = (rows[key], task.tries)
        for key, reason in result.skipped:
            self._run_again((rows[key],), task.tries, reason)
        self._progress.computed(result.tokens)
        self._progress.counted(result.numbers)

    def _proven(self, receipt: Receipt) -> None:
        samples, parts = len(self._manifest.samples), len(self._manifest.parts)
        self._manifest.add(receipt)
        for proof in receipt.segments:
            if proof.segment.key in self._manifest.samples:
                self._shipped.pop(proof.segment.key, None)
        if len(self._manifest.parts) > parts:
            # A sample counts when the last of its segments is proven, which need not be the one that ends it.
            rows = len(self._manifest.samples) - samples
            self._progress.stored(rows=rows, raw_bytes=receipt.raw_bytes, stored_bytes=receipt.size)

    def _lost_segments(self, lost: Lost) -> None:
        if lost.fenced:
            raise Fenced(lost.reason)
        if lost.fatal:
            raise StoreError(f"parts can no longer be stored: {lost.reason}")
        self._progress.meter.add("lost_segments", len(lost.segments))
        # Rows that were shipped are found by their missing receipts when the writers are flushed.
        log.warning("%d segments were not stored and are run again: %s", len(lost.segments), lost.reason)

    def _lost_replica(self, event: ReplicaDied) -> None:
        tasks = self._ready.pop(event.replica, [])
        self._progress.meter.add("replica_deaths")
        for task in tasks:
            self._given.pop(task.number, None)
        if event.fatal and not self._ready:
            raise EngineError(event.reason)
        about = {"replica": event.replica}
        log.warning(
            "replica %d died: %s; its %d tasks are run again", event.replica, event.reason, len(tasks), extra=about
        )
        for task in tasks:
            rows = tuple(r for r in task.rows if r.key not in self._manifest.samples)
            self._run_again(rows, task.tries, f"its engine died: {event.reason}")

    def _try_unproven_again(self) -> None:
        """After a flush everything shipped is proven, or was lost with its writer; a writer that died may have proven
        more than it could tell, so the store is asked before anything is computed again."""
        if self._shipped:
            for receipt in load_manifest(self._ledger.store).receipts:
                self._proven(receipt)
        shipped = {key: value for key, value in self._shipped.items() if key not in self._manifest.samples}
        self._shipped = {}
        for row, tries in shipped.values():
            self._run_again((row,), tries, "its writer died or could not store it")

    def _run_again(self, rows: tuple[Row, ...], tries: int, reason: str) -> None:
        tries += 1
        if not rows:
            return
        if tries >= self._max_tries:
            for row in rows:
                self._give_up(RowFate(row.key, row.row, "failed", reason, tries, row.content))
        elif tries == self._max_tries - 1:
            # The last try is each row's own: one that kills its engine takes no other with it.
            self._again.extend(self._task((row,), tries, alone=True) for row in rows)
        else:
            rest = iter(rows)
            while batch := tuple(islice(rest, self._task_rows)):
                self._again.append(self._task(batch, tries))
        self._progress.retried(len(rows))
