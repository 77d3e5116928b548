"""Yield samples as their receipts appear, for training while the extraction runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from hsx_dist.errors import ConfigError, FormatError, NotFound, RunStalled
from hsx_dist.format.json_objects import count, list_of, or_null, shown, text
from hsx_dist.format.manifest import Manifest, Receipt, SampleRecord
from hsx_dist.format.names import parse_receipt_name, receipt_name
from hsx_dist.format.place import Place
from hsx_dist.format.presence import exists
from hsx_dist.format.receipt_log import read_entry
from hsx_dist.format.runs import is_fenced, newest_attempt, read_complete, read_heartbeat, receipts_after
from hsx_dist.reading.order import EpochPosition
from hsx_dist.reading.select import Selection
from hsx_dist.store import Store

_Writer = tuple[int, str]
#: Makes the position, or the state, of the moment when it was taken.
Mark = Callable[[], dict[str, Any]]
#: Members of a position: keys that the consumer lacks although it has finished their receipts, and parts that gave it
#: nothing, since they were void before any of their samples arrived. Writers' members contain a slash.
_LOST, _VOID = "lost", "void"
#: Number of names in one response of S3 to a listing.
_PAGE = 1000
#: Maximum seconds between a driver's last heartbeat and its complete manifest.
_COMPLETING_S = 30.0
#: Changes of a position that are kept one by one, in addition to one for each of its entries.
_FEW_CHANGES = 1000


def has_position(store: Store, position: Mapping[str, Any]) -> bool:
    """Whether the run in ``store`` has all receipts that a follower's ``position`` names."""
    for name, (seq, keys) in _writers(position):
        attempt, _, writer = name.partition("/")
        try:
            if not exists(store, receipt_name(int(attempt), writer, seq if keys else seq - 1)):
                return False
        except (ValueError, FormatError):  # not a receipt's name
            return False
    return True


def position_check(value: Any) -> str | None:
    """A ``Check`` for a follower's ``position``."""
    lost = list_of(text)
    fine = isinstance(value, Mapping) and all(lost(value.get(name, [])) is None for name in (_LOST, _VOID))
    for name, at in _writers(value) if fine else ():
        attempt, slash, writer = name.partition("/")
        fine &= bool(slash and writer) and attempt.isascii() and attempt.isdecimal() and len(attempt) < 10
        fine &= isinstance(at, list | tuple) and len(at) == 2 and count(at[0]) is None and lost(at[1]) is None
    return None if fine else "a follower's position: for each writer a receipt's number and keys"


#: Members of the state of a data set with ``follow``.
FOLLOWED_MEMBERS = {
    **dict.fromkeys(("shards", "shard", "skipped"), count),
    "run": or_null(text),
    "position": position_check,
}


def _writers(position: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, at) for name, at in position.items() if name not in (_LOST, _VOID))


class _Done:
    """What the consumer has finished: of each writer, the first receipt that it has not, and the done samples of that.

    Changes are a log that replaces no entry, so that a mark is the log and its length.
    """

    def __init__(self, position: Mapping[str, Any]):
        self._base: dict[_Writer, tuple[int, tuple[str, ...]]] = {}
        for name, (seq, keys) in _writers(position):
            attempt, _, writer = name.partition("/")
            self._base[int(attempt), writer] = (seq, tuple(keys))
        self._first = {writer: seq for writer, (seq, _) in self._base.items()}
        # Writer, its first receipt that is not finished, and the key of a sample in it that is done.
        self._log: list[tuple[_Writer, int, str | None]] = []
        self._most = self._size()

    @property
    def keys(self) -> Iterator[str]:
        return (key for _, keys in self._base.values() for key in keys)

    def first(self, writer: _Writer) -> int:
        """The first receipt of ``writer`` that is not finished; 0 if none is known."""
        return self._first.get(writer, 0)

    def add(self, writer: _Writer, seq: int, key: str | None = None) -> None:
        """Record that ``seq`` is the first receipt that is not finished, and its sample ``key`` is done."""
        if len(self._log) >= self._most:  # as many changes as entries: on average an entry is copied once a change
            self._base, self._log = _replay(self._base, self._log, len(self._log)), []
            self._most = self._size()
        self._first[writer] = seq
        self._log.append((writer, seq, key))

    def mark(self) -> Callable[[], dict[str, Any]]:
        base, log, n = self._base, self._log, len(self._log)

        def position() -> dict[str, Any]:
            found = _replay(base, log, n)
            return {f"{attempt}/{writer}": [seq, sorted(keys)] for (attempt, writer), (seq, keys) in found.items()}

        return position

    def _size(self) -> int:
        return _FEW_CHANGES + len(self._base) + sum(1 for _ in self.keys)


