"""The server of ``transport: attach``: it sends the pages of its engine's ranks to writers."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path

from hsx_dist.errors import ConfigError
from hsx_dist.logger import get_logger
from hsx_dist.observe.metrics import Meter
from hsx_dist.page import Page
from hsx_dist.transport.channel import ReturnQueue, take_offer
from hsx_dist.transport.local_end import count_shipped
from hsx_dist.transport.remote_end import RemoteEnd
from hsx_dist.transport.shipping import Shipped
from hsx_dist.writers.base import Sender

log = get_logger(__name__)

#: Seconds after a connection that failed. Without descriptors every ``accept`` fails at once.
_PAUSE = 0.1


class PageServer:
    """One connection and one shipping thread for every worker rank of an engine in child processes.

    ``make_sender`` returns the sender of a rank; the caller closes it. ``on_shipped`` is called from the shipping
    threads. ``on_closed`` is called when a rank has ended, after its last ``on_shipped``.

    Unpickling a peer's messages can run code. So the peer must first prove by multiprocessing's challenge that it knows
    ``key``; no earlier bytes are unpickled. vLLM's configuration passes the key to the ranks, hidden from log lines
    (``ConnectorConfig.authkey``).
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
        # Only this user can enter the folder, so other users cannot connect.
        self._folder = Path(tempfile.mkdtemp(prefix="hsx-"))
        self.address = str(self._folder / "ring")
        try:
            self._listener = Listener(self.address, "AF_UNIX")
        except OSError as e:
            shutil.rmtree(self._folder, ignore_errors=True)
            if e.errno is not None:
                raise
            raise ConfigError(
                f"TMPDIR: expected a folder whose path is short enough for a socket in it, got {self._folder.parent} "
                f"({e}). Set TMPDIR to a shorter path"
            ) from e
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, name="hsx-accept", daemon=True)
        self._closing = threading.Event()
        self._acceptor.start()

    def _accept(self) -> None:
        told: set[str] = set()
        while not self._closing.is_set():
            try:
                self._accept_one()
            # The peer disconnected, no descriptor or thread is left, or this server is closing.
            except (OSError, RuntimeError) as e:
                if repr(e) not in told and not self._closing.is_set():
                    told.add(repr(e))
                    log.warning("a connection to the ring was refused: %r", e)
                self._closing.wait(_PAUSE)

    def _accept_one(self) -> None:
        connection = self._listener.accept()
        threading.Thread(target=self._admit, args=(connection,), name="hsx-admit", daemon=True).start()

    def _admit(self, connection: Connection) -> None:
        """Serve a peer that has the key. Runs on the connection's thread, so that a silent peer delays no other."""
        with connection:
            try:
                deliver_challenge(connection, self.key)
                answer_challenge(connection, self.key)
            except (OSError, EOFError, AuthenticationError) as e:
                log.warning("a connection to the ring was refused: %r", e)
                return
            self._threads.append(threading.current_thread())  # only now: ``close`` does not wait for peers without key
            self._serve(connection)

    def _serve(self, connection: Connection) -> None:
        try:
            pid, memory, _ = take_offer(connection)
            sender = self._make_sender()
        except Exception as e:
            log.exception("an engine's ring was refused")
            connection.send(f"{type(e).__name__}: {e}")
            self._on_closed()
            return
        connection.send(None)
        returns = ReturnQueue(connection, memory.nbytes)
        end = RemoteEnd(
            connection,
            memory,
            sender,
            returns,
            on_shipped=self._shipped,
            on_numbers=partial(self._meter.merge, f"pid {pid}"),
        )
        try:
            end.run()
        finally:
            self._meter.forget(f"pid {pid}")
            sender.flush()
            self._on_closed()
            returns.close()

    def _shipped(self, pages: list[Page], shipped: list[Shipped], seconds: float) -> None:
        count_shipped(self._meter, pages, shipped, seconds)
        for one in shipped:
            self._on_shipped(one)

    def close(self) -> None:
        """Close the listener. Connections end with their engine."""
        self._closing.set()
        self._listener.close()
        for thread in self._threads:
            thread.join(timeout=60)
        shutil.rmtree(self._folder, ignore_errors=True)
