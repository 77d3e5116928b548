"""The process in which a bare connector's writers run, as ``process_sender`` starts it: encodes and stores the pages
whose places it is told, and tells what became of them."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import queue
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from hsx_dist.errors import HsxError
from hsx_dist.format.receipt import Receipt
from hsx_dist.memory.shared import mapped
from hsx_dist.observe.console import say_lines
from hsx_dist.observe.metrics import Increments, Meter
from hsx_dist.page import Page, Segment
from hsx_dist.store import open_store
from hsx_dist.text import bounded
from hsx_dist.writers.events import Event, Lost
from hsx_dist.writers.sink import PartSink, SinkOptions
from hsx_dist.writers.threads import ThreadSender

#: How often the writers tell their numbers, and look whether their engine is still there.
TELL_S = 1.0
#: What the engine is told within so many seconds it is told at one go.
LINGER_S = 0.005
#: Where the engine's threads share a core with the process, they go first: one of them may have the interpreter's lock.
NICE = 10


@dataclass(frozen=True, slots=True)
class WriterProcessSpec:
    """What the process needs to know. ``storage_options`` may hold secrets: it travels over the socket pair alone."""

    url: str
    storage_options: dict[str, Any]
    options: SinkOptions
    threads: int
    ring_bytes: int
    drain_seconds: float
    log_level: int = logging.WARNING


class _Teller:
    """Messages to the engine, from any thread, sent by one: whoever tells never waits, nor for a lock that it has.

    Those of a few milliseconds are sent together, as long as the ring has room: for each, a thread of the engine's
    process would wake and take the interpreter's lock from its steps.
    """

    def __init__(self, connection: Connection, meter: Meter, ring_bytes: int):
        self._connection = connection
        self._ring_bytes = ring_bytes
        self._taken = self._freed = 0  # bytes of the ring; each counted by one thread alone
        self._increments = Increments(meter)
        self._queue: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hsx-tell", daemon=True)
        self._thread.start()

    def took(self, nbytes: int) -> None:
        """So much of the ring came; one thread says it."""
        self._taken += nbytes

    def free(self, offset: int, nbytes: int) -> None:
        self._queue.put(("free", (offset, nbytes)))

    def event(self, event: Event) -> None:
        assert not isinstance(event, Receipt)  # there is no run
        event = replace(event, segments=tuple(segment.bare() for segment in event.segments))
        self.numbers()  # whoever sees the end of a sample finds it counted
        self._queue.put(("event", event))

    def numbers(self) -> None:
        """What was counted until this is sent."""
        self._queue.put(("numbers", None))

    def put_nowait(self, record: logging.LogRecord) -> None:
        """As a queue, for ``logging.handlers.QueueHandler``."""
        try:
            ForkingPickler.dumps(record)
        except Exception:  # noqa: BLE001 - any library's: what it put beside its words may be anything
            kept = ("name", "levelno", "levelname", "msg", "created", "pathname", "lineno", "funcName")
            record = logging.makeLogRecord({name: getattr(record, name) for name in kept})
        self._queue.put(("log", record))

    def close(self) -> None:
        """Send what is left."""
        self.numbers()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._tell()
        except BaseException:  # noqa: BLE001 - whatever it is
            # Without it the engine would wait for ever; of a process that ends it knows what is lost with it.
            say_lines(traceback.format_exc(), to=sys.stderr)
            os._exit(1)

    def _tell(self) -> None:
        ended = False
        while not ended:
            came = [self._queue.get()]
            if self._taken - self._freed < self._ring_bytes // 2:
                time.sleep(LINGER_S)
            with contextlib.suppress(queue.Empty):
                while True:
                    came.append(self._queue.get_nowait())
            ended = None in came
            messages = [message for message in came if message is not None and message[0] != "numbers"]
            for i, (kind, what) in enumerate(messages):
                if kind == "free":
                    offset, nbytes = what
                    self._freed += nbytes
                    messages[i] = (kind, offset)
            if len(messages) + ended < len(came):  # before all else: whoever sees an event finds it counted
                messages.insert(0, ("numbers", self._increments.take()))
            # The engine may be gone: what it handed over is stored all the same.
            with contextlib.suppress(OSError):
                self._connection.send(messages)


def serve(connection: Connection, ring: int) -> None:
    """Store what comes until nothing more does, or the engine is gone."""
    parent = os.getppid()
    os.nice(NICE)
    meter = Meter()
    try:
        spec: WriterProcessSpec = connection.recv()
        memory = mapped(ring, spec.ring_bytes)
        store = open_store(spec.url, spec.storage_options, on_retry=meter.retried)
    except Exception as e:  # noqa: BLE001 - the engine says it to whoever started it
        connection.send(e if isinstance(e, HsxError) else f"{type(e).__name__}: {e}")
        return
    connection.send(None)
    teller = _Teller(connection, meter, spec.ring_bytes)
    logging.getLogger().addHandler(logging.handlers.QueueHandler(teller))  # type: ignore[arg-type]
    logging.getLogger("hsx_dist").setLevel(spec.log_level)
    sink = PartSink(store, spec.options, teller.event, meter)
    sender = ThreadSender(sink, spec.threads)
    threading.Thread(target=_outlive, args=(parent, spec.drain_seconds), daemon=True).start()
    segments: dict[str, Segment] = {}  # by source, as their first pages told them
    told = time.monotonic()
    with contextlib.suppress(EOFError, OSError):
        while True:
            if connection.poll(TELL_S):
                refs: list[Page] | None = connection.recv()
                if refs is None:
                    break
                for ref in refs:
                    teller.took(ref.nbytes)
                    if ref.first:
                        segments[ref.segment.source] = ref.segment
                    segment = segments.get(ref.segment.source)
                    if segment is None:  # an earlier one of its pages could not be sent
                        teller.free(ref.offset, ref.nbytes)
                        teller.event(Lost((ref.segment,), "not all of its pages came"))
                        continue
                    if ref.last:
                        del segments[ref.segment.source]
                    try:
                        page = replace(ref, segment=segment).attached(memory)
                    except Exception as e:  # noqa: BLE001 - one page must not end the process, and lose the others
                        segments.pop(ref.segment.source, None)
                        teller.free(ref.offset, ref.nbytes)
                        teller.event(Lost((segment,), bounded(f"its page cannot be read: {type(e).__name__}: {e}")))
                        continue
                    sender.send([page], partial(_free, teller))
            elif os.getppid() != parent:
                break  # another process has the engine's end of the connection
            if time.monotonic() - told >= TELL_S:
                told = time.monotonic()
                teller.numbers()
    sender.close()
    sink.close()
    teller.close()


def _free(teller: _Teller, page: Page) -> None:
    teller.free(page.offset, page.nbytes)


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
