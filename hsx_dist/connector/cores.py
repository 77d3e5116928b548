"""The cores that whoever started this process gave it (``taskset``, a batch system).

Read at the import, which vLLM's plugin does in every process before the engine pins its threads to cores of its choice.
"""

from __future__ import annotations

import os

#: Empty where the system does not tell.
CORES: frozenset[int] = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
