"""The driver's bookkeeping, with a fleet that loses replicas and pages on purpose. Real fleets: tests/integration."""

from __future__ import annotations

import io
from collections import deque
from contextlib import nullcontext
from dataclasses import replace

import pytest
from rich.console import Console

from hsx_dist.errors import EngineError, Fenced, FormatError, StoreError
from hsx_dist.fleet.base import (
    MAX_FAILURES,
    Draining,
    NodeGone,
    ReplicaDied,
    ReplicaLeaving,
    ReplicaReady,
    ReplicaUnreached,
    TaskDone,
)
from hsx_dist.fleet.tasks import TaskResult
from hsx_dist.format.manifest import Manifest, Receipt, RowFate, SegmentProof
from hsx_dist.format.names import part_name
from hsx_dist.format.runs import load_manifest, take_attempt
from hsx_dist.inputs import refused
from hsx_dist.inputs.rows import Row
from hsx_dist.jobs.driver import Driver
from hsx_dist.jobs.ledger import RowLedger
from hsx_dist.jobs.limits import Limits
from hsx_dist.observe.metrics import Increments
from hsx_dist.observe.progress import Progress
from hsx_dist.page import Segment
from hsx_dist.store.local import LocalStore
from hsx_dist.writers.events import Lost


class LossyFleet:
    """Two replicas that compute at once, and a writer that stores on ``flush``. ``plan(task)`` names a fault."""

    def __init__(self, plan=lambda _: "fine", replicas=2):
        self.plan = plan
        self.replicas = replicas
        self.events: deque = deque()
        self.open: list[str] = []  # shipped, not stored
        self.seq = 0
        self.flushed: list[float | None] = []
        self.while_flushing = lambda: None  # called in a flush without time limit
        self.tasks = []
        self.dead: set[int] = set()
        self.unreached: dict[int, int] = {}  # replica → polls until it is known to be dead
        self.most_at_once = 0
        self.running = dict.fromkeys(range(replicas), 0)

    def start(self):
        self.events.extend(ReplicaReady(r) for r in range(self.replicas))

    def submit(self, replica, task):
        if replica in self.dead:
            return  # the driver does not know yet; no answer will follow
        assert replica not in self.unreached  # the driver knows
        self.tasks.append(task)
        self.running[replica] += 1
        self.most_at_once = max(self.most_at_once, self.running[replica])
        outcome = self.plan(task)
        if outcome in ("die", "vanish"):
            self.running[replica] = 0
            self.dead.add(replica)
            # A dead replica's answers are lost. Rows that it shipped before may still be stored.
            self.events = deque(e for e in self.events if not (isinstance(e, tuple) and e[0] == replica))
            gone = ReplicaDied(replica, "killed", blameless=outcome == "vanish")
            self.events += [gone, ReplicaReady(replica)]
            return
        if outcome == "unreach":
            self.events.append(ReplicaUnreached(replica))
            return
        if outcome == "die for good":
            self.events.append(ReplicaDied(replica, "no engine", fatal=True))
            return
        result = TaskResult(task.number, tokens=len(task.rows))
        for row in task.rows:
            if outcome == "skip":
                result.skipped.append((row.key, "aborted"))
            elif outcome == "refuse":
                result.refused.append(RowFate(row.key, row.row, "refused", "too long", 0))
            else:
                result.shipped.append(row.key)
                if outcome != "lose":
                    self.open.append(row.key)
        self.events.append((replica, TaskDone(replica, result)))

    def poll(self, timeout):  # noqa: ARG002 - nothing here takes time
        for replica, polls in list(self.unreached.items()):
            self.unreached[replica] = polls - 1
            if polls == 0:
                del self.unreached[replica]
                self.running[replica] = 0
                self.events += [ReplicaDied(replica, "its node is gone", blameless=True), ReplicaReady(replica)]
        events, self.events = list(self.events), deque()
        self.dead.clear()
        found = []
        for event in events:
            if isinstance(event, ReplicaUnreached):
                self.unreached[event.replica] = 5
            if isinstance(event, tuple):
                replica, event = event
                self.running[replica] = max(self.running[replica] - 1, 0)
            found.append(event)
        return found

    def waits_for(self):
        return "a writer is not used: another disk"

    def flush(self, timeout=None, *, hurry=lambda: False):
        self.flushed.append(timeout)
        events = self.poll(0)
        if timeout is None:
            self.while_flushing()
            if hurry():
                return events
        if self.open:
            self.seq += 1
            events.append(receipt(self.seq, self.open))
            self.open = []
        return events

    def close(self, *, quickly=False):
        pass


