"""From an engine in a child process to the parent that ships: the ring lies in memory that both map.

The child runs no Ray and no store client: it copies pages into the ring and passes their places over a Unix socket; the
parent hands the pages to its writers and passes the places back. What was copied survives the engine.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from pathlib import Path
from typing import Any

import numpy as np

from hsx_dist.connector.outlet import (
    LINGER_S,
    Copied,
    Shipped,
    ShippingThread,
    count_shipped,
    picklable,
    send_pages,
    with_failures,
)
from hsx_dist.connector.ring import Ring
from hsx_dist.connector.step import Expect, Skip
from hsx_dist.logger import get_logger
from hsx_dist.memory.shared import mapped, reserve
from hsx_dist.observe.metrics import Increments, Meter, Series
from hsx_dist.page import Page, Segment
from hsx_dist.writers.base import CALL_BYTES, Sender

log = get_logger(__name__)


def _map(fd: int, nbytes: int) -> np.ndarray[Any, Any]:
    try:
        return mapped(fd, nbytes)
    finally:
        os.close(fd)


class SocketOutlet:
    """The child's side. ``key``: the parent's ``BridgeServer.key``.

    Raises:
        AuthenticationError: the process that listens at ``address`` has another key.
    """

    def __init__(self, address: str, key: bytes, in_flight_bytes: int):
        self.ring = Ring(in_flight_bytes)
        self._connection: Connection = Client(address, "AF_UNIX", authkey=key)
        self._connection.send((os.getpid(), self.ring.capacity))
        self.memory = _map(recv_handle(self._connection), self.ring.capacity)
        self.meter = Meter()
        self.meter.watch("ring_bytes", lambda: self.ring.used_bytes)
        self._increments = Increments(self.meter)
        self._told: dict[Series, float] = {}  # gauges as they were last sent
        self._thread = ShippingThread(
            self._deliver,
            self.meter,
            idle=self._tell,
            least_bytes=min(CALL_BYTES, self.ring.capacity // 4),
            linger_s=LINGER_S,
        )
        threading.Thread(target=self._take_back, name="hsx-free", daemon=True).start()

    def admit(self, _: Segment, /) -> bool:
        return True

    def submit(self, *pages: Copied) -> None:
        self._thread.put(*pages)

    def expect(self, expected: Expect) -> None:
        pass  # receipts tell

    def prepared(self) -> None:
        pass

    def skip(self, skip: Skip) -> None:
        self._thread.put(Shipped(skip.key, skip.reason))

    @property
    def pending(self) -> int:
        return self._thread.pending

    def _deliver(self, refs: list[Page], told: list[Shipped]) -> None:
        self._told = self._increments.gauges()
        numbers = {**self._increments.counters(), **self._told}
        try:
            message = ForkingPickler.dumps((refs, told, numbers))
        except Exception:  # noqa: BLE001 - whatever a page's is
            refs, bad = picklable(refs)
            for ref, _ in bad:
                self.ring.free(ref.offset)
            message = ForkingPickler.dumps((refs, with_failures(told, bad), numbers))
        self._connection.send_bytes(message)

    def _tell(self) -> None:
        """Gauges that have changed since the last page: nobody is to see blocks held that are long free."""
        if self._increments.gauges() != self._told:
            with contextlib.suppress(OSError):  # the parent is gone, and so will this process be
                self._deliver([], [])

    def _take_back(self) -> None:
        try:
            while True:
                for offset in self._connection.recv():
                    self.ring.free(offset)
        except (EOFError, OSError):
            log.info("the process that ships this engine's pages has closed the connection")

    def close(self, timeout: float | None = None) -> None:
        self._thread.close(timeout)


class BridgeServer:
    """The parent's side: one connection and one shipping thread for every worker rank of its engine.

    ``make_sender`` gives each rank a sender of its own (its owner closes it); ``on_shipped`` is called from the
    shipping threads, and ``on_closed`` when a rank has ended, after all that it shipped.

    What a connection sends is unpickled, which can run code. So the peer must first prove that it knows ``key``, by
    multiprocessing's challenge; nothing that it sends before is unpickled. The key reaches the ranks within vLLM's
    configuration, hidden from its log lines (``ConnectorConfig.authkey``).
    """

    def __init__(
        self,
        make_sender: Callable[[], Sender],
        on_shipped: Callable[[Shipped], None],
        on_closed: Callable[[], None] = lambda: None,
        meter: Meter | None = None,
    ):
        self._meter = Meter() if meter is None else meter
        self._make_sender = make_sender
        self._on_shipped = on_shipped
        self._on_closed = on_closed
        self.key = secrets.token_bytes(32)
        # A folder that only this user can enter: others cannot even connect.
        self._folder = Path(tempfile.mkdtemp(prefix="hsx-"))
        self.address = str(self._folder / "ring")
        self._listener = Listener(self.address, "AF_UNIX")
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, name="hsx-accept", daemon=True)
        self._closing = False
        self._acceptor.start()

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection = self._listener.accept()
            except (OSError, EOFError) as e:  # a peer that left, or this side is closing
                if not self._closing:
                    log.warning("a connection to the ring was refused: %r", e)
                continue
            threading.Thread(target=self._admit, args=(connection,), name="hsx-ship", daemon=True).start()

    def _admit(self, connection: Connection) -> None:
        """Serve a peer that has the key. On the connection's own thread: a peer that says nothing delays no other."""
        with connection:
            try:
                deliver_challenge(connection, self.key)
                answer_challenge(connection, self.key)
            except (OSError, EOFError, AuthenticationError) as e:
                log.warning("a connection to the ring was refused: %r", e)
                return
            self._threads.append(threading.current_thread())  # a peer without the key does not delay the end either
            self._serve(connection)

    def _serve(self, connection: Connection) -> None:
        pid, nbytes = connection.recv()
        fd = reserve(nbytes)
        send_handle(connection, fd, pid)
        memory = _map(fd, nbytes)
        sender = self._make_sender()
        back = threading.Lock()

        def give_back(offset: int) -> None:
            try:
                with back:
                    connection.send([offset])
            except OSError:
                pass  # the engine is gone; its pages still went to the writers

        try:
            while True:
                refs, told, numbers = connection.recv()
                self._meter.merge(f"pid {pid}", numbers)
                before = time.monotonic()
                failed = send_pages(sender, refs, memory, give_back)
                told = with_failures(told, failed)
                count_shipped(self._meter, refs, told, time.monotonic() - before)
                for shipped in told:
                    self._on_shipped(shipped)
        except (EOFError, OSError):
            pass
        finally:
            self._meter.forget(f"pid {pid}")
            sender.flush()
            self._on_closed()

    def close(self) -> None:
        """End the listener; connections end when their engine does."""
        self._closing = True
        self._listener.close()
        for thread in self._threads:
            thread.join(timeout=60)
        shutil.rmtree(self._folder, ignore_errors=True)
