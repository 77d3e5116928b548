"""Count the memory that Python and numpy allocate."""

from __future__ import annotations

import tracemalloc


def trace_memory() -> None:
    """Count allocated memory from zero: see ``tracemalloc.get_traced_memory``. The process counts until it ends.

    Mark a test that calls this as ``traced``, and it runs after all others: a traced process is slower.

    Nothing calls ``tracemalloc.stop``. It frees memory that other threads may still use, and then the process crashes.
    This happens if a thread allocates without the GIL, as threads of Arrow do. CPython 3.11 has the bug (gh-128679).
    """
    tracemalloc.start()  # does nothing if it is on
    tracemalloc.clear_traces()
