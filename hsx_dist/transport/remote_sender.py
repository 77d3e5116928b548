"""Sending pages to the writers of another process: a ``PageServer``, or a process that is started for this engine.

Both processes map the ring's memory, and messages carry pages without their data. The peer returns freed offsets. A
started process (``writer_process``) also returns events, metrics and log records.

A started process outlives its engine by at most ``drain_seconds``, to store the pages that it received. If it dies, its
segments are reported as lost, and the next pages start another process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

from hsx_dist.errors import HsxError
from hsx_dist.format.receipt import Receipt
from hsx_dist.logger import get_logger
from hsx_dist.memory.shared import map_memory, reserve
from hsx_dist.observe.metrics import Meter
from hsx_dist.page import Page, Segment
from hsx_dist.transport.channel import Peer, message, packed
from hsx_dist.writers.events import Event, Lost

log = get_logger(__name__)

#: Seconds between two attempts to start a process. Until the next attempt, samples fail at once.
RESTART_S = 5.0
#: The other process' name in the engine's meter.
SOURCE = "writers"


@dataclass(slots=True)
class _UnsettledSource:
    """A source with sent pages. ``whole``: the last page was sent. ``reported``: as lost, before its last page."""

    segment: Segment
    whole: bool = False
    reported: bool = False


class RemoteSender:
    """A ``Sender`` of pages in ``memory``.

    ``on_event`` is called from a separate thread. With a started process it gets an event for every source, also if the
    process dies. With a ``PageServer`` it gets only the segments that could not be sent: the server reports the others.
    """

    def __init__(
        self,
        connect: Callable[[int], Peer],
        ring_bytes: int,
        on_event: Callable[[Event], None],
        meter: Meter,
        *,
        drain_seconds: float = 0.0,
    ):
        """``connect``: offers a descriptor of the ring to a peer, and returns the peer after it has accepted.

        Raises:
            HsxError: no peer accepts.
            OSError: there is not enough memory for the ring.
        """
        self._connect = connect
        self._on_event = on_event
        self._meter = meter
        self._drain_seconds = drain_seconds
        self._ring = reserve(ring_bytes)
        self.memory: np.ndarray[Any, Any] | None = map_memory(self._ring, ring_bytes)
        self._state = threading.Condition()
        self._held: dict[int, Callable[[], None]] = {}  # by offset: frees the page's bytes
        self._copies: dict[str, _UnsettledSource] = {}  # sources that are neither stored nor lost
        self._broken: set[str] = set()  # sources reported as lost before their last page
        self._closing = self._starting = False
        self._failed_at: float | None = None
        self._restarts = False  # the peer is a process that this one started
        self._peer: Peer | None = None
        self._reader: threading.Thread | None = None
        try:
            self._start()
        except BaseException:
            os.close(self._ring)
            raise

    @property
    def pid(self) -> int | None:
        """Id of the running process that was started; None if there is none."""
        peer = self._peer
        return peer.process.pid if peer is not None and peer.process is not None else None

    def _start(self) -> None:
        peer: Peer | None = None
        with self._state:
            self._starting = not self._closing
            if not self._starting:
                return
        try:
            peer = self._connect(self._ring)
        finally:
            with self._state:
                self._starting = False
                if ended := self._closing:
                    os.close(self._ring)  # ``_end`` leaves it open while a peer connects
                elif peer is not None:
                    self._peer, self._restarts = peer, peer.process is not None
                    self._reader = threading.Thread(target=self._read, args=(peer,), name="hsx-free", daemon=True)
                    self._reader.start()
        if ended:
            peer.kill()

    # -- pages out ------------------------------------------------------------------------------------------------

    def send(self, pages: Sequence[Page], release: Callable[[Page], None]) -> None:
        peer = self._living()
        bare = [page.detached() for page in pages]
        data, unsendable = packed(bare)
        sent, dropped, lost = [], [], []
        with self._state:
            if peer is not self._peer:
                peer = None  # it has just died
            for page, detached in zip(pages, bare, strict=True):
                source = page.segment.source
                if source in self._broken:
                    dropped.append(page)
                    if self._ends(page):
                        self._broken.discard(source)
                elif peer is None or page.offset in unsendable:
                    dropped.append(page)
                    self._copies.pop(source, None)
                    why = unsendable.get(page.offset, "the process that stores hidden states does not run")
                    lost.append(Lost((page.segment,), why))
                    if not self._ends(page):
                        self._broken.add(source)
                else:
                    sent.append(detached)
                    self._held[page.offset] = partial(release, page)
                    self._note(page)
        for page in dropped:
            release(page)
        for event in lost:
            self._on_event(event)
        if peer is not None and sent:
            peer.send(data if data is not None and not dropped else message(sent))

    def _ends(self, page: Page) -> bool:
        """Whether no page follows that is stored only together with this one."""
        if not self._restarts:
            return page.last  # a run stores each segment
        # A started process stores a sample's columns as one object. The columns share a source and follow one another.
        return page.ends_sample and page.segment.column == page.segment.columns - 1

    def _note(self, page: Page) -> None:
        """Note that a page is sent. Called with the lock held."""
        source = page.segment.source
        copy = self._copies.setdefault(source, _UnsettledSource(page.segment.bare()))
        copy.whole = self._ends(page)
        if copy.whole and (copy.reported or not self._restarts):
            del self._copies[source]

    def send_message(self, data: bytes | memoryview) -> None:
        """Send a message without pages, after all pages sent before."""
        if (peer := self._peer) is not None:  # the reading thread may set it to None
            peer.send(data)

    def _living(self) -> Peer | None:
        """Return the peer. Restarts a dead one; returns None if that fails."""
        if self._peer is not None or self._closing or not self._restarts:
            return self._peer
        if self._failed_at is None or time.monotonic() - self._failed_at >= RESTART_S:
            try:
                self._start()
                self._failed_at = None
            except (HsxError, OSError) as e:
                self._failed_at = time.monotonic()
                log.error("the process that stores hidden states was not restarted: %s", e)
        return self._peer

    def flush(self) -> None:
        with self._state:
            while self._held:
                self._state.wait()

    # -- responses ------------------------------------------------------------------------------------------------

    def _read(self, peer: Peer) -> None:
        while self._receive(peer):
            pass
        self._ended(peer)

    def _receive(self, peer: Peer) -> bool:
        """Receive one list of messages. Returns False if the peer has ended, or its message cannot be read.

        A method, so that an idle connection holds no event's segments.
        """
        try:
            messages: list[tuple[str, Any]] = peer.connection.recv()
        except Exception:  # noqa: BLE001 - after any error the thread settles the peer's pages
            return False
        for kind, what in messages:
            try:
                self._take(kind, what)
            except Exception:
                with contextlib.suppress(Exception):  # the log handler may have raised it
                    log.exception("a message of the writer process was not handled: kind=%s", kind)
        return True

    def _take(self, kind: str, what: Any) -> None:
        if kind == "free":
            with self._state:
                give_back = self._held.pop(what, None)
                self._state.notify_all()
            if give_back is not None:
                give_back()
        elif kind == "numbers":
            self._meter.merge(SOURCE, what)
        elif kind == "log":
            logger = logging.getLogger(what.name)
            if logger.isEnabledFor(what.levelno):
                logger.handle(what)
        else:
            self._settle(what)

    def _settle(self, event: Event) -> None:
        assert not isinstance(event, Receipt)  # there is no run
        with self._state:
            for segment in event.segments:
                copy = self._copies.get(segment.source)
                if copy is not None and copy.whole:
                    del self._copies[segment.source]
                elif copy is not None:
                    copy.reported = True
        self._on_event(event)

    def _ended(self, peer: Peer) -> None:
        """Free the pages of a peer that ended, and report its segments as lost."""
        how = peer.ended()
        peer.kill()
        with self._state:
            self._peer = None
            held, self._held = list(self._held.values()), {}
            copies, self._copies = self._copies, {}
            self._broken |= {source for source, copy in copies.items() if not copy.whole}
            self._state.notify_all()
        self._meter.forget(SOURCE)
        for give_back in held:
            with contextlib.suppress(Exception):  # the lost segments below must still be reported
                give_back()
        if self._closing:
            return
        lost = tuple(copy.segment for copy in copies.values() if not copy.reported)
        then = "; the next pages restart it" if self._restarts else ""
        with contextlib.suppress(Exception):
            log.error("the process that stores hidden states %s: %d samples are lost%s", how, len(lost), then)
        for segment in lost:
            try:
                self._on_event(Lost((segment,), f"the process that stores hidden states {how}"))
            except Exception:
                with contextlib.suppress(Exception):
                    log.exception("the loss of %s could not be reported", segment.key)

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Send the end of the pages. A started process stores the rest and exits, within ``drain_seconds``."""
        self._end(lambda peer: peer.send(ForkingPickler.dumps(None)), self._drain_seconds + 1.0)

    def abandon(self) -> None:
        """Kill a started process. Its unstored segments are lost."""
        self._end(Peer.abort, 1.0)

    def _end(self, how: Callable[[Peer], None], seconds: float) -> None:
        with self._state:
            if self._closing:
                return
            self._closing = True
            peer, reader = self._peer, self._reader
            starting = self._starting
        if peer is not None and reader is not None:
            how(peer)
            reader.join(seconds)
            if reader.is_alive():  # the process or the callback hangs
                peer.abort()
        if not starting:
            os.close(self._ring)
