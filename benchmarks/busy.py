"""A competing process: it loads its core as writers do, and shares nothing with the engine.

    python -m benchmarks.busy copy        # copies memory half of the time, until it is killed
    python -m benchmarks.busy traffic     # sends 450 MB/s to its own server, which discards them
    python -m benchmarks.busy disk PLACE  # writes 450 MB/s to files in PLACE, as writers do

Prints the line "ready" when the work begins.
"""

from __future__ import annotations

import mmap
import os
import sys
import time

import numpy as np

from hsx_dist.store import Store, open_store
from hsx_dist.transport.writer_process import NICE
from tests.harness.discard import DiscardServer

_TURN_S = 0.005
#: Bytes a second: those of the thin model on a fast machine.
_RATE = 450e6
_OBJECT = 8 << 20
#: Exit when this far behind: the load would be lower than claimed.
_LATE_S = 2.0
#: Files kept at a time. The next file replaces the oldest.
_FILES = 64


def copy() -> None:
    memory = np.ones((16, _OBJECT), np.uint8)
    turn = 0
    print("ready", flush=True)
    while True:
        end = time.perf_counter() + _TURN_S
        while time.perf_counter() < end:
            np.copyto(memory[turn % 8 + 8], memory[turn % 8])
            turn += 1
        time.sleep(_TURN_S)


def traffic() -> None:
    server = DiscardServer()
    options = server.storage_options(config_kwargs={"s3": {"payload_signing_enabled": False}})
    store_at_rate(open_store("s3://stranger/x", options))


def disk(place: str) -> None:
    store_at_rate(open_store(place))


def store_at_rate(store: Store) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 16 * _OBJECT), np.uint8).reshape(16, -1)  # aligned, as writers' blocks are
    memory.fill(1)
    store.put("first", [memory[0].data])
    print("ready", flush=True)
    began, turn = time.perf_counter(), 0
    while True:
        store.put(f"{turn % _FILES}", [memory[turn % 16].data])
        turn += 1
        ahead = began + turn * _OBJECT / _RATE - time.perf_counter()
        if ahead < -_LATE_S:
            sys.exit(f"expected to store {_RATE / 1e6:.0f} MB/s, got {-ahead:.1f} s behind. Use a faster disk or core.")
        time.sleep(max(ahead, 0))


if __name__ == "__main__":
    os.nice(NICE)
    match sys.argv[1:]:
        case ["copy"]:
            copy()
        case ["traffic"]:
            traffic()
        case ["disk", place]:
            disk(place)
        case other:
            sys.exit(f"expected copy, traffic or disk PLACE, got {' '.join(other) or 'nothing'}")
