"""A bare connector's writers in a process of their own: encoding and storing never have the engine's interpreter lock.

The ring lies in memory that both processes map. Pages' places go to the writers over a socket pair; places that are
free again, what became of segments, counted numbers and log lines come back. The process outlives its engine by at most
``drain_seconds``, in which what it was handed is stored; when it dies itself, what it had is told as lost, and the next
pages start another one.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import hsx_dist
from hsx_dist.connector.cores import any_core
from hsx_dist.connector.outlet import PageRef
from hsx_dist.connector.shared_memory import mapped, reserve
from hsx_dist.errors import EngineError, HsxError
from hsx_dist.format.receipt import Receipt
from hsx_dist.observe.metrics import Increments, Meter
from hsx_dist.page import Page, Segment
from hsx_dist.store import open_store
from hsx_dist.writers.events import Event, Lost
from hsx_dist.writers.sink import PartSink, SinkOptions
from hsx_dist.writers.threads import ThreadSender

log = logging.getLogger(__name__)

#: A process that could not be started is not tried again for so many seconds; meanwhile samples fail at once.
RESTART_S = 5.0
#: How often the writers tell their numbers, and look whether their engine is still there.
TELL_S = 1.0
START_S = 120.0
#: Where the engine's threads share a core with the process, they go first: one of them may have the interpreter's lock.
NICE = 10
#: What the engine's meter calls them.
SOURCE = "writers"


@dataclass(frozen=True, slots=True)
class WriterSpec:
    """What the process needs to know. ``storage_options`` may hold secrets: it travels over the socket pair alone."""

    url: str
    storage_options: dict[str, Any]
    options: SinkOptions
    threads: int
    ring_bytes: int
    drain_seconds: float


@dataclass(slots=True)
class _Copy:
    """A segment that was handed over. ``whole``: with its last page; ``told``: as lost, already before that."""

    segment: Segment
    whole: bool = False
    told: bool = False


class _Child:
    """One life of the process."""

    def __init__(self, spec: WriterSpec, ring: int):
        """Raises:
        HsxError: what kept it from starting.
        """
        ours, theirs = Pipe()
        self.connection: Connection = ours
        # The package may lie where only this process looks for it.
        paths = [str(Path(hsx_dist.__file__).parents[1]), *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
        with theirs, any_core():
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), str(ring)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), ring],
                env={**os.environ, "PYTHONPATH": ":".join(paths)},
            )
        try:
            ours.send(spec)
            came = ours.recv() if ours.poll(START_S) else f"no answer within {START_S:g} s"
        except (EOFError, OSError):
            came = f"it ended with exit code {self.process.wait(10)}"
        if came is not None:
            self.kill()
            if isinstance(came, HsxError):
                raise came
            raise EngineError(
                f"expected a process that stores hidden states, came: {came}; set hsx.writers to 'threads' to store "
                "from the engine's own process"
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class ProcessSender:
    """The engine's side: a ``Sender`` of pages that lie in ``memory``.

    ``on_event`` is called from a thread of its own. A segment is told exactly once, whatever becomes of the process.
    """

    def __init__(self, spec: WriterSpec, on_event: Callable[[Event], None], meter: Meter):
        """Raises:
        HsxError: the process could not be started.
        OSError: there is no memory for the ring.
        """
        self._spec = spec
        self._on_event = on_event
        self._meter = meter
        self._ring = reserve(spec.ring_bytes)
        self.memory: np.ndarray[Any, Any] | None = mapped(self._ring, spec.ring_bytes)
        self._base = self.memory.ctypes.data
        self._state = threading.Condition()
        self._held: dict[int, Callable[[], None]] = {}  # offset → gives the page's room back
        self._copies: dict[str, _Copy] = {}  # by source, of what is neither stored nor lost
        self._broken: set[str] = set()  # sources that were told as lost while pages of them were still to come
        self._closing = False
        self._failed_at: float | None = None
        self._child: _Child | None = None
        self._reader: threading.Thread | None = None
        self._start()

    @property
    def pid(self) -> int | None:
        """The process that stores; None while there is none."""
        child = self._child
        return child.process.pid if child is not None else None

    def _start(self) -> None:
        child = _Child(self._spec, self._ring)
        with self._state:
            if self._closing:
                child.kill()
                return
            self._child = child
            self._reader = threading.Thread(target=self._read, args=(child,), name="hsx-told", daemon=True)
            self._reader.start()

    # -- pages out ------------------------------------------------------------------------------------------------

    def send(self, pages: Sequence[Page], release: Callable[[Page], None]) -> None:
        child = self._living()
        refs, dropped, lost = [], [], []
        with self._state:
            if child is not self._child:
                child = None  # it died just now
            for page in pages:
                source, whole = page.segment.source, page.stop == page.segment.stop
                if source in self._broken:
                    dropped.append(page)
                    if whole:
                        self._broken.discard(source)
                elif child is None:
                    dropped.append(page)
                    self._copies.pop(source, None)
                    lost.append(page.segment)
                    if not whole:
                        self._broken.add(source)
                else:
                    ref = self._ref(page)
                    refs.append(ref)
                    self._held[ref.offset] = partial(release, page)
                    copy = self._copies.setdefault(source, _Copy(page.segment))
                    copy.whole = whole
                    if whole and copy.told:
                        del self._copies[source]
        for page in dropped:
            release(page)
        if lost:
            self._on_event(Lost(tuple(lost), "the process that stores hidden states does not run"))
        if child is not None and refs:
            # One that is gone is met by who reads from it, and settles what was just written down.
            with contextlib.suppress(OSError):
                child.connection.send(refs)

    def _ref(self, page: Page) -> PageRef:
        a, b, c = page.data.shape
        return PageRef(
            offset=page.data.ctypes.data - self._base,
            shape=(a, b, c),
            segment=page.segment,
            start=page.start,
            stop=page.stop,
            chunk_tokens=page.chunk_tokens,
            layer_ids=page.layer_ids,
            dtype=page.dtype,
            order=page.order,
            token_ids=page.token_ids,
        )

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
        try:
            while True:
                kind, what = child.connection.recv()
                if kind == "free":
                    with self._state:
                        give_back = self._held.pop(what, None)
                        self._state.notify_all()
                    if give_back is not None:
                        give_back()
                elif kind == "numbers":
                    self._meter.merge(SOURCE, what)
                elif kind == "log":
                    logging.getLogger(what.name).handle(what)
                else:
                    self._settle(what)
        except (EOFError, OSError, pickle.UnpicklingError):
            self._ended(child)

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
        code = child.process.wait()
        with self._state:
            self._child = None
            held, self._held = list(self._held.values()), {}
            copies, self._copies = self._copies, {}
            self._broken |= {source for source, copy in copies.items() if not copy.whole}
            self._state.notify_all()
        child.connection.close()
        self._meter.forget(SOURCE)
        for give_back in held:
            give_back()
        if self._closing:
            return
        lost = tuple(copy.segment for copy in copies.values() if not copy.told)
        log.error(
            "the process that stores hidden states ended with exit code %d and %d samples; it is started again",
            code,
            len(lost),
        )
        if lost:
            self._on_event(Lost(lost, f"the process that stores hidden states ended with exit code {code}"))

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the process, once all that it has is stored."""
        self._end(lambda child: child.connection.send(None))

    def abandon(self) -> None:
        """End the process, and what it has."""
        self._end(lambda child: child.process.kill())

    def _end(self, how: Callable[[_Child], None]) -> None:
        with self._state:
            if self._closing:
                return
            self._closing = True
            child, reader = self._child, self._reader
        if child is not None and reader is not None:
            with contextlib.suppress(OSError):
                how(child)
            reader.join()
        os.close(self._ring)


