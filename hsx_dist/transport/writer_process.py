"""``transport: spawn``: a process with the writers of one connector. Encoding and storing never have the engine's
interpreter lock. ``spawn`` starts the process, ``main`` runs in it."""

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
from hsx_dist.observe.metrics import Meter
from hsx_dist.page import Segment
from hsx_dist.store import open_store
from hsx_dist.transport.affinity import any_core
from hsx_dist.transport.channel import START_S, Peer, ReturnQueue, take_offer
from hsx_dist.transport.remote_end import RemoteEnd
from hsx_dist.writers.events import Lost
from hsx_dist.writers.sink import PartSink, SinkOptions
from hsx_dist.writers.threads import ThreadSender

#: How often the process looks whether its engine still runs.
_LOOK_S = 1.0
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


def spawn(spec: WriterProcessSpec, ring: int) -> Peer:
    """Start the process, with the memory behind the descriptor ``ring``.

    Raises:
        HsxError: what kept it from starting.
    """
    ours, theirs = Pipe()
    # The package may lie where only this process looks for it; the folder that the engine was started in is not used.
    place = str(Path(hsx_dist.__file__).parents[1])
    start = f"import sys; sys.path.insert(0, {place!r}); from {__name__} import main; main()"
    with theirs, any_core():
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", start, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    peer = Peer(ours, process)
    came = peer.offer(ring, spec.ring_bytes, spec, START_S)
    if came is None:
        return peer
    peer.kill()
    if isinstance(came, HsxError):
        raise came
    raise EngineError(
        f"expected a process that stores hidden states, got: {came}. Set hsx.transport to 'inline' to store from "
        "the engine's own process"
    )


def serve(connection: Connection) -> None:
    """Store what comes until nothing more does, or the engine is gone."""
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
    """End this process so long after its engine, also while a store does not answer."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    time.sleep(seconds)
    os._exit(1)


def main() -> None:
    # A signal to a server's process group means the engine, which then says when nothing more follows.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with Connection(int(sys.argv[1])) as connection, contextlib.suppress(BrokenPipeError):
        serve(connection)