def receipt(seq: int, keys: list[str]) -> Receipt:
    proofs = tuple(
        SegmentProof(
            segment=Segment(key, 0, 0, 3, 3), slot=i, token_hash="0" * 16, raw_bytes=30, stored_bytes=20, row=i
        )
        for i, key in enumerate(keys)
    )
    return Receipt(
        attempt=1,
        writer="w",
        seq=seq,
        part=part_name(1, "w", seq),
        size=100,
        crc32c="00000000",
        header_bytes=10,
        raw_bytes=30 * len(keys),
        segments=proofs,
        rows=(),
        created="2026-01-01T00:00:00+00:00",
    )


def rows(n: int) -> list[Row | RowFate]:
    return [Row(f"k{i}", i, text="x") for i in range(n)]


@pytest.fixture
def ledger(tmp_path):
    store = LocalStore(tmp_path)
    take_attempt(store, {})
    return RowLedger(store, 1, Manifest())


def drive(fleet, items, ledger, **options):
    manifest = ledger._manifest
    progress = Progress(len(items), console=Console(file=io.StringIO()))
    driver = Driver(fleet, manifest, ledger, progress, **{"task_rows": 4, "max_tries": 3, **options})
    driver.run(iter(items))
    return manifest


def test_every_row_is_stored_and_replicas_have_the_next_task_before_the_last_is_done(ledger):
    fleet = LossyFleet()
    manifest = drive(fleet, rows(50), ledger)
    assert len(manifest.samples) == 50
    assert len(fleet.tasks) == 13
    assert fleet.most_at_once == 2


def test_a_dead_replicas_rows_are_run_again(ledger):
    died = []

    def plan(task):
        if not died:
            died.append(task)
            return "die"
        return "fine"

    fleet = LossyFleet(plan)
    manifest = drive(fleet, rows(20), ledger)
    assert len(manifest.samples) == 20
    assert manifest.failed == {}
    assert [t for t in fleet.tasks if t.tries == 1]


def test_shipped_rows_without_a_receipt_are_run_again(ledger):
    fleet = LossyFleet(lambda task: "lose" if task.tries == 0 and task.number % 2 else "fine")
    manifest = drive(fleet, rows(20), ledger)
    assert len(manifest.samples) == 20


@pytest.mark.parametrize("max_tries", [1, 2, 3, 5, 9])
def test_a_row_that_kills_every_engine_is_set_aside_alone(ledger, max_tries):
    fleet = LossyFleet(lambda task: "die" if any(r.key == "k5" for r in task.rows) else "fine")
    manifest = drive(fleet, rows(12), ledger, max_tries=max_tries)
    assert set(manifest.failed) == {"k5"}
    fate = manifest.failed["k5"]
    assert (fate.fate, fate.tries) == ("poison", min(max(max_tries, 2), 3))
    # The fleet of one replica starts another one after each of these deaths.
    assert sum(any(r.key == "k5" for r in t.rows) for t in fleet.tasks if not t.alone) < MAX_FAILURES
    assert "alone" in fate.reason
    assert "killed" in fate.reason
    assert len(manifest.samples) == 11
    assert [t.rows[0].key for t in fleet.tasks if t.alone and len(t.rows) == 1].count("k5") == 1


