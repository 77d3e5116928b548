"""``transport: attach``: pages go to a running ``PageServer``, in the parent of an engine with child processes.

The engine's processes run no Ray and no store client. Pages that were copied into the ring survive them.
"""

from __future__ import annotations

from functools import partial
from multiprocessing.connection import Client

from hsx_dist.errors import EngineError
from hsx_dist.observe.metrics import Increments, Meter, Series
from hsx_dist.page import Page
from hsx_dist.transport.channel import START_S, Peer, message
from hsx_dist.transport.local_end import LocalEnd
from hsx_dist.transport.remote_sender import RemoteSender
from hsx_dist.transport.ring import ALIGN
from hsx_dist.transport.shipping import Shipped
from hsx_dist.writers.base import CALL_BYTES
from hsx_dist.writers.events import Event, Lost


class AttachedEnd(LocalEnd):
    """The engine's end. It sends copied pages and the engine's metrics to its peer, which ships, counts and reports."""

    def __init__(self, address: str, key: bytes, in_flight_bytes: int):
        """``key``: the ``PageServer``'s key.

        Raises:
            AuthenticationError: the process that listens at ``address`` has another key.
            EngineError: that process refuses the ring.
        """
        meter = Meter()
        self._increments = Increments(meter)
        self._sent: dict[Series, float] = {}  # the gauges last sent
        size = in_flight_bytes - in_flight_bytes % ALIGN
        self._remote = RemoteSender(partial(_attach, address, key, size), size, self._note_lost, meter)
        super().__init__(
            self._remote, size, meter=meter, least_bytes=CALL_BYTES, memory=self._remote.memory, idle=self._send_gauges
        )

    def _note_lost(self, event: Event) -> None:
        assert isinstance(event, Lost)  # the peer reports all other events
        for segment in event.segments:
            self._failures.setdefault(segment.key, event.reason)

    def _report(self, pages: list[Page], shipped: list[Shipped], seconds: float) -> None:  # noqa: ARG002
        self._sent = self._increments.gauges()
        self._remote.send_message(message((), shipped, {**self._increments.counters(), **self._sent}))

    def _send_gauges(self) -> None:
        """Send gauges that changed since the last page. Otherwise freed blocks would still be counted as held."""
        if self._increments.gauges() != self._sent:
            self._report([], [], 0.0)

    def close(self, timeout: float | None = None) -> None:
        if self._thread.close(timeout):
            self._remote.close()


def _attach(address: str, key: bytes, ring_bytes: int, ring: int) -> Peer:
    peer = Peer(Client(address, "AF_UNIX", authkey=key))
    if (refusal := peer.offer(ring, ring_bytes, None, START_S)) is not None:
        peer.kill()
        raise EngineError(f"expected a process that takes pages at {address}, got: {refusal}. Check that process's log")
    return peer
