"""Threads that ship run where the user lets the process run, whatever cores the engine takes for itself."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import os
mine = os.sched_getaffinity(0)
from hsx_dist.connector import plugin
os.sched_setaffinity(0, {max(mine)})  # as vLLM binds its threads
from hsx_dist.connector.outlet import Shipped, ShippingThread
from hsx_dist.observe.metrics import Meter
seen = []
shipping = ShippingThread(lambda *_: seen.append(os.sched_getaffinity(0)), Meter())
shipping.put(Shipped("k"))
shipping.close(None)
assert seen == [mine], (seen, mine)
"""


def test_the_cores_are_those_that_the_process_was_given():
    some = {min(os.sched_getaffinity(0))}
    subprocess.run(
        [sys.executable, "-c", CODE], check=True, preexec_fn=lambda: os.sched_setaffinity(0, some), timeout=120
    )
