"""Whether obstore can be used in this process. A forked process has its parent's obstore, without its threads."""

from __future__ import annotations

import os
import sys

from hsx_dist.errors import ConfigError

_inherited = False


def require_own_obstore() -> None:
    """Raise ``ConfigError`` if this process was forked from a process that had loaded obstore.

    obstore's runtime is global. It has threads, which the forked process lacks, and an epoll descriptor, which both
    processes share. A request in the forked process hangs, or the parent's threads use its pointers: the parent dies,
    or its memory changes.
    """
    if _inherited:
        raise ConfigError(
            "store.backend obstore: expected a process that loads obstore, got one forked from a process that had "
            "loaded it. Start processes with spawn, which is faster, or set store.backend: auto"
        )


def _after_fork() -> None:
    global _inherited
    # Also if other code of the parent loaded it.
    _inherited = _inherited or "obstore" in sys.modules


os.register_at_fork(after_in_child=_after_fork)
