"""A stranger that keeps its core busy, as writers do, and has nothing to do with the engine.

python -m benchmarks.busy copy        # copies memory half of the time, until it is ended
python -m benchmarks.busy traffic     # sends 450 MB in a second to a server of its own that throws them away
python -m benchmarks.busy disk PLACE  # writes 450 MB in a second to files there, as writers do

It says "ready" in a line once it is at it.
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
#: What the thin model makes on a fast machine.
_RATE = 450e6
_OBJECT = 8 << 20
#: A stranger that falls so far behind is not what it is said to be, and ends.
_LATE_S = 2.0
#: Of files that a stranger has at a time; the next one takes the oldest one's place.
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
            sys.exit(f"expected to store {_RATE / 1e6:.0f} MB in a second, fell {-ahead:.1f} s behind")
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
