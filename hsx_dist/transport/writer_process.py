"""``transport: spawn``: a process with the writers of one connector, so that encoding and storing never take the
engine's GIL. ``spawn`` starts the process; ``main`` runs in it."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import hsx_dist
from hsx_dist.errors import EngineError, HsxError
from hsx_dist.new_process import begin_process
from hsx_dist.observe.metrics import Meter
from hsx_dist.page import Segment
from hsx_dist.store import open_store
from hsx_dist.transport.affinity import any_core
from hsx_dist.transport.channel import START_S, Peer, ReturnQueue, take_offer
from hsx_dist.transport.remote_end import RemoteEnd
from hsx_dist.writers.events import Lost
from hsx_dist.writers.sink import PartSink, SinkOptions
from hsx_dist.writers.threads import ThreadSender

#: Seconds between two checks that the engine still runs.
_LOOK_S = 1.0
#: On shared cores the engine's threads get priority: one of them may hold the engine's GIL.
NICE = 10


@dataclass(frozen=True, slots=True)
class WriterProcessSpec:
    """Settings of the process. Sent over the socket pair only, since ``storage_options`` may contain secrets."""

    url: str
    storage_options: dict[str, Any]
    options: SinkOptions
    threads: int
    ring_bytes: int
    drain_seconds: float
    log_level: int = logging.WARNING


def spawn(spec: WriterProcessSpec, ring: int) -> Peer:
    """Start the process, with the memory behind the descriptor ``ring``.

    Raises:
        HsxError: the process did not start; its error.
    """
    ours, theirs = Pipe()
    # The package may be on this process's ``sys.path`` only. ``-P``: never import from the working directory.
    place = str(Path(hsx_dist.__file__).parents[1])
    start = f"import sys; sys.path.insert(0, {place!r}); from {__name__} import main; main()"
    with theirs, any_core():
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", start, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    peer = Peer(ours, process)
    refusal = peer.offer(ring, spec.ring_bytes, spec, START_S)
    if refusal is None:
        return peer
    peer.kill()
    if isinstance(refusal, HsxError):
        raise refusal
    raise EngineError(
        f"expected a process that stores hidden states, got: {refusal}. Set hsx.transport to 'inline' to store from "
        "the engine's own process"
    )


def serve(connection: Connection) -> None:
    """Store the received pages until the engine ends the connection or dies."""
    parent = os.getppid()
    os.nice(NICE)
    meter = Meter()
    try:
        _, memory, offered = take_offer(connection)
        spec: WriterProcessSpec = offered
        store = open_store(spec.url, spec.storage_options, on_retry=meter.retried)
    except Exception as e:  # noqa: BLE001 - the engine reports it
        connection.send(e if isinstance(e, HsxError) else f"{type(e).__name__}: {e}")
        return
    connection.send(None)
    returns = ReturnQueue(connection, spec.ring_bytes, meter)
    logging.getLogger().addHandler(logging.handlers.QueueHandler(returns))  # type: ignore[arg-type]
    logging.getLogger("hsx_dist").setLevel(spec.log_level)
    sink = PartSink(store, spec.options, returns.event, meter)
    sender = ThreadSender(sink, spec.threads)
    threading.Thread(target=_outlive, args=(parent, spec.drain_seconds), daemon=True).start()

    def lost(segment: Segment, why: str) -> None:
        returns.event(Lost((segment,), why))

    RemoteEnd(connection, memory, sender, returns, on_lost=lost).run(lambda: os.getppid() == parent)
    sender.close()
    sink.close()
    returns.close()


def _outlive(parent: int, seconds: float) -> None:
    """Exit this process ``seconds`` after its engine ended, even if a store does not answer."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    time.sleep(seconds)
    os._exit(1)


def main() -> None:
    begin_process()
    # Ignore signals to the server's process group: the engine handles them, and then ends the connection.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with Connection(int(sys.argv[1])) as connection, contextlib.suppress(BrokenPipeError):
        serve(connection)
