"""Samples as their receipts appear: training while the extraction runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hsx_dist.errors import FormatError, NotFound, RunStalled
from hsx_dist.format.json_objects import count, list_of, text
from hsx_dist.format.manifest import Manifest, Receipt, SampleRecord
from hsx_dist.format.names import attempt_name, parse_receipt_name, receipt_name
from hsx_dist.format.place import Place
from hsx_dist.format.receipt_log import read_entry
from hsx_dist.format.runs import newest_attempt, read_complete, read_heartbeat, scan_receipts
from hsx_dist.store import Store

_Writer = tuple[int, str]
#: Name in a position of the keys that were lost; those of writers have a slash.
_LOST = "lost"
#: Names in one answer of S3 to a listing.
_PAGE = 1000
#: Seconds between a driver's last sign of life and the manifest that it leaves, at most.
_COMPLETING_S = 30.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A sample that has become whole, and the receipt that made it so."""

    record: SampleRecord
    writer: _Writer
    seq: int


def has_position(store: Store, position: Mapping[str, Any]) -> bool:
    """Whether the run of ``store`` has all receipts that a follower's ``position`` names."""
    for name, (seq, keys) in _writers(position):
        attempt, _, writer = name.partition("/")
        try:
            store.head(receipt_name(int(attempt), writer, seq if keys else seq - 1))
        except (NotFound, ValueError, FormatError):  # or no receipt has such a name
            return False
    return True


def position_check(value: Any) -> str | None:
    """Whether it is a follower's ``position``: a ``Check``."""
    lost = list_of(text)
    fine = isinstance(value, Mapping) and lost(value.get(_LOST, [])) is None
    for name, at in _writers(value) if fine else ():
        attempt, slash, writer = name.partition("/")
        fine &= bool(slash and writer) and attempt.isascii() and attempt.isdecimal() and len(attempt) < 10
        fine &= isinstance(at, list | tuple) and len(at) == 2 and count(at[0]) is None and lost(at[1]) is None
    return None if fine else "a follower's position: writers, and what was read of each"


def _writers(position: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, at) for name, at in position.items() if name != _LOST)


