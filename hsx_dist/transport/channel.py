"""The protocol between an engine's process and a process that takes pages off its ring. Either may start the other.

First the engine's process offers the ring's memory. The other process responds None, or why it cannot serve. Then

- the engine sends ``(pages, shipped, numbers)``, pages without their data, and at the end None;
- the other process sends lists of ``("free", offset)``, ``("numbers", counts)``, ``("log", record)``, ``("event", …)``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from typing import Any

import numpy as np

from hsx_dist.format.receipt import Receipt
from hsx_dist.logger import get_logger, shown_traceback
from hsx_dist.memory.shared import map_memory
from hsx_dist.observe.console import say_lines
from hsx_dist.observe.metrics import Increments, Meter
from hsx_dist.page import Page
from hsx_dist.text import bounded
from hsx_dist.writers.events import Event

log = get_logger(__name__)

#: Messages to the engine within this many seconds are sent together.
RETURN_LINGER_S = 0.005
#: Time-out of the response to an offer. A new process first imports its store's client, which takes seconds, on a
#: loaded machine tens of seconds.
START_S = 120.0
#: How long a process may take to exit after it closed its connection.
_END_S = 5.0


class Peer:
    """The process that takes pages off the ring. ``process``: its handle, if this process started it."""

    def __init__(self, connection: Connection, process: subprocess.Popen[bytes] | None = None):
        self.connection = connection
        self.process = process
        self._wire = threading.Lock()

    def offer(self, ring: int, ring_bytes: int, spec: Any, seconds: float) -> Any:
        """Offer the memory behind the descriptor ``ring``. Returns None, or why the peer cannot serve."""
        try:
            self.connection.send((os.getpid(), ring_bytes, spec))
            send_handle(self.connection, ring, 0)
            return self.connection.recv() if self.connection.poll(seconds) else f"no answer within {seconds:g} s"
        except Exception as e:  # noqa: BLE001 - unpickling a response may raise anything
            return f"it {self.ended()} ({type(e).__name__})"

    def send(self, data: bytes | memoryview) -> None:
        """Send, or do nothing if the peer is gone: the reading thread then settles the peer's pages."""
        with self._wire, contextlib.suppress(OSError):
            if not self.connection.closed:
                self.connection.send_bytes(data)

    def ended(self) -> str:
        """Return how the peer ended, after it closed its connection."""
        if self.process is None:
            return "closed the connection"
        try:
            code = self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        return f"ended with exit code {code}"

    def abort(self) -> None:
        """Kill the peer's process if this process started it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def kill(self) -> None:
        """Kill the peer's process if this process started it, and close the connection."""
        self.abort()
        with self._wire:
            self.connection.close()


def take_offer(connection: Connection) -> tuple[int, np.ndarray[Any, Any], Any]:
    """Return the engine's process id, the ring's memory (uint8), and the offer's spec."""
    pid, nbytes, spec = connection.recv()
    fd = recv_handle(connection)
    try:
        return pid, map_memory(fd, nbytes), spec
    finally:
        os.close(fd)


def packed(pages: Sequence[Page]) -> tuple[bytes | memoryview | None, dict[int, str]]:
    """Return pages as a message and an empty dict.

    If some pages cannot be pickled, returns None and their offsets with the reasons, so that the other pages can be
    sent without them.
    """
    try:
        return message(pages), {}
    except Exception:  # noqa: BLE001 - pickling a page may raise anything
        bad: dict[int, str] = {}
    for page in pages:
        try:
            ForkingPickler.dumps(page)
        except Exception as e:
            log.exception("a page of %s cannot be passed on", page.segment.key)
            bad[page.offset] = bounded(f"its page cannot be passed on: {type(e).__name__}: {e}")
    return None, bad


def message(pages: Sequence[Page], shipped: Sequence[Any] = (), numbers: Any = None) -> memoryview:
    return ForkingPickler.dumps((list(pages), list(shipped), numbers or {}))


class ReturnQueue:
    """Messages to the engine. Any thread adds them; one thread sends them, so that no caller waits for the engine.

    While the ring is less than half full, messages within ``LINGER_S`` are sent together: each message wakes a thread
    of the engine's process, which takes the GIL from its steps.
    """

    def __init__(self, connection: Connection, ring_bytes: int, meter: Meter | None = None):
        """``meter``: metrics that are sent to the engine."""
        self._connection = connection
        self._ring_bytes = ring_bytes
        self._taken = self._freed = 0  # bytes of the ring; each is written by one thread only
        self._increments = None if meter is None else Increments(meter)
        self._queue: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hsx-return", daemon=True)
        self._thread.start()

    def took(self, nbytes: int) -> None:
        """Count received bytes of the ring. Called by one thread only."""
        self._taken += nbytes

    def free(self, page: Page) -> None:
        self._queue.put(("free", (page.offset, page.nbytes)))

    def event(self, event: Event) -> None:
        assert not isinstance(event, Receipt)  # there is no run
        event = replace(event, segments=tuple(segment.bare() for segment in event.segments))
        self.numbers()  # before the event: a sample that is reported must be counted
        self._queue.put(("event", event))

    def numbers(self) -> None:
        """Send the metrics, with their values at the time of sending."""
        self._queue.put(("numbers", None))

    def put_nowait(self, record: logging.LogRecord) -> None:
        """Queue a log record. The method that ``logging.handlers.QueueHandler`` calls."""
        try:
            ForkingPickler.dumps(record)
        except Exception:  # noqa: BLE001 - a library may attach anything to its record
            kept = ("name", "levelno", "levelname", "msg", "created", "pathname", "lineno", "funcName")
            record = logging.makeLogRecord({name: getattr(record, name) for name in kept})
        self._queue.put(("log", record))

    def close(self) -> None:
        """Send the queued messages and end the thread."""
        self.numbers()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._send()
        except BaseException:  # noqa: BLE001 - any error
            # Without this thread the engine would wait for ever. After a disconnect it reports the lost samples.
            say_lines(shown_traceback(sys.exc_info()), to=sys.stderr)
            self._connection.close()

    def _send(self) -> None:
        while self._send_next():
            pass

    def _send_next(self) -> bool:
        """Send the queued messages as one list. False at the end. A method, so that an idle thread holds no segment."""
        queued = [self._queue.get()]
        if self._taken - self._freed < self._ring_bytes // 2:
            time.sleep(RETURN_LINGER_S)
        with contextlib.suppress(queue.Empty):
            while True:
                queued.append(self._queue.get_nowait())
        ended = None in queued
        messages = [one for one in queued if one is not None and one[0] != "numbers"]
        for i, (kind, what) in enumerate(messages):
            if kind == "free":
                offset, nbytes = what
                self._freed += nbytes
                messages[i] = (kind, offset)
        if self._increments is not None and len(messages) + ended < len(queued):  # sent before the counted events
            messages.insert(0, ("numbers", self._increments.take()))
        # The engine may be gone. Its pages are stored nevertheless.
        if messages:
            with contextlib.suppress(OSError):
                self._connection.send(messages)
        return not ended
