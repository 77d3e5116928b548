"""The end of a transport in a process without the engine: takes pages off the ring that the engine's process fills."""

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

#: How often the writers' numbers are sent.
TELL_S = 1.0


class RemoteEnd:
    """Hands what ``connection`` brings to ``sender``; ``returns`` carries free places and news to the engine."""

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
        """``on_lost``: a page of a segment could not be read or sent, and why. ``on_shipped``: pages were handed over
        within so many seconds, or samples have ended; None: only the segments' events count. ``on_numbers``: what the
        engine counted."""
        self._connection = connection
        self._memory = memory
        self._sender = sender
        self._returns = returns
        self._on_lost = on_lost
        self._on_shipped = on_shipped
        self._on_numbers = on_numbers
        self._segments: dict[str, Segment] = {}  # by source, as their first pages described them
        self._failures: dict[str, str] = {}  # by key, of samples that are still to be reported

    def run(self, alive: Callable[[], bool] = lambda: True) -> None:
        """Take what comes until the engine ends it or is gone. ``alive`` is called after a second of silence: whether
        the engine still runs, as another process may have its end of the connection."""
        told = time.monotonic()
        with contextlib.suppress(EOFError, OSError):
            while True:
                if self._connection.poll(TELL_S):
                    if not self._receive():
                        return
                elif not alive():
                    return
                if time.monotonic() - told >= TELL_S:
                    told = time.monotonic()
                    self._returns.numbers()

    def _receive(self) -> bool:
        """Take one message. False: the engine ends. A method, so that an idle thread holds no segment's metadata."""
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
                failed.append((page, "not all of its pages came"))
        failed += hand_over(self._sender, whole, self._memory, self._returns.free)
        for page, why in failed:
            self._segments.pop(page.segment.source, None)
            self._on_lost(page.segment, why)
        if self._on_shipped is not None:
            for page, why in failed:
                self._failures.setdefault(page.segment.key, why)
            self._on_shipped(pages, with_failures(shipped, self._failures), time.monotonic() - before)

    def _described(self, page: Page) -> Page | None:
        """The page with its whole segment, which only the first page carries; None if that one was lost."""
        source = page.segment.source
        if page.first:
            self._segments[source] = page.segment
        segment = self._segments.get(source)
        if page.last:
            self._segments.pop(source, None)
        return None if segment is None else replace(page, segment=segment)
