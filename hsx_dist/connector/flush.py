"""Block until the hidden states of all finished requests are stored."""

from __future__ import annotations

import time
from typing import Any

from hsx_dist.errors import EngineError
from hsx_dist.text import shown_error

#: Seconds between two polls of an engine in child processes.
_PAUSE_S = 0.01
#: Number of consecutive zeros that an engine in child processes must answer. One zero is not enough: the engine may
#: answer before the step that passes a finished request to the workers.
_QUIET = 3


class HiddenStatesWorkerExtension:
    """Methods for every worker: ``worker_extension_cls="hsx_dist.connector.flush.HiddenStatesWorkerExtension"``."""

    def hidden_states_pending(self) -> int:
        """Return how many requests' states this worker has received and not stored yet."""
        return pending_here()


def pending_here() -> int:
    """Return the number of pending requests of this process's worker connectors."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    from hsx_dist.connector.connector import pending_of

    if not has_kv_transfer_group():
        return 0
    return pending_of(get_kv_transfer_group())


def flush(llm: Any, timeout: float = 60.0) -> None:
    """Block until the hidden states of every finished request are stored, or marked as failed.

    A marker that the store refuses is logged and not waited for.

    ``LLM.generate`` stops stepping at the last answer, while the last requests' states are still in the cache.
    ``flush`` steps an engine in this process. An engine in child processes needs ``HiddenStatesWorkerExtension``,
    through which ``flush`` polls its workers.

    Args:
        llm: vLLM's ``LLM``.
        timeout: seconds.

    Raises:
        TimeoutError: not everything was stored in time.
        EngineError: the engine runs in child processes, without the extension.

    Example:
        >>> from hsx_dist.connector.flush import flush
        >>> answers = llm.generate(["The capital of France is"])  # doctest: +SKIP
        >>> flush(llm, timeout=120)  # doctest: +SKIP
    """
    from hsx_dist.connector.connector import pending_of

    end = time.monotonic() + timeout
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)  # an InprocClient's
    quiet = 0
    while quiet < (1 if core is not None else _QUIET):
        left = pending_of(core.scheduler.connector) + pending_here() if core is not None else _ask(llm)
        quiet = 0 if left else quiet + 1
        if left and time.monotonic() > end:
            raise TimeoutError(
                f"expected all hidden states to be stored within {timeout:g} s, got {left} requests that are not "
                "stored. Check the store and the engine's log, or raise timeout"
            )
        if core is not None and pending_of(core.scheduler.connector):
            llm.llm_engine.step()
        elif left or quiet < _QUIET:
            time.sleep(_PAUSE_S)


def _ask(llm: Any) -> int:
    try:
        return sum(llm.collective_rpc("hidden_states_pending"))
    except Exception as e:
        raise EngineError(
            f"expected an answer of HiddenStatesWorkerExtension, got {shown_error(e)}. Start the engine with "
            'worker_extension_cls="hsx_dist.connector.flush.HiddenStatesWorkerExtension"'
        ) from e
