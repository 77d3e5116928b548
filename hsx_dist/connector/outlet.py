"""Where the worker half puts pages: an ``Outlet`` owns the ring and takes pages off it on a thread of its own.

What steps call takes no lock that a writer or the network holds; ``prepared`` and, of what is not stored, ``skip`` may
wait for a local file system.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, ParamSpec, Protocol

import numpy as np

from hsx_dist.connector.affinity import any_core
from hsx_dist.connector.ring import Ring
from hsx_dist.connector.step import Expect, Skip
from hsx_dist.logger import get_logger
from hsx_dist.memory import huge_pages
from hsx_dist.observe.metrics import Meter
from hsx_dist.page import Page, Segment
from hsx_dist.text import bounded
from hsx_dist.writers.base import Sender

log = get_logger(__name__)

_P = ParamSpec("_P")


@dataclass(frozen=True, slots=True)
class Shipped:
    """Every page of ``key`` has been handed to the writers, or (``reason``) nothing of it is stored."""

    key: str
    reason: str | None = None


#: A page, and what blocks until its copy into the ring is done.
Copied = tuple[Page, Callable[[], None] | None]
#: What is shipped, or what there is to tell.
Item = Copied | Shipped


class Outlet(Protocol):
    """What the worker half sees."""

    ring: Ring
    meter: Meter
    memory: np.ndarray[Any, Any]  # uint8 [ring.capacity]

    def admit(self, segment: Segment, /) -> bool:
        """Whether the first page of a sample may be submitted now. If False, its blocks stay held. Returns at once."""
        ...

    def submit(self, *pages: Copied) -> None:
        """Ship pages whose copies were started, in the order in which they end. Returns at once."""
        ...

    def expect(self, expected: Expect) -> None:
        """A request of this rank's was scheduled for the first time, and its step begins. Returns at once."""
        ...

    def prepared(self) -> None:
        """Wait until there is what a reader of an answer relies on, of all that was expected and skipped. Its step
        is over then but for this."""
        ...

    def skip(self, skip: Skip) -> None:
        """Tell that nothing of a request will be shipped. Returns at once."""
        ...

    @property
    def pending(self) -> int:
        """What was submitted, and is not shipped yet (or not stored yet, where this process stores)."""
        ...

    def close(self, timeout: float | None = None) -> None:
        """Ship what was submitted, for at most ``timeout`` seconds, and end the thread."""
        ...


#: How many bytes of pages travel in one call to a writer, at most (a single page may be larger).
COALESCE_BYTES = 8 << 20
#: A page that would be a small call by itself waits so long for others: about a step of an engine.
LINGER_S = 0.02