def test_rows_that_want_an_engine_alone_do_not_wait_for_the_end_of_the_input(ledger):
    fleet = LossyFleet(lambda task: "die" if any(r.key == "k1" for r in task.rows) else "fine")
    drive(fleet, rows(400), ledger, max_tries=2)
    last = max(i for i, t in enumerate(fleet.tasks) if t.alone)
    assert last < len(fleet.tasks) - 20


def test_rows_lost_with_their_node_are_run_again_without_counting_a_try(ledger):
    vanished = []

    def plan(task):
        if len(vanished) < 20:
            vanished.append(task)
            return "vanish"
        return "fine"

    fleet = LossyFleet(plan)
    manifest = drive(fleet, rows(8), ledger, max_tries=2)
    assert len(manifest.samples) == 8
    assert manifest.failed == {}
    assert {t.tries for t in fleet.tasks} == {0}


def test_an_unreachable_replica_gets_no_rows_and_its_rows_wait_for_its_state(ledger):
    fleet = LossyFleet(lambda task: "unreach" if task.number == 4 else "fine")
    manifest = drive(fleet, rows(40), ledger, max_tries=1)
    assert len(manifest.samples) == 40
    assert manifest.failed == {}
    assert {t.tries for t in fleet.tasks} == {0}


def test_rows_lost_with_a_writers_node_do_not_count_as_a_try(ledger):
    lost = []

    def plan(task):
        if len(lost) < 10:
            lost.append(task)
            fleet.events.append(NodeGone("n"))
            return "lose"
        return "fine"

    fleet = LossyFleet(plan)
    manifest = drive(fleet, rows(8), ledger, max_tries=1)
    assert len(manifest.samples) == 8
    assert manifest.failed == {}


def test_a_replica_whose_node_drains_gets_no_more_tasks(ledger):
    fleet = LossyFleet()
    real = fleet.submit

    def submit(replica, task):
        real(replica, task)
        if task.number == 3:
            fleet.events.append(ReplicaLeaving(0))
        if task.number > 8:
            assert replica == 1

    fleet.submit = submit
    assert len(drive(fleet, rows(100), ledger).samples) == 100


@pytest.mark.parametrize(("drained", "deaths"), [(True, 0), (False, 1)])
def test_a_replica_that_ends_with_its_drained_node_did_not_die(ledger, drained, deaths):
    fleet = LossyFleet()
    gone = ReplicaDied(0, "its node is gone", blameless=True, drained=drained)
    fleet.start = lambda: fleet.events.extend([ReplicaReady(0), gone, ReplicaReady(1)])
    progress = Progress(9, console=Console(file=io.StringIO()))
    counted = Increments(progress.meter)
    Driver(fleet, ledger._manifest, ledger, progress, task_rows=4, max_tries=3).run(iter(rows(9)))
    assert counted.take().get(("replica_deaths", ""), 0) == deaths
    assert len(ledger._manifest.samples) == 9


def test_skipped_rows_are_tried_and_then_failed_refused_ones_are_not_tried_again(ledger):
    fleet = LossyFleet(lambda task: "skip" if task.rows[0].key == "k0" else "refuse", replicas=1)
    items = [*rows(2), RowFate("bad", 2, "refused", "not JSON", 0)]
    manifest = drive(fleet, items, ledger, task_rows=1)
    assert {k: f.fate for k, f in {**manifest.refused, **manifest.failed}.items()} == {
        "bad": "refused",
        "k1": "refused",
        "k0": "failed",
    }
    assert sum(t.rows[0].key == "k1" for t in fleet.tasks) == 1
    assert sum(t.rows[0].key == "k0" for t in fleet.tasks) == 3


