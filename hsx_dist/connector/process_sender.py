"""A bare connector's writers in a process of their own: encoding and storing never have the engine's interpreter lock.

The ring lies in memory that both processes map. Pages' places go to the writers over a socket pair; places that are
free again, what became of segments, counted numbers and log lines come back. The process outlives its engine by at most
``drain_seconds``, in which what it was handed is stored; when it dies itself, what it had is told as lost, and the next
pages start another one. ``writer_process`` is what runs there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np

import hsx_dist
from hsx_dist.connector import writer_process
from hsx_dist.connector.affinity import any_core
from hsx_dist.connector.outlet import picklable
from hsx_dist.connector.writer_process import WriterProcessSpec
from hsx_dist.errors import EngineError, HsxError
from hsx_dist.format.receipt import Receipt
from hsx_dist.logger import get_logger
from hsx_dist.memory.shared import mapped, reserve
from hsx_dist.observe.metrics import Meter
from hsx_dist.page import Page, Segment
from hsx_dist.writers.events import Event, Lost

log = get_logger(__name__)

#: A process that could not be started is not tried again for so many seconds; meanwhile samples fail at once.
RESTART_S = 5.0
START_S = 120.0
#: How long a process that says nothing more may take to end.
_END_S = 5.0
#: What the engine's meter calls them.
SOURCE = "writers"


@dataclass(slots=True)
class _UnsettledSource:
    """A segment that was handed over. ``whole``: with its last page; ``told``: as lost, already before that."""

    segment: Segment
    whole: bool = False
    told: bool = False


class _Child:
    """One life of the process."""

    def __init__(self, spec: WriterProcessSpec, ring: int):
        """Raises:
        HsxError: what kept it from starting.
        """
        ours, theirs = Pipe()
        self.connection: Connection = ours
        self._wire = threading.Lock()
        # The package may lie where only this process looks for it; in the folder that it was started in nobody does.
        place = str(Path(hsx_dist.__file__).parents[1])
        start = f"import sys; sys.path.insert(0, {place!r}); from {writer_process.__name__} import main; main()"
        with theirs, any_core():
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", start, str(theirs.fileno()), str(ring)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), ring],
            )
        try:
            ours.send(spec)
            came = ours.recv() if ours.poll(START_S) else f"no answer within {START_S:g} s"
        except Exception as e:  # noqa: BLE001 - whatever is wrong with what it said
            came = f"it ended with exit code {self.code()} ({type(e).__name__})"
        if came is not None:
            self.kill()
            if isinstance(came, HsxError):
                raise came
            raise EngineError(
                f"expected a process that stores hidden states, came: {came}; set hsx.writers to 'threads' to store "
                "from the engine's own process"
            )

    def send(self, data: bytes | memoryview) -> None:
        """To a process that is gone it is nothing: who reads from it settles what it had."""
        with self._wire, contextlib.suppress(OSError):
            if not self.connection.closed:
                self.connection.send_bytes(data)

    def code(self) -> int:
        """The exit code, once it has ended; it has, or it will not by itself."""
        try:
            return self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        with self._wire:
            self.connection.close()


class ProcessSender:
    """The engine's side: a ``Sender`` of pages that lie in ``memory``.

    ``on_event`` is called from a thread of its own. A segment is told exactly once, whatever becomes of the process.
    """

    def __init__(self, spec: WriterProcessSpec, on_event: Callable[[Event], None], meter: Meter):
        """Raises:
        HsxError: the process could not be started.
        OSError: there is no memory for the ring.
        """
        self._spec = spec
        self._on_event = on_event
        self._meter = meter
        self._ring = reserve(spec.ring_bytes)
        self.memory: np.ndarray[Any, Any] | None = mapped(self._ring, spec.ring_bytes)
        self._state = threading.Condition()
        self._held: dict[int, Callable[[], None]] = {}  # offset → gives the page's room back
        self._copies: dict[str, _UnsettledSource] = {}  # by source, of what is neither stored nor lost
        self._broken: set[str] = set()  # sources that were told as lost while pages of them were still to come
        self._closing = self._starting = False
        self._failed_at: float | None = None
        self._child: _Child | None = None
        self._reader: threading.Thread | None = None
        try:
            self._start()
        except BaseException:
            os.close(self._ring)
            raise

    @property
    def pid(self) -> int | None:
        """The process that stores; None while there is none."""
        child = self._child
        return child.process.pid if child is not None else None

    def _start(self) -> None:
        child: _Child | None = None
        with self._state:
            self._starting = not self._closing
            if not self._starting:
                return
        try:
            child = _Child(self._spec, self._ring)
        finally:
            with self._state:
                self._starting = False
                if ended := self._closing:
                    os.close(self._ring)  # the end left it to this: a child must not be handed what is no ring any more
                elif child is not None:
                    self._child = child
                    self._reader = threading.Thread(target=self._read, args=(child,), name="hsx-told", daemon=True)
                    self._reader.start()
        if ended:
            child.kill()

    # -- pages out ------------------------------------------------------------------------------------------------

    def send(self, pages: Sequence[Page], release: Callable[[Page], None]) -> None:
        child = self._living()
        refs = [page.detached() for page in pages]
        unsendable: dict[int, str] = {}  # offset → why
        message = None
        try:
            message = ForkingPickler.dumps(refs)
        except Exception:  # noqa: BLE001 - whatever a page's is; it must not cost the others
            unsendable = {ref.offset: why for ref, why in picklable(refs)[1]}
        sent, dropped, lost = [], [], []
        with self._state:
            if child is not self._child:
                child = None  # it died just now
            for page, ref in zip(pages, refs, strict=True):
                source, whole = page.segment.source, page.last
                if source in self._broken:
                    dropped.append(page)
                    if whole:
                        self._broken.discard(source)
                elif child is None or ref.offset in unsendable:
                    dropped.append(page)
                    self._copies.pop(source, None)
                    why = unsendable.get(ref.offset, "the process that stores hidden states does not run")
                    lost.append(Lost((page.segment,), why))
                    if not whole:
                        self._broken.add(source)
                else:
                    sent.append(ref)
                    self._held[ref.offset] = partial(release, page)
                    copy = self._copies.setdefault(source, _UnsettledSource(page.segment.bare()))
                    copy.whole = whole
                    if whole and copy.told:
                        del self._copies[source]
        for page in dropped:
            release(page)
        for event in lost:
            self._on_event(event)
        if child is not None and sent:
            child.send(message if message is not None and not dropped else ForkingPickler.dumps(sent))

    def _living(self) -> _Child | None:
        """The process, started again if it died; None if it cannot be."""
        if self._child is not None or self._closing:
            return self._child
        if self._failed_at is None or time.monotonic() - self._failed_at >= RESTART_S:
            try:
                self._start()
                self._failed_at = None
            except (HsxError, OSError) as e:
                self._failed_at = time.monotonic()
                log.error("the process that stores hidden states was not started again: %s", e)
        return self._child

    def flush(self) -> None:
        with self._state:
            while self._held:
                self._state.wait()

    # -- what comes back ------------------------------------------------------------------------------------------

    def _read(self, child: _Child) -> None:
        while True:
            try:
                messages: list[tuple[str, Any]] = child.connection.recv()
            except Exception:  # noqa: BLE001 - it has ended, or says what nobody understands
                break
            for kind, what in messages:
                try:
                    self._take(kind, what)
                except Exception:
                    with contextlib.suppress(Exception):  # a log handler's may be what came
                        log.exception("what the process that stores said (%s) could not be taken", kind)
        self._ended(child)

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
                    copy.told = True
        self._on_event(event)

    def _ended(self, child: _Child) -> None:
        """It is gone, and with it what it had."""
        code = child.code()
        child.kill()
        with self._state:
            self._child = None
            held, self._held = list(self._held.values()), {}
            copies, self._copies = self._copies, {}
            self._broken |= {source for source, copy in copies.items() if not copy.whole}
            self._state.notify_all()
        self._meter.forget(SOURCE)
        for give_back in held:
            with contextlib.suppress(Exception):  # what follows must be told
                give_back()
        if self._closing:
            return
        lost = tuple(copy.segment for copy in copies.values() if not copy.told)
        with contextlib.suppress(Exception):
            log.error(
                "the process that stores hidden states ended with exit code %d and %d samples; it is started again",
                code,
                len(lost),
            )
        for segment in lost:
            try:
                self._on_event(Lost((segment,), f"the process that stores hidden states ended with exit code {code}"))
            except Exception:
                with contextlib.suppress(Exception):
                    log.exception("that %s is lost could not be told", segment.key)

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the process, once all that it has is stored; within ``drain_seconds``."""
        self._end(lambda child: child.send(ForkingPickler.dumps(None)), self._spec.drain_seconds + 1.0)

    def abandon(self) -> None:
        """End the process, and what it has."""
        self._end(lambda child: child.process.kill(), 1.0)

    def _end(self, how: Callable[[_Child], None], seconds: float) -> None:
        with self._state:
            if self._closing:
                return
            self._closing = True
            child, reader = self._child, self._reader
            starting = self._starting
        if child is not None and reader is not None:
            how(child)
            reader.join(seconds)
            if reader.is_alive():  # the process hangs, or whom it tells does
                child.process.kill()
                child.process.wait()
        if not starting:
            os.close(self._ring)
