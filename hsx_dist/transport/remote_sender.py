"""Pages to the writers of another process: one that listens, or one that is started for this engine.

The ring lies in memory that both processes map. Pages travel without their data; places that are free again come back,
and, from a process that was started here, what became of segments, counted numbers and log lines. A started process
outlives its engine by at most ``drain_seconds``, in which it stores what it was handed. When it dies itself, what it
had is reported as lost, and the next pages start another one. ``writer_process`` is what runs there.
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

#: A process that could not be started is not tried again for so many seconds; meanwhile samples fail at once.
RESTART_S = 5.0
#: The other process, as the engine's meter calls it.
SOURCE = "writers"


@dataclass(slots=True)
class _UnsettledSource:
    """A segment that was handed over. ``whole``: with its last page; ``reported``: as lost, already before that."""

    segment: Segment
    whole: bool = False
    reported: bool = False


class RemoteSender:
    """A ``Sender`` of pages that lie in ``memory``.

    ``on_event`` is called from a thread of its own. Of a started process a segment is reported exactly once, whatever
    becomes of the process. Of one that listens only those are reported that it was not sent: it settles the others.
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
        """``connect``: makes the peer that was offered a descriptor of the ring, and accepted.

        Raises:
            HsxError: there is no such peer.
            OSError: there is no memory for the ring.
        """
        self._connect = connect
        self._on_event = on_event
        self._meter = meter
        self._drain_seconds = drain_seconds
        self._ring = reserve(ring_bytes)
        self.memory: np.ndarray[Any, Any] | None = map_memory(self._ring, ring_bytes)
        self._state = threading.Condition()
        self._held: dict[int, Callable[[], None]] = {}  # by offset: gives the page's place back
        self._copies: dict[str, _UnsettledSource] = {}  # by source, of what is neither stored nor lost
        self._broken: set[str] = set()  # sources that were reported as lost while pages of them were still to come
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
        """The process that was started and stores; None while there is none."""
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
                    os.close(self._ring)  # the end left it to this: a peer must not be handed what is no ring any more
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
                peer = None  # it died just now
            for page, detached in zip(pages, bare, strict=True):
                source = page.segment.source
                if source in self._broken:
                    dropped.append(page)
                    if page.last:
                        self._broken.discard(source)
                elif peer is None or page.offset in unsendable:
                    dropped.append(page)
                    self._copies.pop(source, None)
                    why = unsendable.get(page.offset, "the process that stores hidden states does not run")
                    lost.append(Lost((page.segment,), why))
                    if not page.last:
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

    def _note(self, page: Page) -> None:
        """A page is on its way; called with the lock."""
        source = page.segment.source
        copy = self._copies.setdefault(source, _UnsettledSource(page.segment.bare()))
        copy.whole = page.last
        if copy.whole and (copy.reported or not self._restarts):
            del self._copies[source]

    def tell(self, data: bytes | memoryview) -> None:
        """Send a message without pages, behind all pages sent before."""
        if self._peer is not None:
            self._peer.send(data)

    def _living(self) -> Peer | None:
        """The peer, started again if it died; None if it cannot be."""
        if self._peer is not None or self._closing or not self._restarts:
            return self._peer
        if self._failed_at is None or time.monotonic() - self._failed_at >= RESTART_S:
            try:
                self._start()
                self._failed_at = None
            except (HsxError, OSError) as e:
                self._failed_at = time.monotonic()
                log.error("the process that stores hidden states was not started again: %s", e)
        return self._peer

    def flush(self) -> None:
        with self._state:
            while self._held:
                self._state.wait()

    # -- what comes back ------------------------------------------------------------------------------------------

    def _read(self, peer: Peer) -> None:
        while self._receive(peer):
            pass
        self._ended(peer)

    def _receive(self, peer: Peer) -> bool:
        """Take one list of messages. False: the peer has ended, or sends what cannot be read. A method, so that an idle
        connection holds no event's segments."""
        try:
            messages: list[tuple[str, Any]] = peer.connection.recv()
        except Exception:  # noqa: BLE001 - whatever it sends, the thread ends in order
            return False
        for kind, what in messages:
            try:
                self._take(kind, what)
            except Exception:
                with contextlib.suppress(Exception):  # the log handler may have raised it
                    log.exception("a message (%s) of the process that stores could not be taken", kind)
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
        """It is gone, and with it what it had."""
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
            with contextlib.suppress(Exception):  # what follows must be reported
                give_back()
        if self._closing:
            return
        lost = tuple(copy.segment for copy in copies.values() if not copy.reported)
        then = "; it is started again" if self._restarts else ""
        with contextlib.suppress(Exception):
            log.error("the process that stores hidden states %s and %d samples%s", how, len(lost), then)
        for segment in lost:
            try:
                self._on_event(Lost((segment,), f"the process that stores hidden states {how}"))
            except Exception:
                with contextlib.suppress(Exception):
                    log.exception("the loss of %s could not be reported", segment.key)

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Say that no page follows. A started process ends once all that it has is stored; within ``drain_seconds``."""
        self._end(lambda peer: peer.send(ForkingPickler.dumps(None)), self._drain_seconds + 1.0)

    def abandon(self) -> None:
        """End a started process, and what it has."""
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
            if reader.is_alive():  # the process hangs, or the callback does
                peer.abort()
        if not starting:
            os.close(self._ring)