def test_a_new_reason_of_a_refused_row_is_stored_and_counts_no_row_twice(ledger):
    before, now = (RowFate("bad", 2, "refused", why, 0) for why in ("not JSON", "a row of 2 MB"))
    drive(LossyFleet(), [before], ledger)
    progress = Progress(3, 1, Console(file=io.StringIO()))
    Driver(LossyFleet(), ledger._manifest, ledger, progress, task_rows=4, max_tries=3).run(iter([now, *rows(2)]))
    assert ledger._manifest.refused["bad"].reason == now.reason
    assert (progress.done, progress.left) == (3, 0)


def test_fates_of_rows_are_receipts_that_a_later_attempt_reads(ledger, tmp_path):
    drive(LossyFleet(), [RowFate(f"bad{i}", i, "refused", "why", 0) for i in range(2500)], ledger)
    assert len(load_manifest(LocalStore(tmp_path)).refused) == 2500


def bad(task):
    return "refuse" if "bad" in task.rows[0].key else "fine"


def bad_rows(n, key="bad"):
    return [Row(f"{key}{i}", 1000 + i, text="x") for i in range(n)]


@pytest.mark.parametrize(("key", "most"), [("bad", 60), ("bad" + "😀" * 1000, 5)])
def test_rows_that_replicas_refuse_end_the_run_at_the_limit_and_all_outcomes_are_stored(
    ledger, tmp_path, monkeypatch, key, most
):
    """The reader counts such rows as usable. Each is an entry in the driver's memory."""
    monkeypatch.setattr(refused, "FREE_ROWS", 20)
    fleet, source = LossyFleet(bad, replicas=1), iter([*rows(4), *bad_rows(1000, key)])
    driver = Driver(fleet, ledger._manifest, ledger, Progress(1004), task_rows=1, max_tries=3)
    with pytest.raises(FormatError, match=r"got \d+ refused rows \(\d+ bytes.*The last: too long"):
        driver.run(source)
    assert len(ledger._manifest.samples) == 4
    stored = load_manifest(LocalStore(tmp_path)).refused
    assert most < len(stored) <= most + 5
    assert len(list(source)) > 900
    assert driver.ended == "refused rows"


def test_failed_rows_count_as_refused_ones(ledger, monkeypatch):
    monkeypatch.setattr(refused, "FREE_ROWS", 20)
    with pytest.raises(FormatError, match="The last: aborted"):
        drive(LossyFleet(lambda _: "skip"), rows(50), ledger, max_tries=1)


def test_each_stored_row_allows_more_refused_rows(ledger, monkeypatch):
    monkeypatch.setattr(refused, "FREE_ROWS", 20)
    items = [*rows(8), *bad_rows(100)]
    manifest = drive(LossyFleet(bad, replicas=1), items, ledger)
    assert (len(manifest.samples), len(manifest.refused)) == (8, 100)
    more = bad_rows(1000, "bad-")
    with pytest.raises(FormatError, match="8 usable rows so far"):
        drive(LossyFleet(bad, replicas=1), more, ledger)


def test_a_resume_counts_the_runs_refused_rows_and_goes_on_with_a_corrected_input(tmp_path, monkeypatch):
    monkeypatch.setattr(refused, "FREE_ROWS", 200)  # and two more rows in each resume
    store = LocalStore(tmp_path)
    counts = []
    for key in ("bad", "more bad"):
        ledger = RowLedger(store, take_attempt(store, {}), load_manifest(store))
        with pytest.raises(FormatError, match="expected rows that can be used"):
            drive(LossyFleet(bad, replicas=1), bad_rows(1000, key), ledger, task_rows=1)
        counts.append(len(load_manifest(store).refused))
    assert 200 < counts[0] < counts[1] < counts[0] + 8
    ledger = RowLedger(store, take_attempt(store, {}), load_manifest(store))
    # A row that is refused again is no new entry.
    corrected = [*bad_rows(4), *bad_rows(2, "other bad"), *rows(40), *bad_rows(60, "last bad")]
    manifest = drive(LossyFleet(bad, replicas=1), corrected, ledger, task_rows=2)
    assert (len(manifest.samples), len(manifest.refused)) == (40, counts[1] + 62)


