"""The driver: sends rows to replicas until receipts prove all of them. Only the fleet uses Ray."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Literal

from hsx_dist.errors import EngineError, Fenced, FormatError, StoreError
from hsx_dist.fleet.base import (
    MAX_FAILURES,
    Draining,
    Fleet,
    FleetEvent,
    NodeGone,
    ReplicaDied,
    ReplicaLeaving,
    ReplicaReady,
    ReplicaUnreached,
    TaskDone,
)
from hsx_dist.fleet.tasks import Task, TaskResult
from hsx_dist.format.manifest import Manifest, Receipt, RowFate
from hsx_dist.inputs.rows import Row
from hsx_dist.jobs.ledger import RowLedger
from hsx_dist.jobs.limits import Limits, Verdict
from hsx_dist.jobs.under_way import TASK_BYTES, UnderWay
from hsx_dist.logger import get_logger
from hsx_dist.observe.progress import Progress
from hsx_dist.writers.events import Counted, Lost

log = get_logger(__name__)

#: Tasks of a replica: the running one, and the next one, so that the engine does not wait.
TASKS_A_REPLICA = 2
#: Tries after which the rows of a dead replica run alone. Less than the deaths after which a fleet ends, because a
#: broken connection may add one of these.
TRIES_TOGETHER = MAX_FAILURES - 1
#: Seconds without a ready engine between two messages about it.
WAITING_S = 120.0
#: Seconds of reading, after which the driver looks at the fleet's events. Most rows may be refused or done.
READING_S = 0.2


class Driver:
    """Runs rows through a fleet until each is stored, refused or failed, or a limit is reached.

    Only a receipt proves that a row is done: a replica's answer means that its pages were shipped. A row whose task
    or pages were lost is tried again, up to ``max_tries`` times in all, the last time alone. Then it counts as failed.
    A row also runs alone after ``TRIES_TOGETHER`` tries, if the last one ended with its engine's death. A row whose
    engine dies while no other row is in it counts as ``poison``. A node's death does not count as a try.

    Keeps in memory only the rows that are with replicas or writers, and reads no more while these are too large.
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
        limits: Limits | None = None,
        token_bytes: int = 0,
        stop_seconds: float = 25.0,
        wait_seconds: float = 0.0,
    ):
        """``token_bytes``: raw bytes of a token's states, an estimate of a row's size until some are stored.
        ``stop_seconds``: limit for storing computed rows after a stop. ``wait_seconds``: limit for the first replica
        (0: none)."""
        self._fleet = fleet
        self._manifest = manifest
        self._ledger = ledger
        self._progress = progress
        self._task_rows = task_rows
        self._max_tries = max_tries
        self._limits = limits or Limits()
        self._token_bytes = token_bytes
        self._answered = 0  # rows that replicas answered
        self._stop_seconds = stop_seconds
        self._wait_seconds = wait_seconds
        self._ready: dict[int, list[Task]] = {}  # replica → its open tasks
        self._leaving: set[int] = set()  # replicas that get no more tasks: unreachable, or on draining nodes
        self._again: deque[Task] = deque()
        self._alone: deque[Task] = deque()
        self._shipped: dict[str, tuple[Row, int]] = {}  # key → row, tries: writers have it, no receipt yet
        self._excused = False  # whether a node or a connection may have lost rows without a receipt
        self._under_way = UnderWay()
        self._batch: list[Row] = []  # rows of the next task, until it has enough
        self._batch_bytes = 0
        self._reading = False  # whether reading goes on after the fleet's events
        self._numbers = 0
        self._exhausted = False
        self._paused = ""
        self._started = self._since = time.monotonic()
        self._stop = threading.Event()
        self._given: dict[int, float] = {}  # task number → when it was given to a replica
        progress.meter.watch("replicas_ready", lambda: len(self._ready))
        progress.meter.watch("tasks_open", lambda: len(self._given))
        progress.meter.watch("oldest_task_seconds", self._oldest_task)
        self._fenced = threading.Event()
        self._why_fenced = ""
        self._excess: FormatError | None = None  # ends the run: too many rows are refused
        #: Why the run ended before its last row. Empty if it did not.
        self.ended = ""

    def stop(self, why: str = "signal") -> None:
        """Hand out no more rows. ``run`` stores the computed rows and returns. Safe in a signal handler."""
        self.ended = self.ended or why
        self._stop.set()

    def fence(self, why: str) -> None:
        """Make ``run`` raise ``Fenced(why)``: another process took the run over or removed it. Safe in any thread."""
        self._why_fenced = why
        self._fenced.set()

    def _oldest_task(self) -> float:
        given = list(self._given.values())
        return time.monotonic() - min(given) if given else 0.0

    @property
    def counts(self) -> dict[str, int]:
        """Ready replicas and rows under way, for display."""
        return {"replicas": len(self._ready), "under_way": len(self._under_way)}

    def run(self, rows: Iterator[Row | RowFate | None]) -> None:
        """Run all rows. ``None`` among them: a row that needs nothing.

        Raises:
            EngineError: no replica is left and none can be started.
            Fenced: a newer attempt took the run over.
            FormatError: too many rows have no sample. The outcomes so far are stored.
            StoreError: the store refuses all puts (credentials, bucket).
        """
        if ended := self._verdict().ended:
            self.ended = ended  # earlier attempts reached the limit: no engine is started
            return
        self._started = self._since = time.monotonic()
        self._fleet.start()
        self._progress.say("starting engines")
        while True:
            if self._fenced.is_set():
                raise Fenced(self._why_fenced)
            if self._limits.past_deadline():
                self.stop("deadline")
            if self._stop.is_set():
                # Little time may be left: shipped rows are stored, and rows in engines are left to a resume.
                self._handle_all(self._fleet.flush(self._stop_seconds))
                self._is_complete()  # the flush may have stored the last rows
                break
            verdict = self._hand_out(rows)
            self._update_pause(verdict)
            if self._is_to_end():
                continue
            if self._is_idle() and (self._exhausted or verdict.capacity == 0) and not verdict.paused:
                self._flush()
                if self._is_complete():
                    break
                continue
            self._handle_all(self._fleet.poll(0.0 if self._reading else 0.5))
            self._ledger.flush_old()
            self._report_waiting()
            self._progress.show(running=sum(len(t.rows) for ts in self._ready.values() for t in ts))
        self._ledger.flush()
        if self._excess is not None:
            raise self._excess

    # -- handing out ---------------------------------------------------------------------------------------------

    def _hand_out(self, rows: Iterator[Row | RowFate | None]) -> Verdict:
        """Submit tasks to replicas with capacity, within the limits."""
        until = time.monotonic() + READING_S
        while True:
            verdict = self._verdict()
            replica = self._free_replica()
            self._reading = False
            task = None if replica is None else self._next_task(rows, replica, verdict, until)
            if replica is None or task is None:
                return verdict
            self._ready[replica].append(task)
            self._given[task.number] = time.monotonic()
            self._fleet.submit(replica, task)

    def _verdict(self) -> Verdict:
        rows, nbytes = len(self._manifest.samples), self._manifest.stored_bytes
        # Until some rows are stored, the raw size is the estimate. It is an upper limit.
        raw = self._token_bytes * self._progress.tokens / max(self._answered, 1)
        verdict = self._limits.verdict(rows, nbytes, len(self._under_way), nbytes / rows if rows else raw)
        full = self._under_way.is_full(TASKS_A_REPLICA * len(self._ready))
        return replace(verdict, capacity=0) if full else verdict

    def _free_replica(self) -> int | None:
        staying = self._ready.keys() - self._leaving
        # Rows that run alone do not wait for all others: they get the first replica as soon as it is idle.
        reserved = min(staying, default=None) if self._alone else None
        free = [
            r
            for r in staying
            if len(self._ready[r]) < TASKS_A_REPLICA
            and not any(task.alone for task in self._ready[r])
            and not (r == reserved and self._ready[r])
        ]
        return min(free, key=lambda r: (len(self._ready[r]), r), default=None)

    def _next_task(
        self, rows: Iterator[Row | RowFate | None], replica: int, verdict: Verdict, until: float
    ) -> Task | None:
        """The next task for a replica. None if it gets none now."""
        if self._is_to_end():
            return None
        if self._alone and not self._ready[replica]:
            return self._alone.popleft()
        if self._again:
            return self._again.popleft()
        room = self._task_rows - len(self._batch)
        room = room if verdict.capacity is None else min(room, verdict.capacity)
        while room > 0 and self._batch_bytes < TASK_BYTES and not self._exhausted:
            try:
                item = next(rows)
            except StopIteration:
                self._exhausted = True
                break
            if isinstance(item, RowFate) and item.key in self._manifest.refused:
                self._ledger.add(item)  # a withdrawal, or a new reason: the row follows, or counts as done
            elif isinstance(item, RowFate):
                self._give_up(item)
            elif item is not None:
                self._batch.append(item)
                self._batch_bytes += self._under_way.add(item)
                room -= 1
            # All the other rows may be refused or done, or each may take long to read.
            if self._is_to_end() or time.monotonic() >= until:
                self._reading = True
                return None
        batch, self._batch, self._batch_bytes = tuple(self._batch), [], 0
        return self._task(batch, 0) if batch else None

    def _task(self, rows: tuple[Row, ...], tries: int, *, alone: bool = False) -> Task:
        self._numbers += 1
        return Task(self._numbers, rows, tries, alone)

    def _is_idle(self) -> bool:
        return not any(self._ready.values()) and not self._again and not self._alone and not self._batch

    def _is_complete(self) -> bool:
        """Whether all rows are done, or a limit is reached. Sets ``ended``, and overrides a stop signal that had
        nothing left to stop."""
        ended = "" if self._exhausted else self._verdict().ended
        if not self._is_idle() or self._shipped or not (self._exhausted or ended):
            return False
        self.ended = ended
        return True

    # -- progress and markers ------------------------------------------------------------------------------------

    def _update_pause(self, verdict: Verdict) -> None:
        self._progress.paused = verdict.paused
        if verdict.paused and not self._paused:
            self._progress.say(f"paused by {verdict.paused}")
        if verdict.paused and self._is_idle() and self._shipped:
            # Consumers can only delete samples that are readable.
            self._flush()
        if self._paused and not verdict.paused:
            self._progress.say("data/ is below its limit again: continuing")
        self._paused = verdict.paused

    def _report_waiting(self) -> None:
        if self._ready:
            return
        now = time.monotonic()
        if 0 < self._wait_seconds < now - self._started and not self._numbers:
            raise EngineError(
                f"expected a ready replica within wait_seconds ({self._wait_seconds:g}), got none: "
                f"{self._fleet.waits_for()}. Look at the autoscaler's log, ask for fewer resources, or raise "
                "wait_seconds"
            )
        if now - self._since >= WAITING_S:
            self._since = now
            self._progress.say(f"no row runs yet: {self._fleet.waits_for()}")

    def _give_up(self, fate: RowFate) -> None:
        self._ledger.add(fate)
        self._progress.ended(fate.fate)
        about = {"key": fate.key, "row": fate.row}
        log.info("row %s (%s) %s: %s", fate.row, fate.key, fate.fate, fate.reason, extra=about)
        usable = len(self._manifest.samples) + len(self._shipped)  # a replica has computed the shipped ones
        self._excess = self._excess or self._ledger.excess(usable)
        if self._excess is not None:
            self.stop("refused rows")

    # -- events of the fleet -------------------------------------------------------------------------------------

    def _handle_all(self, events: list[FleetEvent]) -> None:
        for event in events:
            match event:
                case ReplicaReady(replica):
                    self._ready[replica] = []
                    self._progress.started()
                    self._progress.say(f"replica {replica} is ready")
                case TaskDone():
                    self._done(event.replica, event.result)
                case ReplicaLeaving(replica):
                    self._leaving.add(replica)
                    self._progress.say(f"replica {replica} gets no more rows: its node drains")
                case ReplicaUnreached(replica):
                    self._leaving.add(replica)
                    self._progress.say(f"replica {replica} is unreachable, and gets no more rows")
                case ReplicaDied():
                    self._lost_replica(event)
                case NodeGone():
                    self._excused = True
                case Draining():
                    self._progress.say("the driver's own node drains")
                    self.stop("its node drains")
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
            self._under_way.drop([fate.key])
            self._give_up(fate)
        for key in result.shipped:
            if key in self._manifest.samples:  # the receipt arrived before the replica's answer
                self._under_way.drop([key])
            else:
                self._shipped[key] = (rows[key], task.tries)
        for key, reason in result.skipped:
            self._run_again((rows[key],), task.tries, reason)
        self._answered += len(task.rows)
        self._progress.computed(result.tokens)
        self._progress.counted(result.numbers)

    def _proven(self, receipt: Receipt) -> None:
        samples, parts = len(self._manifest.samples), len(self._manifest.parts)
        self._manifest.add(receipt)
        for proof in receipt.segments:
            key = proof.segment.key
            if key in self._manifest.samples and key in self._shipped:
                del self._shipped[key]
                self._under_way.drop([key])
        if len(self._manifest.parts) > parts:
            # A sample counts when all of its segments have receipts, in any order.
            rows = len(self._manifest.samples) - samples
            self._progress.stored(rows=rows, raw_bytes=receipt.raw_bytes, stored_bytes=receipt.size)

    def _lost_segments(self, lost: Lost) -> None:
        if lost.fenced:
            raise Fenced(lost.reason)
        if lost.fatal:
            raise StoreError(f"parts can no longer be stored: {lost.reason}")
        self._progress.meter.add("lost_segments", len(lost.segments))
        # After a flush of the writers, shipped rows without a receipt are queued again.
        log.warning("%d segments were not stored and are run again: %s", len(lost.segments), lost.reason)

    def _lost_replica(self, event: ReplicaDied) -> None:
        tasks = self._ready.pop(event.replica, [])
        self._leaving.discard(event.replica)
        if not event.drained:
            self._progress.meter.add("replica_deaths")
        self._excused |= event.blameless  # its last pages may not have reached a writer
        for task in tasks:
            self._given.pop(task.number, None)
        if event.fatal and not self._ready:
            raise EngineError(event.reason)
        if tasks or not event.blameless:
            about = {"replica": event.replica}
            log.warning(
                "replica %d died: %s; its %d tasks are run again", event.replica, event.reason, len(tasks), extra=about
            )
        for task in tasks:
            rows = tuple(r for r in task.rows if r.key not in self._manifest.samples)
            self._under_way.drop(r.key for r in task.rows if r.key in self._manifest.samples)
            if event.blameless:
                # The death of a machine does not count as a try of the rows.
                self._queue(rows, task.tries, alone=task.alone)
            elif task.alone:
                reason = f"its engine died with this row alone in it: {event.reason}"
                self._end_rows(rows, "poison", reason, task.tries + 1)
            else:
                # Queued even if max_tries is reached: a row counts as poison only after its engine died with it alone.
                tries = task.tries + 1
                self._queue(rows, tries, alone=tries >= TRIES_TOGETHER)

    def _is_to_end(self) -> bool:
        return self._stop.is_set() or self._fenced.is_set() or self._limits.past_deadline()

    def _flush(self) -> None:
        """Block until all shipped rows have receipts, or are queued again. Returns early if the run must end: there may
        be no time to wait for a store or for Ray's report about a node."""
        self._handle_all(self._fleet.flush(hurry=self._is_to_end))
        if not self._is_to_end():
            self._try_unproven_again()

    def _try_unproven_again(self) -> None:
        """Queue the shipped rows without a receipt again. After a flush, they were lost with their writer.

        A writer that died may have stored receipts without reporting them. So new receipts are read first.
        """
        if self._shipped:
            self._ledger.read_new_receipts()
        shipped, self._shipped = self._shipped, {}
        for key, (row, tries) in shipped.items():
            if key in self._manifest.samples:
                self._under_way.drop([key])
                self._progress.stored(rows=1, raw_bytes=0, stored_bytes=0)
            elif self._excused:
                self._queue((row,), tries)
            else:
                self._run_again((row,), tries, "its writer died or could not store it")
        self._excused = False

    def _run_again(self, rows: tuple[Row, ...], tries: int, reason: str) -> None:
        if tries + 1 >= self._max_tries:
            self._end_rows(rows, "failed", reason, tries + 1)
        else:
            self._queue(rows, tries + 1)

    def _queue(self, rows: tuple[Row, ...], tries: int, *, alone: bool = False) -> None:
        """Queue rows again that were tried ``tries`` times."""
        if alone or (tries and tries >= self._max_tries - 1):
            # In its last try a row is alone, so that it cannot take other rows with it if it kills its engine.
            self._alone.extend(self._task((row,), tries, alone=True) for row in rows)
        else:
            rest = iter(rows)
            while batch := tuple(islice(rest, self._task_rows)):
                self._again.append(self._task(batch, tries))
        self._progress.retried(len(rows))

    def _end_rows(self, rows: tuple[Row, ...], fate: Literal["failed", "poison"], reason: str, tries: int) -> None:
        self._under_way.drop(row.key for row in rows)
        for row in rows:
            self._give_up(RowFate(row.key, row.row, fate, reason, tries, row.content))