class ShippingThread:
    """The queue between steps and the thread that ships; ``deliver`` is called on the thread, in order."""

    #: After so many seconds without a page ``idle`` is called.
    IDLE_S = 1.0

    def __init__(
        self,
        deliver: Callable[[list[Page], list[Shipped]], None],
        meter: Meter,
        *,
        idle: Callable[[], None] | None = None,
        least_bytes: int = 0,
        linger_s: float = 0.0,
    ):
        """``idle``: called every second without anything to ship. With it, pages are counted where they arrive.
        ``least_bytes``: fewer wait up to ``linger_s`` seconds for more, so that what delivers them need not be called
        for each."""
        self._deliver = deliver
        self._failed: dict[tuple[str, str], str] = {}  # samples of which a page was not copied, and why
        self._meter = meter
        self._idle = idle
        self._least, self._linger = least_bytes, linger_s
        self._since: deque[float] = deque()  # when each item that is not delivered was put
        meter.watch("oldest_page_seconds", self._oldest)
        self._queue: queue.SimpleQueue[Sequence[Item] | None] = queue.SimpleQueue()
        self._ahead: deque[Item | None] = deque()  # taken off the queue, and not looked at
        self._submitted = self._delivered = 0  # each written by one thread alone
        self._thread = threading.Thread(target=self._run, name="hsx-ship", daemon=True)
        with any_core():
            self._thread.start()

    def put(self, *items: Item) -> None:
        """At one go: a thread that is woken for each would take the interpreter's lock from a step that is not done."""
        self._submitted += len(items)
        self._since.extend([time.monotonic()] * len(items))
        self._queue.put(items)

    @property
    def pending(self) -> int:
        return self._submitted - self._delivered

    def _oldest(self) -> float:
        try:
            return time.monotonic() - self._since[0]
        except IndexError:
            return 0.0

    def close(self, timeout: float | None) -> bool:
        """Whether everything was shipped in time."""
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _next(self) -> Item | None:
        while True:
            try:
                return self._take(self.IDLE_S if self._idle is not None else None)
            except queue.Empty:
                assert self._idle is not None
                self._idle()

    def _take(self, seconds: float | None) -> Item | None:
        """The next item; None at the end.

        Raises:
            queue.Empty: none came within so many seconds (None: wait for ever).
        """
        while not self._ahead:
            items = self._queue.get(timeout=seconds) if seconds is None or seconds > 0 else self._queue.get_nowait()
            self._ahead.extend((None,) if items is None else items)
        return self._ahead.popleft()

    def _copied(self, items: Sequence[Item]) -> tuple[list[Page], list[Shipped]]:
        """Pages in the ring, once their copies have ended, and what there is to tell; in order. The page of a copy that
        failed carries the error to its writer, which drops the sample's other pages too."""
        last = next((ready for item in reversed(items) if not isinstance(item, Shipped) and (ready := item[1])), None)
        if last is not None:
            with suppress(Exception):  # asked again below
                last()  # the copies end in order: this thread wakes, and takes the interpreter's lock, once for all
        refs: list[Page] = []
        told: list[Shipped] = []
        for item in items:
            if isinstance(item, Shipped):
                told.append(item)
                continue
            ref, ready = item
            sample = (ref.segment.key, ref.segment.source)
            try:
                if ready is not None:
                    ready()
            except Exception as e:
                log.exception("a page of %s was not copied", ref.segment.key)
                ref = replace(ref, error=bounded(f"its states were not copied: {type(e).__name__}: {e}"))
                self._failed.setdefault(sample, ref.error)
            refs.append(ref)
            if ref.ends_sample:
                told.append(Shipped(ref.segment.key, self._failed.pop(sample, None)))
        return refs, told

    def _run(self) -> None:
        ended = False
        while not ended:
            item = self._next()
            items: list[Item] = []
            nbytes = 0
            end = time.monotonic() + self._linger
            while True:
                if item is None:
                    ended = True
                    break
                items.append(item)
                if not isinstance(item, Shipped):
                    ref = item[0]
                    # With the metadata: the pages travel as one message.
                    nbytes += ref.nbytes + (len(ref.segment.metadata) if ref.start == ref.segment.start else 0)
                if nbytes >= COALESCE_BYTES:
                    break
                wait = end - time.monotonic() if 0 < nbytes < self._least else 0.0
                try:
                    item = self._take(wait)
                except queue.Empty:
                    break
            refs, told = self._copied(items)
            before = time.monotonic()
            try:
                self._deliver(refs, told)
            except Exception:
                log.exception("%d pages were not shipped", len(refs))
            if self._idle is None:  # first: whoever finds nothing pending finds all of it counted
                count_shipped(self._meter, refs, told, time.monotonic() - before)
            self._delivered += len(items)
            for _ in items:
                self._since.popleft()


def count_shipped(meter: Meter, refs: list[Page], told: list[Shipped], seconds: float) -> None:
    """Count what was handed to the writers within ``seconds``."""
    for name, value in (
        ("pages", len(refs)),
        ("page_bytes", sum(ref.nbytes for ref in refs)),
        ("tokens", sum(ref.stop - ref.start for ref in refs)),
        ("send_seconds", seconds if refs else 0),
        ("samples", sum(s.reason is None for s in told)),
        ("skipped", sum(s.reason is not None for s in told)),
    ):
        if value:
            meter.add(name, value)


def send_pages(
    sender: Sender, refs: Sequence[Page], memory: np.ndarray[Any, Any], free: Callable[[int], None]
) -> list[tuple[Page, str]]:
    """Hand pages in ``memory`` to ``sender``; ``free(offset)`` is called for each place that may be used again.

    Returns the pages that could not be handed over, and why: their places are free too.
    """
    held = {ref.offset for ref in refs}  # places that are not free yet

    def release(page: Page) -> None:
        try:
            held.remove(page.offset)
        except KeyError:
            return  # a place that is freed twice would be given to two pages
        free(page.offset)

    pages, failed = [], []
    for ref in refs:
        try:
            pages.append(ref.attached(memory))
        except Exception as e:
            log.exception("a page of %s was not shipped", ref.segment.key)
            failed.append((ref, bounded(f"its page cannot be read: {type(e).__name__}: {e}")))
            release(ref)
    try:
        if pages:
            sender.send(pages, release)
    except Exception as e:
        # The ring must go round, and whoever waits for a sample be told, whatever the writers do.
        log.exception("%d pages were not shipped", len(pages))
        failed += [(ref, bounded(f"its pages were not shipped: {type(e).__name__}: {e}")) for ref in pages]
        for page in pages:
            release(page)
    return failed