def test_without_any_replica_the_run_ends_with_the_reason(ledger):
    with pytest.raises(EngineError, match="no engine"):
        drive(LossyFleet(lambda _: "die for good", replicas=1), rows(5), ledger)


@pytest.mark.parametrize(
    ("lost", "error"),
    [
        (Lost((), "attempt 2 took over", fatal=True, fenced=True), Fenced),
        (Lost((), "Denied: no", fatal=True), StoreError),
    ],
)
def test_a_store_that_refuses_ends_the_run(ledger, lost, error):
    fleet = LossyFleet()
    fleet.events.append(lost)
    with pytest.raises(error):
        drive(fleet, rows(5), ledger)


def test_a_lost_part_alone_does_not_end_the_run(ledger):
    fleet = LossyFleet()
    fleet.events.append(Lost((Segment("k0", 0, 0, 3, 3),), "Unavailable: slow"))
    assert len(drive(fleet, rows(5), ledger).samples) == 5


def test_a_fenced_driver_writes_no_receipt(ledger, tmp_path):
    take_attempt(LocalStore(tmp_path), {})
    with pytest.raises(Fenced):
        drive(LossyFleet(), [RowFate("bad", 0, "refused", "why", 0)], ledger)
    assert load_manifest(LocalStore(tmp_path)).refused == {}


def run(fleet, items, ledger, **options):
    """The driver, after its run."""
    progress = Progress(len(items), console=Console(file=io.StringIO()))
    driver = Driver(fleet, ledger._manifest, ledger, progress, **{"task_rows": 4, "max_tries": 3, **options})
    driver.run(iter(items))
    return driver


def at_task(fleet, number, do):
    real = fleet.submit

    def submit(replica, task):
        real(replica, task)
        if task.number == number:
            do()

    fleet.submit = submit


@pytest.mark.parametrize("how", ["stop", "drain"])
def test_stop_submits_no_more_tasks_and_flushes_within_its_time_limit(ledger, how):
    fleet = LossyFleet()
    progress = Progress(100, console=Console(file=io.StringIO()))
    driver = Driver(fleet, ledger._manifest, ledger, progress, task_rows=4, max_tries=3, stop_seconds=7.0)
    at_task(fleet, 3, driver.stop if how == "stop" else lambda: fleet.events.append(Draining()))
    driver.run(iter(rows(100)))
    assert driver.ended == ("signal" if how == "stop" else "its node drains")
    assert fleet.flushed == [7.0]
    assert len(ledger._manifest.samples) == 4 * len(fleet.tasks) < 100


@pytest.mark.parametrize("lost", [False, True])
def test_a_stop_in_the_last_flush_limits_its_time_and_fails_no_row(ledger, lost):
    fleet = LossyFleet(lambda task: "lose" if lost and task.number == 1 else "fine")
    progress = Progress(10, console=Console(file=io.StringIO()))
    driver = Driver(fleet, ledger._manifest, ledger, progress, task_rows=4, max_tries=1, stop_seconds=7.0)
    fleet.while_flushing = driver.stop
    driver.run(iter(rows(10)))
    assert driver.ended == ("signal" if lost else "")
    assert fleet.flushed == [None, 7.0]
    assert len(ledger._manifest.samples) == (6 if lost else 10)
    assert len(fleet.tasks) == 3
    assert ledger._manifest.failed == {}


def test_a_stop_while_the_run_is_paused_flushes_at_once(ledger):
    fleet = LossyFleet()
    held = Limits(held=lambda: ledger._manifest.stored_bytes + 100, max_held_bytes=150)
    progress = Progress(100, console=Console(file=io.StringIO()))
    options = {"task_rows": 4, "max_tries": 1, "limits": held, "token_bytes": 25, "stop_seconds": 7.0}
    driver = Driver(fleet, ledger._manifest, ledger, progress, **options)

    def stop():
        # It would store the results of refused rows, in a store that may be down.
        ledger.flush_old = lambda: pytest.fail("went on")
        driver.stop()

    fleet.while_flushing = stop
    driver.run(iter(rows(100)))
    assert driver.ended == "signal"
    assert fleet.flushed == [None, 7.0]
    assert len(ledger._manifest.samples) == 4 * len(fleet.tasks) < 100


