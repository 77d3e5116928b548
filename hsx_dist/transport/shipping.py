"""The queue between an engine's steps and the thread that sends pages to writers."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from hsx_dist.logger import get_logger
from hsx_dist.observe.metrics import Meter
from hsx_dist.page import Page
from hsx_dist.text import bounded
from hsx_dist.transport.affinity import any_core

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Shipped:
    """Every page of a column of ``key`` was sent to the writers, or nothing of the column is stored (``reason``).

    ``final``: the reason is a fact of the row, so another try would store nothing either.
    """

    key: str
    reason: str | None = None
    column: int = 0
    columns: int = 1
    final: bool = False


#: A page, and a call that blocks until its copy into the ring is done.
Copied = tuple[Page, Callable[[], None] | None]
#: A page to ship, or a report.
QueueItem = Copied | Shipped

#: Limit of the bytes of pages in one call to a writer. A single page may be larger.
COALESCE_BYTES = 8 << 20
#: Seconds that a small page waits for others, so that they share a call: about a step of an engine.
SHIP_LINGER_S = 0.02


class ShippingThread:
    """The queue between steps and the shipping thread, which calls ``deliver`` in order."""

    #: ``idle`` is called after this many seconds without a page.
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
        """Start the thread.

        Args:
            idle: called every second without a page or report.
            least_bytes: pages with fewer bytes in total wait up to ``linger_s`` seconds for more. ``deliver`` is then
                called less often.
        """
        self._deliver = deliver
        self._failed: dict[tuple[str, str], str] = {}  # reasons by sample, for samples with a page that was not copied
        self._idle = idle
        self._least, self._linger = least_bytes, linger_s
        self._since: deque[float] = deque()  # time of ``put`` of each undelivered item
        meter.watch("oldest_page_seconds", self._oldest)
        self._queue: queue.SimpleQueue[Sequence[QueueItem] | None] = queue.SimpleQueue()
        self._ahead: deque[QueueItem | None] = deque()  # taken off the queue, not processed yet
        self._submitted = self._delivered = 0  # each is written by one thread only
        self._thread = threading.Thread(target=self._run, name="hsx-ship", daemon=True)
        with any_core():
            self._thread.start()

    def put(self, *items: QueueItem) -> None:
        """Add items with one wake-up: a wake-up per item would take the GIL several times from the running step."""
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
        """Ship the queued items and end the thread. Returns whether that was done within ``timeout`` seconds."""
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _next(self) -> QueueItem | None:
        while True:
            try:
                return self._take(self.IDLE_S if self._idle is not None else None)
            except queue.Empty:
                assert self._idle is not None
                try:
                    self._idle()
                except Exception:  # without this thread, no page would be shipped any more
                    log.exception("the metrics of an idle engine were not sent")

    def _take(self, seconds: float | None) -> QueueItem | None:
        """Return the next item; None at the end.

        Raises:
            queue.Empty: there was no item within ``seconds`` (None: wait for ever).
        """
        while not self._ahead:
            items = self._queue.get(timeout=seconds) if seconds is None or seconds > 0 else self._queue.get_nowait()
            self._ahead.extend((None,) if items is None else items)
        return self._ahead.popleft()

    def _copied(self, items: Sequence[QueueItem]) -> tuple[list[Page], list[Shipped]]:
        """Wait for the copies of ``items``. Returns pages and reports, in order.

        A page whose copy failed carries the error to its writer, which then drops the sample's other pages too.
        """
        last = next((ready for item in reversed(items) if not isinstance(item, Shipped) and (ready := item[1])), None)
        if last is not None:
            with suppress(Exception):  # called again below
                last()  # copies end in order: waiting for the last one takes the GIL only once
        refs: list[Page] = []
        ended: list[Shipped] = []
        for item in items:
            if isinstance(item, Shipped):
                ended.append(item)
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
                segment = ref.segment
                ended.append(Shipped(segment.key, self._failed.pop(sample, None), segment.column, segment.columns))
        return refs, ended

    def _run(self) -> None:
        while self._ship_next():
            pass

    def _ship_next(self) -> bool:
        """Ship the next items together. Returns False at the end. A method, so that an idle thread holds no
        metadata."""
        item = self._next()
        items: list[QueueItem] = []
        nbytes = 0
        end = time.monotonic() + self._linger
        while item is not None:
            items.append(item)
            if not isinstance(item, Shipped):
                page = item[0]
                # Includes the metadata, which is in the same message.
                nbytes += page.nbytes + (len(page.segment.metadata) if page.start == page.segment.start else 0)
            if nbytes >= COALESCE_BYTES:
                break
            wait = end - time.monotonic() if 0 < nbytes < self._least else 0.0
            try:
                item = self._take(wait)
            except queue.Empty:
                break
        pages, ended = self._copied(items)
        try:
            self._deliver(pages, ended)
        except Exception:
            log.exception("%d pages were not shipped", len(pages))
        self._delivered += len(items)
        for _ in items:
            self._since.popleft()
        return item is not None