class Follower:
    """Yields each sample of a run once, as soon as it is proven, and ends when the run is complete.

    Asks each writer's next receipt for by its name; lists only to find writers that are new. A follower that is resumed
    yields a sample again if its part was lost meanwhile and an attempt computed it again.

    Args:
        place: the run.
        poll_seconds: pause when there is nothing new.
        discover_seconds: how often to look for new writers.
        stalled_seconds: after so long without a sign of life of the newest attempt (its heartbeat changes, by this
            process's clock), or without any attempt, ``RunStalled``.
        state: what ``position`` was, to go on behind it.
    """

    def __init__(
        self,
        place: Place,
        *,
        poll_seconds: float = 1.0,
        discover_seconds: float = 10.0,
        stalled_seconds: float = 120.0,
        state: Mapping[str, Any] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._place, self._store = place, place.store
        self._poll, self._discover, self._stalled = poll_seconds, discover_seconds, stalled_seconds
        self._sleep, self._clock = sleep, clock
        self._next: dict[_Writer, int] = {}
        self._sealed: set[_Writer] = set()
        self._manifest = Manifest()
        self._seen: set[str] = set()
        # Per writer: the first receipt that is not behind the consumer, and which of its samples are done.
        self._done: dict[_Writer, tuple[int, set[str]]] = {}
        for name, (seq, keys) in _writers(state or {}):
            attempt, _, writer = name.partition("/")
            self._done[int(attempt), writer] = (seq, set(keys))
            self._seen.update(keys)
        # Samples whose part was gone: key → as it was then, None after a resume.
        self._lost: dict[str, SampleRecord | None] = dict.fromkeys((state or {}).get(_LOST, ()))
        # The receipts that were read and are not behind the consumer, in the order in which they were read.
        self._open: deque[tuple[_Writer, int]] = deque()
        self._newest = 0  # attempt, as far as it is known
        self._heart: tuple[int, Any] | None = None
        self._alive = clock()

    @property
    def position(self) -> dict[str, Any]:
        """What ``done`` and ``lost`` were told, as JSON types: of each writer the first receipt that is not behind the
        consumer, and the samples that are done of it; the keys that are lost."""
        found: dict[str, Any] = {f"{a}/{w}": [seq, sorted(keys)] for (a, w), (seq, keys) in self._done.items()}
        return found | ({_LOST: sorted(self._lost)} if self._lost else {})

    def done(self, arrival: Arrival) -> None:
        """The consumer has this sample: ``position`` moves behind it. To be told in the order of arrivals.

        All receipts that were read before this one's are then behind the consumer. A sample in several segments came
        with the last of its receipts: its key stays until that one is behind the consumer, and so are then the others.
        """
        here = (arrival.writer, arrival.seq)
        while self._open and self._open[0] != here:
            writer, seq = self._open.popleft()
            self._done[writer] = (seq + 1, set())
        seq, keys = self._done.get(arrival.writer, (0, set()))
        keys = keys if seq == arrival.seq else set()
        keys.add(arrival.record.key)
        self._done[arrival.writer] = (arrival.seq, keys)
        self._lost.pop(arrival.record.key, None)

    def lost(self, arrival: Arrival) -> None:
        """As ``done``, of a sample whose part is gone: the consumer does not have it."""
        self.done(arrival)
        self._lost[arrival.record.key] = arrival.record

    def computed_again(self) -> Iterator[Arrival]:
        """To iterate after the run's end: lost samples that an attempt may have stored in other parts since. To be told
        ``given``, not ``done``."""
        for key, before in tuple(self._lost.items()):
            record = self._manifest.samples.get(key)
            if record is not None and (before is None or record.segments != before.segments):
                yield Arrival(record, (0, ""), 0)

    def given(self, arrival: Arrival) -> None:
        """The consumer has this sample, which was lost."""
        self._lost.pop(arrival.record.key, None)

    def __iter__(self) -> Iterator[Arrival | None]:
        """Arrivals; ``None`` when there is nothing new, before a pause.

        Raises:
            RunStalled: nobody is at work on the run, and it is not complete.
            RunError: the run was removed.
            StoreError, FormatError: as ``load_manifest``.
        """
        with self._place.reading():
            yield from self._follow()

    def _follow(self) -> Iterator[Arrival | None]:
        yield from self._everything()
        discovered = self._clock()
        while True:
            if self._is_complete():
                yield from self._everything()
                return
            news = False
            for arrival in self._ask():
                news = True
                yield arrival
            if self._clock() - discovered >= self._discover or not self._next:
                self._find_writers()
                discovered = self._clock()
            if not news:
                self._check_alive()
                yield None
                self._sleep(self._poll)

    def _is_complete(self) -> bool:
        self._newest = self._newest or newest_attempt(self._store)
        if not self._newest or read_complete(self._store, self._newest) is None:
            return False
        completed, self._newest = self._newest, newest_attempt(self._store)
        return completed == self._newest

    def _everything(self) -> Iterator[Arrival]:
        """All receipts that are there and not known yet."""
        found = [r for r in scan_receipts(self._store) if r.seq >= self._next.get((r.attempt, r.writer), 1)]
        found.sort(key=lambda r: r.id)  # ``done`` counts on each writer's order
        # First: a sample whose part was lost comes with the attempt that computed it again.
        self._manifest.declare_void([part for receipt in found for part in receipt.void])
        # What was done before comes first: a sample in several segments is then known as done, whichever came last.
        old = [r for r in found if r.seq < self._done.get((r.attempt, r.writer), (0,))[0]]
        new = [r for r in found if r.seq >= self._done.get((r.attempt, r.writer), (0,))[0]]
        for receipt in old:
            self._take(receipt)
        for receipt in new:
            yield from self._take(receipt)

    def _ask(self) -> Iterator[Arrival]:
        for log in sorted(self._next.keys() - self._sealed):
            while log not in self._sealed:
                try:
                    receipt = read_entry(self._store, receipt_name(*log, self._next[log]))
                except NotFound:
                    break
                if receipt is None:
                    self._sealed.add(log)
                else:
                    yield from self._take(receipt)

    def _take(self, receipt: Receipt) -> list[Arrival]:
        writer = (receipt.attempt, receipt.writer)
        self._next[writer] = max(self._next.get(writer, 1), receipt.seq + 1)
        self._manifest.add(receipt)
        if receipt.seq >= self._done.get(writer, (0,))[0]:
            self._open.append((writer, receipt.seq))
        arrivals = []
        for key in dict.fromkeys(receipt.table.keys()):
            record = None if key in self._seen else self._manifest.samples.get(key)
            if record is not None:
                self._seen.add(key)
                arrivals.append(Arrival(record, writer, receipt.seq))
        return arrivals

    def _find_writers(self) -> None:
        """One listing for all writers, and another one for each that wrote a page of receipts, to skip the rest."""
        after = None
        while True:
            last, count = None, 0
            for info in self._store.list("manifest/", after=after):
                parsed = parse_receipt_name(info.name)
                if parsed is None:
                    continue
                writer = parsed[:2]
                self._next.setdefault(writer, 1)
                last, count = writer, count + 1 if writer == last else 1
                if count == _PAGE:
                    after = f"{info.name.rpartition('/')[0]}/~"
                    break
            else:
                return

    def _check_alive(self) -> None:
        attempt = self._newest
        try:
            self._store.head(attempt_name(attempt + 1))
            self._newest = attempt = attempt + 1
        except NotFound:
            pass
        beat = read_heartbeat(self._store, attempt) if attempt else None
        heart = (attempt, None if beat is None else beat.get("value"))
        if heart != self._heart:
            self._heart, self._alive = heart, self._clock()
        # A driver says that it ended, and then completes the run.
        ended = beat is not None and beat.get("state") != "running"
        if self._clock() - self._alive >= (min(_COMPLETING_S, self._stalled) if ended else self._stalled):
            said = f"ended as {beat.get('state')!r}" if ended and beat else f"gave no sign for {self._stalled:g} s"
            raise RunStalled(
                f"{self._store.url}: expected an attempt at work, or a complete run; attempt {attempt} {said}. Start "
                "the extraction again: it goes on where it stopped, and so can its readers"
            )