def test_a_stop_after_all_rows_are_stored_has_no_effect(ledger):
    fleet = LossyFleet()
    progress = Progress(10, console=Console(file=io.StringIO()))
    driver = Driver(fleet, ledger._manifest, ledger, progress, task_rows=4, max_tries=1)
    real = fleet.flush

    def flush(timeout=None, **more):
        events = real(timeout, **more)
        driver.stop()
        return events

    fleet.flush = flush
    driver.run(iter(rows(10)))
    assert (driver.ended, fleet.flushed) == ("", [None])


def test_a_newer_attempt_does_not_wait_for_the_last_flush(ledger):
    fleet = LossyFleet()
    progress = Progress(10, console=Console(file=io.StringIO()))
    driver = Driver(fleet, ledger._manifest, ledger, progress, task_rows=4, max_tries=1)
    fleet.while_flushing = lambda: driver.fence("a newer attempt was taken")
    with pytest.raises(Fenced):
        driver.run(iter(rows(10)))
    assert fleet.flushed == [None]
    assert ledger._manifest.failed == {}


def test_the_deadline_ends_a_flush_as_a_stop_does(ledger):
    clock = [0.0]
    fleet = LossyFleet()
    fleet.while_flushing = lambda: clock.__setitem__(0, 100.0)
    driver = run(fleet, rows(10), ledger, limits=Limits(seconds=60, clock=lambda: clock[0]), stop_seconds=7.0)
    assert (driver.ended, fleet.flushed) == ("", [None, 7.0])
    assert len(ledger._manifest.samples) == 10


def test_a_newer_attempt_ends_a_driver_that_stores_nothing(ledger):
    fleet = LossyFleet(lambda _: "lose")
    progress = Progress(5, console=Console(file=io.StringIO()))
    driver = Driver(fleet, ledger._manifest, ledger, progress, task_rows=4, max_tries=3)
    at_task(fleet, 2, lambda: driver.fence("a newer attempt was taken"))
    with pytest.raises(Fenced):
        driver.run(iter(rows(100)))


def test_max_rows_ends_the_run_after_exactly_that_number(ledger):
    fleet = LossyFleet(lambda task: "lose" if task.number == 2 else "fine")
    driver = run(fleet, rows(100), ledger, limits=Limits(max_rows=13))
    assert len(ledger._manifest.samples) == 13
    assert driver.ended.startswith("max_rows")
    assert driver.counts["under_way"] == 0
    idle = LossyFleet()
    again = run(idle, rows(100), ledger, limits=Limits(max_rows=13))
    assert again.ended.startswith("max_rows")
    assert not idle.events, "expected no replica to be started"


def test_max_rows_of_an_input_that_has_fewer_ends_it_as_usual(ledger):
    driver = run(LossyFleet(), rows(7), ledger, limits=Limits(max_rows=13))
    assert (driver.ended, len(ledger._manifest.samples)) == ("", 7)


def test_max_bytes_ends_the_run_near_it(ledger):
    driver = run(LossyFleet(), rows(1000), ledger, limits=Limits(max_bytes=350), token_bytes=25)  # a part has 100 bytes
    assert driver.ended.startswith("max_bytes")
    assert 350 <= ledger._manifest.stored_bytes <= 500


def test_at_the_deadline_computed_rows_are_stored(ledger):
    clock = [0.0]
    fleet = LossyFleet()
    at_task(fleet, 5, lambda: clock.__setitem__(0, 100.0))
    driver = run(fleet, rows(100), ledger, limits=Limits(seconds=60, clock=lambda: clock[0]))
    assert driver.ended == "deadline"
    assert 0 < len(ledger._manifest.samples) < 100


