"""A stranger that keeps its core busy half of the time, as writers do, and has nothing to do with the engine.

python -m benchmarks.busy    # until it is ended
"""

from __future__ import annotations

import os
import time

import numpy as np

from hsx_dist.connector.writer_process import NICE

_TURN_S = 0.005


def main() -> None:
    os.nice(NICE)
    memory = np.ones((16, 8 << 20), np.uint8)
    turn = 0
    while True:
        end = time.perf_counter() + _TURN_S
        while time.perf_counter() < end:
            np.copyto(memory[turn % 8 + 8], memory[turn % 8])
            turn += 1
        time.sleep(_TURN_S)


if __name__ == "__main__":
    main()
