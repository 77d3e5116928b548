"""Patches ``EngineCore.reset_prefix_cache``: copy the finished requests' states before the cache is reset.

vLLM resets nothing while a connector holds blocks. A plain reset returns False, and prefixes keep the states of replaced
weights. A reset with ``reset_running_requests=True``, which ``LLM.sleep(1)`` makes too, raises. A connector cannot ask
for steps before a reset, so the engine's method is patched.

Versions: 0.31 to 0.33 (one method for engines in this process and in child processes). Upstream issue: none yet.
If the method, or the scheduler's pause, is missing, the engine is left as it is and a warning says so.
"""

from __future__ import annotations

import functools
import time
from typing import Any

from hsx_dist.connector.flush import pending_of
from hsx_dist.logger import get_logger

log = get_logger(__name__)

#: How long a reset waits for a store that is slow. The engine takes no other step meanwhile.
WAIT_S = 60.0


def copy_before_resets() -> None:
    """Patch vLLM in this process, the engine's. Calling it twice changes nothing."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    theirs = getattr(EngineCore, "reset_prefix_cache", None)
    if theirs is None or not hasattr(Scheduler, "set_pause_state"):
        log.warning("this vLLM resets its cache in an unknown way. Flush the engine before you reset or sleep")
        return
    if getattr(theirs, "hsx", False):
        return

    @functools.wraps(theirs)
    def reset_prefix_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        if left := release(self, WAIT_S):
            log.warning("the cache is reset while blocks of %d requests are held, store is slow: it may fail", left)
        return theirs(self, *args, **kwargs)

    reset_prefix_cache.hsx = True  # type: ignore[attr-defined]
    EngineCore.reset_prefix_cache = reset_prefix_cache


def release(core: Any, seconds: float) -> int:
    """Step vLLM's ``EngineCore`` without tokens until our connector holds no blocks.

    Steps that were in flight are completed. Their outputs reach the client as if nothing had happened.

    Returns:
        Requests whose blocks are still held after ``seconds``.
    """
    from vllm.v1.core.sched.interface import PauseState

    scheduler = core.scheduler
    end = time.monotonic() + seconds
    if not pending_of(scheduler.connector):
        return 0
    outputs: list[Any] = []
    state = scheduler.pause_state
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    try:
        while pending_of(scheduler.connector) and time.monotonic() < end:
            if hasattr(core, "_process_engine_step"):  # an engine in a process of its own: sends outputs itself
                core._process_engine_step()
            else:
                step, executed = core.step_fn()
                core.post_step(executed)
                outputs += [step] if any(o.outputs for o in (step or {}).values()) else []
    finally:
        scheduler.set_pause_state(state)
        if outputs:
            _return_next(core, outputs)
    return pending_of(scheduler.connector)


def _return_next(core: Any, outputs: list[Any]) -> None:
    """Make the next steps of ``core`` return these outputs before they take a step."""
    theirs = core.step_fn

    def step_fn() -> Any:
        if outputs:
            return outputs.pop(0), False
        core.step_fn = theirs
        return theirs()

    core.step_fn = step_fn