def test_a_full_store_pauses_the_run_until_consumers_have_deleted(ledger, monkeypatch):
    """Every visible part is deleted at the next check. The run never ends, and never holds more than a few parts."""
    deleted = [0]
    most = [0]

    told = []
    real = Progress.show

    def show(self, running):
        told.append(self.line())
        real(self, running)

    monkeypatch.setattr(Progress, "show", show)

    def held():
        now = ledger._manifest.stored_bytes - deleted[0]
        most[0] = max(most[0], now)
        if now >= 100:
            deleted[0] += 100
        return now

    fleet = LossyFleet()
    driver = run(fleet, rows(60), ledger, limits=Limits(held=held, max_held_bytes=100), token_bytes=25)
    assert driver.ended == ""
    assert len(ledger._manifest.samples) == 60
    assert deleted[0] > 100
    assert most[0] <= 200
    assert any("paused by max_stored_bytes: data/ holds" in line for line in told)
    assert "paused" not in told[-1]


def test_a_cluster_that_gets_no_room_in_time_ends_the_run(ledger):
    with pytest.raises(EngineError, match=r"wait_seconds .* a writer is not used: another disk\."):
        run(LossyFleet(replicas=0), rows(5), ledger, wait_seconds=0.01)


def test_a_run_without_ready_replicas_repeats_what_it_waits_for(ledger, monkeypatch):
    monkeypatch.setattr("hsx_dist.jobs.driver.WAITING_S", 0.001)
    told = []
    monkeypatch.setattr(Progress, "say", lambda _, text: told.append(text))
    with pytest.raises(EngineError):
        run(LossyFleet(replicas=0), rows(5), ledger, wait_seconds=0.05)
    assert told.count("no row runs yet: a writer is not used: another disk") > 1


def test_a_sample_counts_once_in_any_order_of_its_receipts(ledger):
    def part(seq: int, *segments: Segment) -> Receipt:
        proofs = tuple(SegmentProof(s, i, "0" * 16, 30, 20, 0, "f" * 16) for i, s in enumerate(segments))
        return replace(receipt(seq, []), segments=proofs, raw_bytes=30 * len(proofs))

    first, last, other = Segment("long", 0, 0, 3, 6), Segment("long", 1, 3, 6, 6), Segment("short", 0, 0, 3, 3)
    for order in ([last], [first, other]), ([first], [last, other]), ([first, other], [last]):
        progress = Progress(2, console=Console(file=io.StringIO()))
        driver = Driver(LossyFleet(), Manifest(), ledger, progress, task_rows=4, max_tries=3)
        for seq, segments in enumerate(order, 1):
            driver._proven(part(seq, *segments))
            driver._proven(part(seq, *segments))  # reported again, as after a flush
        assert (progress.rows, progress.raw_bytes, progress.stored_bytes) == (2, 90, 200)


@pytest.mark.parametrize("outcome", ["fine", "die", "vanish", "lose", "skip", "refuse"])
def test_no_more_large_rows_are_under_way_than_the_limit(ledger, outcome):
    fleet = LossyFleet(lambda task: outcome if task.number == 3 else "fine")
    without_receipt = []
    fleet.while_flushing = lambda: without_receipt.append(len(fleet.open))
    text = "x" * (1 << 20)
    driver = run(fleet, [Row(f"k{i}", i, text=text) for i in range(700)], ledger, task_rows=64)
    assert len(ledger._manifest.samples) + len(ledger._manifest.refused) == 700
    assert max(len(task.rows) for task in fleet.tasks) == 4  # 4 MiB
    assert max(without_receipt) in range(250, 280)  # 256 MiB, and 4 MiB for each of four tasks
    assert (driver.counts["under_way"], driver._under_way.nbytes) == (0, 0)


