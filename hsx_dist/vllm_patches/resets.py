"""Held blocks are copied before the prefix cache is reset.

Versions: vLLM 0.31, 0.32 and 0.33, both runners. Upstream: no issue yet.

What vLLM does: it resets nothing while a connector holds blocks, and a connector cannot ask for steps before a reset.
A plain reset returns False, and prefixes keep the states of replaced weights. A reset with
``reset_running_requests=True`` raises. ``LLM.sleep(1)`` makes such a reset too.

The patch: ``EngineCore.reset_prefix_cache`` first takes steps without tokens until no block is held.

How a change of vLLM is noticed: if the method or the scheduler's pause is missing, the engine logs a warning at its
start, and vLLM's resets stay unchanged. The tests reset real engines.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from hsx_dist.logger import get_logger

log = get_logger(__name__)

#: How long a reset waits for a slow store. The engine takes no other step meanwhile.
WAIT_S = 60.0


def install(pending: Callable[[Any], int]) -> None:
    """Patch vLLM in this process, the engine's. Calling it twice changes nothing.

    Args:
        pending: how many finished requests a scheduler's connector has not copied yet.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    theirs = getattr(EngineCore, "reset_prefix_cache", None)
    if theirs is None or not hasattr(Scheduler, "set_pause_state"):
        log.warning("unknown vLLM: a reset of the prefix cache may fail. Flush the engine before a reset or a sleep")
        return
    if getattr(theirs, "hsx", False):
        return

    @functools.wraps(theirs)
    def reset_prefix_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        if left := copy_held(self, pending, WAIT_S):
            log.warning("prefix cache reset: %d requests are not copied after %g s. Check the store", left, WAIT_S)
        return theirs(self, *args, **kwargs)

    reset_prefix_cache.hsx = True  # type: ignore[attr-defined]
    EngineCore.reset_prefix_cache = reset_prefix_cache


def copy_held(core: Any, pending: Callable[[Any], int], seconds: float) -> int:
    """Step vLLM's ``EngineCore`` without tokens until our connector has copied all finished requests.

    Steps that were in flight are completed, and the client gets their outputs.

    Returns:
        The number of requests that are not copied after ``seconds``.
    """
    from vllm.v1.core.sched.interface import PauseState

    scheduler = core.scheduler
    left = pending(scheduler.connector)
    if not left:
        return 0
    end = time.monotonic() + seconds
    outputs: list[Any] = []
    state = scheduler.pause_state
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    try:
        while (left := pending(scheduler.connector)) and time.monotonic() < end:
            if hasattr(core, "_process_engine_step"):  # an engine in a child process, which sends its outputs
                core._process_engine_step()
                continue
            step, executed = core.step_fn()
            core.post_step(executed)
            if any(o.outputs for o in (step or {}).values()):
                outputs.append(step)
    finally:
        scheduler.set_pause_state(state)
        if outputs:
            _return_next(core, outputs)
    return left


def _return_next(core: Any, outputs: list[Any]) -> None:
    """Make the next steps of ``core`` return ``outputs``, one each, before it takes a step."""
    theirs = core.step_fn

    def step_fn() -> Any:
        if outputs:
            return outputs.pop(0), False
        core.step_fn = theirs
        return theirs()

    core.step_fn = step_fn
