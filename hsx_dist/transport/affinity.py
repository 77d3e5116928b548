"""The CPU cores assigned to this process when it started (by ``taskset`` or a batch system).

Read at import. vLLM's plugin imports this module in every process before the engine pins its threads to cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

#: Empty on systems without ``sched_getaffinity``.
CORES: frozenset[int] = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


@contextmanager
def any_core() -> Iterator[None]:
    """Let threads that are started in the context run on all ``CORES``.

    A thread inherits its starter's cores, and the engine may have pinned the current thread.
    """
    if not CORES:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, CORES)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
