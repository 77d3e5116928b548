"""The engine's end of a transport: the ring into which steps copy pages, and the thread that empties it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ParamSpec

import numpy as np

from hsx_dist.logger import get_logger
from hsx_dist.memory import huge_pages
from hsx_dist.observe.metrics import Meter
from hsx_dist.page import Page, Segment
from hsx_dist.text import bounded
from hsx_dist.transport.ring import Ring
from hsx_dist.transport.shipping import SHIP_LINGER_S, Copied, Shipped, ShippingThread
from hsx_dist.writers.base import Sender

log = get_logger(__name__)

_P = ParamSpec("_P")


class LocalEnd:
    """Ships pages through ``sender``. Methods that steps call take no lock that a writer or the network holds."""

    def __init__(
        self,
        sender: Sender,
        in_flight_bytes: int,
        on_shipped: Callable[[Shipped], None] = lambda _: None,
        *,
        on_lost: Callable[[Segment, str], None] = lambda *_: None,
        meter: Meter | None = None,
        least_bytes: int = 0,
        memory: np.ndarray[Any, Any] | None = None,
        sample_bytes: int = sys.maxsize,
        idle: Callable[[], None] | None = None,
    ):
        """Allocate the ring and start the shipping thread.

        Args:
            on_lost: called with the segment of a page that could not be sent, and the reason.
            least_bytes: pages with fewer bytes in total wait briefly for more. For a ``sender`` that calls another
                process.
            memory: the ring's memory, uint8 of ``in_flight_bytes``, if another process also maps it; None: allocate.
            sample_bytes: limit of the ring's ``claim``.
            idle: called every second without pages.
        """
        self.meter = Meter() if meter is None else meter
        self.ring = Ring(in_flight_bytes, sample_bytes)
        self.meter.watch("ring_bytes", lambda: self.ring.used_bytes)
        # Zeroed now: page faults during a step would take three times as long as the copy.
        self.memory = huge_pages.zeroed(self.ring.capacity) if memory is None else memory
        self._sender = sender
        self._on_shipped = on_shipped
        self._on_lost = on_lost
        self._failures: dict[str, str] = {}  # reasons by key, of samples whose last page is not shipped yet
        self._thread = ShippingThread(
            self._ship,
            self.meter,
            idle=idle,
            least_bytes=min(least_bytes, self.ring.capacity // 4),
            linger_s=SHIP_LINGER_S,
        )

    def submit(self, *pages: Copied) -> None:
        """Ship pages whose copies have started, in the order in which the copies end. Returns at once."""
        self._thread.put(*pages)

    def skip(self, key: str, reason: str, column: int = 0, columns: int = 1, *, final: bool = False) -> None:
        """Report that nothing of a sample's column is stored, after all submitted pages. Returns at once."""
        self._thread.put(Shipped(key, reason, column, columns, final))

    @property
    def pending(self) -> int:
        """Number of submitted pages and reports that are not shipped yet."""
        return self._thread.pending

    def close(self, timeout: float | None = None) -> None:
        """Ship all submitted pages within ``timeout`` seconds, and end the thread."""
        if self._thread.close(timeout):
            self._sender.flush()

    def _ship(self, pages: list[Page], shipped: list[Shipped]) -> None:
        before = time.monotonic()
        failed = hand_over(self._sender, pages, self.memory, lambda page: self.ring.free(page.offset))
        for page, why in failed:
            self._failures.setdefault(page.segment.key, why)
            _each_alone(self._on_lost, page.segment, why)
        shipped = with_failures(shipped, self._failures)
        self._report(pages, shipped, time.monotonic() - before)

    def _report(self, pages: list[Page], shipped: list[Shipped], seconds: float) -> None:
        count_shipped(self.meter, pages, shipped, seconds)
        for one in shipped:
            _each_alone(self._on_shipped, one)


def hand_over(
    sender: Sender, pages: Sequence[Page], memory: np.ndarray[Any, Any], free: Callable[[Page], None]
) -> list[tuple[Page, str]]:
    """Attach pages to ``memory`` and send them.

    ``free(page)`` is called exactly once for each page, when its bytes in the ring may be reused. Returns the pages
    that could not be sent, and the reasons; their bytes are free too.
    """
    held = {page.offset for page in pages}  # offsets that are not free yet

    def release(page: Page) -> None:
        try:
            held.remove(page.offset)
        except KeyError:
            return  # bytes that are freed twice would be allocated to two pages
        free(page)

    attached, failed = [], []
    for page in pages:
        try:
            attached.append(page.attached(memory))
        except Exception as e:
            log.exception("a page of %s was not shipped", page.segment.key)
            failed.append((page, bounded(f"its page cannot be read: {type(e).__name__}: {e}")))
            release(page)
    try:
        if attached:
            sender.send(attached, release)
    except Exception as e:
        # If the writers fail, the ring must still be freed, and every waiting reader must get a response.
        log.exception("%d pages were not shipped", len(attached))
        failed += [(page, bounded(f"its pages were not shipped: {type(e).__name__}: {e}")) for page in attached]
        for page in attached:
            release(page)
    return failed


def with_failures(shipped: Sequence[Shipped], failures: dict[str, str]) -> list[Shipped]:
    """Add the reasons in ``failures`` to ``shipped``, for samples with a page that was not sent; pop those reasons."""
    return [replace(s, reason=failures.pop(s.key, None) or s.reason) for s in shipped]


def count_shipped(meter: Meter, pages: list[Page], shipped: list[Shipped], seconds: float) -> None:
    """Count pages and samples that were sent to the writers in ``seconds``."""
    for name, value in (
        ("pages", len(pages)),
        ("page_bytes", sum(page.nbytes for page in pages)),
        ("tokens", sum(page.stop - page.start for page in pages)),
        ("send_seconds", seconds if pages else 0),
        # A sample counts with its last column.
        ("samples", sum(s.reason is None and s.column == s.columns - 1 for s in shipped)),
        ("skipped", sum(s.reason is not None for s in shipped)),
    ):
        if value:
            meter.add(name, value)


def _each_alone(call: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> None:
    """Call, and log an error instead of raising it, so that the next sample is still reported."""
    try:
        call(*args, **kwargs)
    except Exception:
        log.exception("the outcome of a sample could not be reported")


_REGISTERED: dict[str, LocalEnd] = {}


def register(name: str, end: LocalEnd) -> None:
    """Register an end for an engine of this process with ``transport: inline`` and ``address: name``."""
    _REGISTERED[name] = end


def unregister(name: str) -> None:
    _REGISTERED.pop(name, None)


def registered(name: str) -> LocalEnd:
    return _REGISTERED[name]