@pytest.mark.parametrize("outcome", ["fine", "die", "vanish", "lose", "skip", "refuse"])
def test_rows_beyond_the_limit_run_one_after_another(ledger, outcome):
    fleet = LossyFleet(lambda task: outcome if task.number == 3 else "fine")
    without_receipt = []
    fleet.while_flushing = lambda: without_receipt.append(len(fleet.open))
    messages = [{"role": "user", "content": "x" * (1 << 20)}] * 300
    run(fleet, [Row(f"k{i}", i, messages=messages) for i in range(5)], ledger, task_rows=64)
    assert len(ledger._manifest.samples) + len(ledger._manifest.refused) == 5
    assert {len(task.rows) for task in fleet.tasks} == {1}
    assert max(without_receipt) == 1


def idle_items(n, at, do):
    """``n`` refused rows, and as many that an earlier attempt stored. ``do`` is called before number ``at``."""
    for i in range(n):
        if i == at:
            do()
        yield RowFate(f"bad{i}", i, "refused", "why", 0)
        yield None


@pytest.mark.parametrize("how", ["stop", "fence", "deadline"])
def test_the_end_of_a_run_does_not_wait_for_a_usable_row(ledger, how):
    clock = [0.0]
    limits = Limits(seconds=60, clock=lambda: clock[0])
    progress = Progress(1000, console=Console(file=io.StringIO()))
    driver = Driver(LossyFleet(), ledger._manifest, ledger, progress, task_rows=4, max_tries=3, limits=limits)
    ends = {"stop": driver.stop, "fence": lambda: driver.fence("newer"), "deadline": lambda: clock.__setitem__(0, 100)}
    items = idle_items(1000, 10, ends[how])
    with pytest.raises(Fenced) if how == "fence" else nullcontext():
        driver.run(items)
    assert driver.ended == {"stop": "signal", "fence": "", "deadline": "deadline"}[how]
    assert next(items, "read to its end") != "read to its end"


def test_events_are_handled_between_rows_that_need_nothing(ledger, monkeypatch):
    monkeypatch.setattr("hsx_dist.jobs.driver.READING_S", 0.0)  # one row at a time
    fleet = LossyFleet()
    progress = Progress(1000, console=Console(file=io.StringIO()))
    driver = Driver(fleet, ledger._manifest, ledger, progress, task_rows=4, max_tries=3)
    driver.run(idle_items(1000, 10, lambda: fleet.events.append(Draining())))
    assert driver.ended == "its node drains"


@pytest.mark.parametrize("limits", [None, Limits(max_rows=1000)])
def test_a_pause_in_reading_divides_no_task_and_loses_no_time(ledger, monkeypatch, limits):
    monkeypatch.setattr("hsx_dist.jobs.driver.READING_S", 0.0)
    fleet = LossyFleet()
    waited = []
    poll = fleet.poll

    def timed(timeout):
        waited.append(timeout)
        return poll(timeout)

    fleet.poll = timed
    good = iter(rows(10))
    items = [x for _ in range(10) for x in (next(good), *[None] * 100)]
    driver = run(fleet, items, ledger, limits=limits)
    assert [len(task.rows) for task in fleet.tasks] == [4, 4, 2]
    assert len(ledger._manifest.samples) == 10
    assert driver.ended == ""
    assert waited.count(0.0) > 10 * waited.count(0.5)


def test_receipts_of_rows_with_long_reasons_stay_small(ledger):
    """A character takes up to 12 bytes in a receipt, and readers refuse receipts above 100 MB."""
    for i in range(420):
        ledger.add(RowFate(f"{i:04}" + "\U00020000" * 4_000, i, "refused", "\U00020000" * 1_000, 0))
    ledger.flush()
    receipts = list(ledger.store.list("manifest/"))
    assert len(receipts) == 2
    assert max(info.size for info in receipts) < 16 << 20
    assert len(load_manifest(ledger.store).refused) == 420