def _parts_of(record: SampleRecord) -> tuple[str, ...]:
    return tuple(proof.part for proof in record.segments)


def _replay(
    base: Mapping[_Writer, tuple[int, tuple[str, ...]]], log: list[tuple[_Writer, int, str | None]], n: int
) -> dict[_Writer, tuple[int, tuple[str, ...]]]:
    """``base`` after the first ``n`` changes of ``log``."""
    found = {writer: (seq, dict.fromkeys(keys)) for writer, (seq, keys) in base.items()}
    for writer, seq, key in islice(log, n):
        before, keys = found.get(writer, (0, dict[str, None]()))
        if key is None or before != seq:
            keys = {}
        if key is not None:
            keys[key] = None
        found[writer] = (seq, keys)
    return {writer: (seq, tuple(keys)) for writer, (seq, keys) in found.items()}


class Follower:
    """Yields each sample of a run once, as soon as it is proven, and ends when the run is complete.

    Requests each writer's next receipt by name. Lists objects only to find new writers. A sample whose part was lost
    after it was done is not yielded again, also by a resumed follower, if an attempt computes the sample again.

    Args:
        place: the run.
        poll_seconds: pause if there is nothing new.
        discover_seconds: interval between searches for new writers.
        stalled_seconds: raise ``RunStalled`` after this time without an attempt, or without a change of the newest
            attempt's heartbeat. Measured with this process's clock.
        state: an earlier ``position`` to continue from.
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
        # Key of each yielded sample → the receipt that completed it; ``None`` if it was yielded before a resume.
        self._came: dict[str, tuple[_Writer, int] | None] = {}
        self._done = _Done(state or {})
        self._came.update(dict.fromkeys(self._done.keys))
        # Keys are only added to the dicts below, so that a ``mark`` is their lengths.
        # Samples whose part was missing: key → the parts of its segments at that time, None after a resume.
        self._lost: dict[str, tuple[str, ...] | None] = dict.fromkeys((state or {}).get(_LOST, ()))
        self._given: dict[str, None] = {}  # those of them that the consumer has now
        void = state.get(_VOID) if state else ()  # None: a state of an earlier version
        self._void: dict[str, None] | None = None if void is None else dict.fromkeys(void)
        # Receipts that were read and that the consumer has not finished, in reading order.
        self._open: deque[tuple[_Writer, int]] = deque()
        self._newest = 0  # the newest known attempt
        self._heart: tuple[int, Any] | None = None
        self._alive = clock()

    @property
    def position(self) -> dict[str, Any]:
        """The state of ``done`` and ``lost``, as JSON types.

        Each writer maps to the first receipt that the consumer has not finished, and the keys of its done samples. The
        lost keys and the void parts follow.
        """
        return self.mark()()

    def mark(self) -> Mark:
        """Mark the present ``position``. Takes constant time, because each item of a data set has a mark."""
        done, lost, given = self._done.mark(), len(self._lost), len(self._given)
        void, parts = self._void, len(self._void or ())

        def position() -> dict[str, Any]:
            left = sorted(set(islice(self._lost, lost)).difference(islice(self._given, given)))
            found = done() | ({_LOST: left} if left else {})
            return found if void is None else found | {_VOID: list(islice(void, parts))}

        return position

    def done(self, record: SampleRecord) -> None:
        """Record that the consumer has this sample, and move ``position`` past it. Call it in the order of iteration.

        The consumer has then finished all receipts that were read before the sample's receipt. The receipt of a sample
        in several segments is the last one read. ``position`` keeps the sample's key until the consumer has finished
        that receipt; by then it has finished the others too.
        """
        self._pass(record.key)
        if record.key in self._lost:
            self._given[record.key] = None

    def _pass(self, key: str) -> None:
        here = self._came[key]
        assert here is not None, "a sample that was done before the resume is not yielded again"
        while self._open and self._open[0] != here:
            writer, seq = self._open.popleft()
            self._done.add(writer, seq + 1)
        self._done.add(*here, key)

    def lost(self, record: SampleRecord) -> None:
        """Record a sample that the consumer could not read, since its part is missing. Call it in place of ``done``."""
        self._pass(record.key)
        self._lost[record.key] = _parts_of(record)

    def computed_again(self) -> Iterator[SampleRecord]:
        """Yield lost samples that an attempt may have stored again in other parts. Iterate after the run's end.

        Call ``given`` for each yielded sample, not ``done``.
        """
        for key, before in [(key, before) for key, before in self._lost.items() if key not in self._given]:
            record = self._manifest.samples.get(key)
            if record is not None and before != _parts_of(record):
                yield record

    def given(self, record: SampleRecord) -> None:
        """Record that the consumer now has this sample, which was recorded as lost."""
        self._given[record.key] = None

    def __iter__(self) -> Iterator[SampleRecord | None]:
        """Yield samples that have become whole. Yields ``None`` before a pause, if there is nothing new.

        Raises:
            RunStalled: no driver works on the run, and it is not complete.
            RunError: the run was removed.
            StoreError, FormatError: as ``load_manifest``.
        """
        with self._place.reading():
            yield from self._follow()

    def _follow(self) -> Iterator[SampleRecord | None]:
        yield from self._everything(read_complete(self._store))
        discovered = self._clock()
        while True:
            if (complete := self._completion()) is not None:
                yield from self._everything(complete)
                # A newer attempt may have declared parts lost before these receipts were read, to compute them again.
                if not is_fenced(self._store, self._newest):
                    return
            news = False
            for record in self._ask():
                news = True
                yield record
            if self._clock() - discovered >= self._discover or not self._next:
                self._find_writers()
                discovered = self._clock()
            if not news:
                self._check_alive()
                yield None
                self._sleep(self._poll)

    def _completion(self) -> dict[str, Any] | None:
        """The completion object of the newest attempt, if it is complete."""
        self._newest = self._newest or newest_attempt(self._store)
        complete = read_complete(self._store, self._newest) if self._newest else None
        if complete is None:
            return None
        completed, self._newest = self._newest, newest_attempt(self._store)
        return complete if completed == self._newest else None

    def _everything(self, complete: Mapping[str, Any] | None) -> Iterator[SampleRecord]:
        """Read all stored receipts that are not known yet, and yield the samples that they complete."""
        scanned = receipts_after(self._store, complete)
        found = [r for r in scanned if r.seq >= self._next.get((r.attempt, r.writer), 1)]
        found.sort(key=lambda r: r.id)  # ``done`` relies on each writer's order
        void = [part for receipt in found for part in receipt.void]
        # Take finished receipts first. A sample in several segments that was done is then known, in any order.
        old = [r for r in found if r.seq < self._done.first((r.attempt, r.writer))]
        new = [r for r in found if r.seq >= self._done.first((r.attempt, r.writer))]
        if self._void is None:
            # Parts that did give samples may be among them: these samples are yielded again. No sample is left out.
            self._void = dict.fromkeys(void)
        self._take_finished(old)
        # Void the lost parts before new receipts: the attempt that computed their samples again then completes them.
        self._declare_void(void)
        for key in self._lost if old else ():  # without a receipt from which ``computed_again`` could yield it
            if self._came.get(key) is not None and key not in self._manifest.samples:
                del self._came[key]
        for receipt in new:
            yield from self._take(receipt)

    def _take_finished(self, receipts: Sequence[Receipt]) -> None:
        """Add receipts whose samples are done, also those in parts that were declared void later."""
        self._manifest.declare_void(list(self._void or ()))
        for receipt in receipts:
            self._take(replace(receipt, void=()) if receipt.void else receipt)

    def _ask(self) -> Iterator[SampleRecord]:
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

    def _take(self, receipt: Receipt) -> Iterator[SampleRecord]:
        """Add a receipt. Return the samples that it completes, each made when it is yielded: a record takes a kilobyte,
        and a receipt may name a million."""
        writer = (receipt.attempt, receipt.writer)
        self._next[writer] = max(self._next.get(writer, 1), receipt.seq + 1)
        self._declare_void(receipt.void)
        self._manifest.add(receipt)
        if receipt.seq >= self._done.first(writer):
            self._open.append((writer, receipt.seq))
            if receipt.part is not None and receipt.part not in self._manifest.parts:
                self._omit(receipt)
        samples = self._manifest.samples
        keys = dict.fromkeys(receipt.table.keys())
        arrived = [key for key in keys if key not in self._came and key in samples]
        self._came.update(dict.fromkeys(arrived, (writer, receipt.seq)))
        return map(samples.__getitem__, arrived)

    def _declare_void(self, parts: Sequence[str]) -> None:
        """Treat ``parts`` as lost. Other parts may complete their samples."""
        known = [self._manifest.parts[part] for part in parts if part in self._manifest.parts]
        self._manifest.declare_void(parts)
        for receipt in known:
            self._omit(receipt)

    def _omit(self, receipt: Receipt) -> None:
        """Record the samples of a void part that have not arrived. A resume counts the others of a finished receipt as
        done. Of most void parts either all or none arrived: the part's name is far shorter than its keys."""
        keys = dict.fromkeys(receipt.table.keys())
        omitted = [key for key in keys if key not in self._came]
        if len(omitted) < len(keys):
            for key in omitted:
                self._lost.setdefault(key, ())
        elif receipt.part is not None and self._void is not None:
            self._void[receipt.part] = None

    def _find_writers(self) -> None:
        """Find new writers with one listing. After a full page of one writer, a new listing skips the writer's rest."""
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
        if is_fenced(self._store, attempt):
            self._newest = attempt = attempt + 1
        beat = read_heartbeat(self._store, attempt) if attempt else None
        heart = (attempt, None if beat is None else beat.get("value"))
        if heart != self._heart:
            self._heart, self._alive = heart, self._clock()
        # A driver records its end in the heartbeat first, and then completes the run.
        ended = beat is not None and beat.get("state") != "running"
        if self._clock() - self._alive >= (min(_COMPLETING_S, self._stalled) if ended else self._stalled):
            said = (
                f"ended as {shown(beat.get('state'))}"
                if ended and beat
                else f"had no heartbeat for {self._stalled:g} s"
            )
            raise RunStalled(
                f"{self._store.url}: expected a running attempt or a complete run, got attempt {attempt}, which "
                f"{said}. Start the extraction again: it resumes, and then its readers can resume too"
            )


def require_followable(source: object, shuffle: bool, repeat: bool) -> None:
    """Raise ``ConfigError`` if a data set with these arguments cannot follow."""
    if shuffle or repeat:
        raise ConfigError(
            f"follow: expected shuffle=False and repeat=False, got {shuffle} and {repeat}. Samples are yielded in the "
            "order in which they are proven"
        )
    if isinstance(source, Selection):
        raise ConfigError("follow: expected a run, got a Selection, which has no later samples. Pass its run")


@dataclass(slots=True)
class Iteration:
    """Position of an iteration after its last item. ``ended``: the iteration has raised ``StopIteration``."""

    at: EpochPosition | Follower
    ended: bool = False
