"""The writers' end of a transport, in a process without the engine. It takes pages off the engine's ring."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from hsx_dist.observe.metrics import Series
from hsx_dist.page import Page, Segment
from hsx_dist.transport.channel import ReturnQueue
from hsx_dist.transport.local_end import hand_over, with_failures
from hsx_dist.transport.shipping import Shipped
from hsx_dist.writers.base import Sender

#: Seconds between two reports of the writers' metrics.
TELL_S = 1.0


class RemoteEnd:
    """Sends the pages from ``connection`` to ``sender``. ``returns`` sends freed offsets and events to the engine."""

    def __init__(
        self,
        connection: Connection,
        memory: np.ndarray[Any, Any],
        sender: Sender,
        returns: ReturnQueue,
        *,
        on_lost: Callable[[Segment, str], None] = lambda *_: None,
        on_shipped: Callable[[list[Page], list[Shipped], float], None] | None = None,
        on_numbers: Callable[[Mapping[Series, float]], None] = lambda _: None,
    ):
        """Make the end of ``connection``. ``run`` serves it.

        Args:
            on_lost: called with the segment of a page that could not be read or sent, and the reason.
            on_shipped: called with the sent pages, the ended samples and the seconds that sending took; None: only the
                segments' events count.
            on_numbers: called with the engine's metrics.
        """
        self._connection = connection
        self._memory = memory
        self._sender = sender
        self._returns = returns
        self._on_lost = on_lost
        self._on_shipped = on_shipped
        self._on_numbers = on_numbers
        self._segments: dict[str, Segment] = {}  # by source, with the metadata of their first pages
        self._failures: dict[str, str] = {}  # reasons by key, of samples that are not reported yet

    def run(self, alive: Callable[[], bool] = lambda: True) -> None:
        """Receive messages until the engine ends the connection or dies.

        ``alive`` is called after a second without messages and returns whether the engine still runs: the connection
        stays open if another process inherited the engine's end.
        """
        reported_at = time.monotonic()
        with contextlib.suppress(EOFError, OSError):
            while True:
                if self._connection.poll(TELL_S):
                    if not self._receive():
                        return
                elif not alive():
                    return
                if time.monotonic() - reported_at >= TELL_S:
                    reported_at = time.monotonic()
                    self._returns.numbers()

    def _receive(self) -> bool:
        """Receive one message. Returns False at the end. A method, so that an idle thread holds no segment's
        metadata."""
        message = self._connection.recv()
        if message is not None:
            self._take(*message)
        return message is not None

    def _take(self, pages: list[Page], shipped: list[Shipped], numbers: Mapping[Series, float]) -> None:
        if numbers:
            self._on_numbers(numbers)
        before = time.monotonic()
        whole, failed = [], []
        for page in pages:
            self._returns.took(page.nbytes)
            if (described := self._described(page)) is not None:
                whole.append(described)
            else:
                self._returns.free(page)
                failed.append((page, "not all of its pages arrived"))
        failed += hand_over(self._sender, whole, self._memory, self._returns.free)
        for page, why in failed:
            self._segments.pop(page.segment.source, None)
            self._on_lost(page.segment, why)
        if self._on_shipped is not None:
            for page, why in failed:
                self._failures.setdefault(page.segment.key, why)
            self._on_shipped(pages, with_failures(shipped, self._failures), time.monotonic() - before)

    def _described(self, page: Page) -> Page | None:
        """Return the page with its complete segment, which only the first page carries; None if that page was lost."""
        source = page.segment.source
        if page.first:
            self._segments[source] = page.segment
        segment = self._segments.get(source)
        if page.last:
            self._segments.pop(source, None)
        return None if segment is None else replace(page, segment=segment)
