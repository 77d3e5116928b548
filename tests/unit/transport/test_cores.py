"""Shipping threads run on the cores that the user gave the process, not on the engine's cores only."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import os
mine = os.sched_getaffinity(0)
from hsx_dist.connector import plugin
os.sched_setaffinity(0, {max(mine)})  # as vLLM binds its threads
from hsx_dist.transport.shipping import Shipped, ShippingThread
from hsx_dist.observe.metrics import Meter
seen = []
shipping = ShippingThread(lambda *_: seen.append(os.sched_getaffinity(0)), Meter())
shipping.put(Shipped("k"))
shipping.close(None)
assert seen == [mine], (seen, mine)
import threading
from hsx_dist.transport.affinity import any_core
with any_core():
    thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
    thread.start()
thread.join()
assert seen[1] == mine, (seen, mine)
assert os.sched_getaffinity(0) == {max(mine)}  # the engine's thread stays where it was bound
"""


def test_the_cores_are_those_that_the_process_was_given():
    some = set(sorted(os.sched_getaffinity(0))[:2])
    subprocess.run(
        [sys.executable, "-c", CODE], check=True, preexec_fn=lambda: os.sched_setaffinity(0, some), timeout=120
    )
