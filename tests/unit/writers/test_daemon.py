from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

from hsx_dist.writers.daemon import DaemonPool

HANGS = """
import threading
from hsx_dist.writers.daemon import DaemonPool
pool = DaemonPool(2, "t")
pool.submit(threading.Event().wait)
pool.close(wait=False)
print("the end")
"""


def test_a_process_ends_though_a_call_hangs() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "the end\n"


def test_calls_give_what_they_return_or_raise() -> None:
    pool = DaemonPool(3, "t")
    assert [f.result(30) for f in [pool.submit(divmod, n, 7) for n in range(20)]] == [divmod(n, 7) for n in range(20)]
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 1, 0).result(30)
    pool.close()


def test_one_thread_keeps_the_order_and_close_waits() -> None:
    pool, seen, go = DaemonPool(1, "t"), list[int](), threading.Event()
    pool.submit(go.wait, 30)
    for n in range(50):
        pool.submit(seen.append, n)
    cancelled = pool.submit(seen.append, -1)
    assert cancelled.cancel()
    go.set()
    pool.close()
    assert seen == list(range(50))


def test_a_failed_call_keeps_no_buffers():
    """An error in a cycle with its future would keep them until a garbage collection."""
    pool, kept = DaemonPool(1, "test"), []

    def fail() -> None:
        buffer = np.zeros(8)
        kept.append(weakref.ref(buffer))
        raise OSError("no such page")

    gc.disable()
    try:
        with pytest.raises(OSError, match="no such page"):
            pool.submit(fail).result(20)
        pool.close()
        assert kept[0]() is None
    finally:
        gc.enable()