# -- the other process -----------------------------------------------------------------------------------------------


class _Teller:
    """Messages to the engine, from any thread, each with what was counted until then."""

    def __init__(self, connection: Connection, meter: Meter):
        self._connection = connection
        self._lock = threading.Lock()
        self._increments = Increments(meter)

    def free(self, offset: int) -> None:
        self._send("free", offset)

    def event(self, event: Event) -> None:
        self.numbers()  # whoever sees the end of a sample finds it counted
        self._send("event", event)

    def numbers(self) -> None:
        with self._lock:
            numbers = self._increments.take()
        self._send("numbers", numbers)

    def put_nowait(self, record: logging.LogRecord) -> None:
        """As a queue, for ``logging.handlers.QueueHandler``."""
        self._send("log", record)

    def _send(self, kind: str, what: object) -> None:
        with self._lock, contextlib.suppress(OSError):  # the engine is gone: what it handed over is stored all the same
            self._connection.send((kind, what))


def serve(connection: Connection, ring: int) -> None:
    """Store what comes until nothing more does, or the engine is gone."""
    parent = os.getppid()
    os.nice(NICE)
    meter = Meter()
    teller = _Teller(connection, meter)
    try:
        spec: WriterSpec = connection.recv()
        memory = mapped(ring, spec.ring_bytes)
        store = open_store(spec.url, spec.storage_options, on_retry=meter.retried)
    except Exception as e:  # noqa: BLE001 - the engine says it to whoever started it
        connection.send(e if isinstance(e, HsxError) else f"{type(e).__name__}: {e}")
        return
    logging.getLogger().addHandler(logging.handlers.QueueHandler(teller))  # type: ignore[arg-type]
    connection.send(None)
    sink = PartSink(store, spec.options, teller.event, meter)
    sender = ThreadSender(sink, spec.threads)
    threading.Thread(target=_outlive, args=(parent, spec.drain_seconds), daemon=True).start()
    told = time.monotonic()
    with contextlib.suppress(EOFError, OSError):
        while True:
            if connection.poll(TELL_S):
                refs: list[PageRef] | None = connection.recv()
                if refs is None:
                    break
                for ref in refs:
                    sender.send([ref.page(memory)], partial(_free, teller, ref.offset))
            elif os.getppid() != parent:
                break  # another process has the engine's end of the connection
            if time.monotonic() - told >= TELL_S:
                told = time.monotonic()
                teller.numbers()
    sender.close()
    sink.close()
    teller.numbers()


def _free(teller: _Teller, offset: int, _: Page) -> None:
    teller.free(offset)


def _outlive(parent: int, seconds: float) -> None:
    """End this process so long after its engine, also while a store does not answer."""
    while os.getppid() == parent:
        time.sleep(TELL_S)
    time.sleep(seconds)
    os._exit(1)


def main() -> None:
    # Whoever stops a server by its process group means the engine, which then says when there is nothing more.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with Connection(int(sys.argv[1])) as connection:
        serve(connection, int(sys.argv[2]))


if __name__ == "__main__":
    main()