def picklable(refs: Sequence[Page]) -> tuple[list[Page], list[tuple[Page, str]]]:
    """The pages that can cross a process border, and the others with the reason. For a call that could not be pickled
    as a whole: one bad page must not cost the others."""
    good: list[Page] = []
    bad: list[tuple[Page, str]] = []
    for ref in refs:
        try:
            ForkingPickler.dumps(ref)
        except Exception as e:
            log.exception("a page of %s cannot be passed on", ref.segment.key)
            bad.append((ref, bounded(f"its page cannot be passed on: {type(e).__name__}: {e}")))
        else:
            good.append(ref)
    return good, bad


def with_failures(told: Sequence[Shipped], failed: Sequence[tuple[Page, str]]) -> list[Shipped]:
    """``told``, corrected for pages that could not be handed over."""
    why = {ref.segment.key: text for ref, text in failed}
    return [Shipped(s.key, s.reason or why.get(s.key)) for s in told]


class LocalOutlet:
    """Ships from this process, through a ``Sender``."""

    def __init__(
        self,
        sender: Sender,
        in_flight_bytes: int,
        on_shipped: Callable[[Shipped], None] = lambda _: None,
        *,
        meter: Meter | None = None,
        least_bytes: int = 0,
        memory: np.ndarray[Any, Any] | None = None,
        sample_bytes: int = sys.maxsize,
    ):
        """``least_bytes``: fewer wait a moment for more, where ``sender`` calls somebody. ``memory``: where the ring
        lies, uint8 of ``in_flight_bytes``, to share it with another process; None: this allocates it. ``sample_bytes``:
        limit of the ring's ``claim``."""
        self.meter = Meter() if meter is None else meter
        self.ring = Ring(in_flight_bytes, sample_bytes)
        self.meter.watch("ring_bytes", lambda: self.ring.used_bytes)
        # Touched here: page faults in the step path cost three times the copy.
        self.memory = huge_pages.zeroed(self.ring.capacity) if memory is None else memory
        self._sender = sender
        self._on_shipped = on_shipped
        self._thread = ShippingThread(
            self._ship,
            self.meter,
            least_bytes=min(least_bytes, self.ring.capacity // 4),
            linger_s=LINGER_S,
        )

    def admit(self, _: Segment, /) -> bool:
        return True

    def submit(self, *pages: Copied) -> None:
        self._thread.put(*pages)

    def expect(self, expected: Expect) -> None:
        pass  # whoever ships for a run asks receipts

    def prepared(self) -> None:
        pass

    def skip(self, skip: Skip) -> None:
        self._thread.put(Shipped(skip.key, skip.reason))

    @property
    def pending(self) -> int:
        return self._thread.pending

    def _lost(self, segment: Segment, why: str) -> None:
        """A page of ``segment`` was not shipped."""

    def _ship(self, refs: list[Page], told: list[Shipped]) -> None:
        failed = send_pages(self._sender, refs, self.memory, self.ring.free)
        for ref, why in failed:
            _each_alone(self._lost, ref.segment, why)
        for shipped in with_failures(told, failed):
            _each_alone(self._on_shipped, shipped)

    def close(self, timeout: float | None = None) -> None:
        if self._thread.close(timeout):
            self._sender.flush()


def _each_alone(call: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> None:
    """Call, and log an error: the next sample must be told all the same."""
    try:
        call(*args, **kwargs)
    except Exception:
        log.exception("what became of a sample could not be told")


_REGISTERED: dict[str, Outlet] = {}


def register(name: str, outlet: Outlet) -> None:
    """Make an outlet known to an engine that will be started in this process (``via="process"``)."""
    _REGISTERED[name] = outlet


def unregister(name: str) -> None:
    _REGISTERED.pop(name, None)


def registered(name: str) -> Outlet:
    return _REGISTERED[name]
