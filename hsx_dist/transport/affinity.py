"""The cores that whoever started this process gave it (``taskset``, a batch system).

Read at the import, which vLLM's plugin does in every process before the engine pins its threads to cores of its choice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

#: Empty where the system does not tell.
CORES: frozenset[int] = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


@contextmanager
def any_core() -> Iterator[None]:
    """Threads that are started meanwhile may run on all ``CORES``: a thread inherits the cores of the one that starts
    it, and the engine's thread may have been pinned to the engine's."""
    if not CORES:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, CORES)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
