"""Every token is computed in this engine: no other connector of vLLM's ``MultiConnector`` loads any.

Versions: vLLM 0.31, 0.32 and 0.33, both runners. Upstream: no issue is open.

What vLLM does: ``MultiConnector`` lets the first connector that offers tokens load them. Loaded tokens count as
computed, and their blocks enter the prefix cache. Nothing says whether the cache of hidden states was restored too, by
which layers, or from which weights. Rows that were never written would be stored as states.

The patch: while the scheduler asks the connectors for tokens, the request's ``skip_reading_prefix_cache`` is
set. The scheduler reads it after the answer, and loads nothing, as for a request with prompt log-probabilities. Local
prefix hits were looked up before, and are kept. The flag is reset when the request has its blocks, or when the step is
scheduled.

How a change of vLLM is noticed: the request's statistics count tokens that were loaded all the same. Then no sample of
this engine is stored (``loaded_tokens``). The tests run vLLM's scheduler with a connector that offers tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hsx_dist.logger import get_logger

log = get_logger(__name__)


class Loads:
    """The requests for which one scheduler currently asks the connectors for tokens."""

    def __init__(self) -> None:
        self._asked: list[Any] = []

    def refuse(self, request: Any) -> None:
        """Let the scheduler load nothing for ``request``. Call it in ``get_num_new_matched_tokens``."""
        if not request.skip_reading_prefix_cache:
            request.skip_reading_prefix_cache = True
            self._asked.append(request)

    def reset(self) -> None:
        """Restore the requests' flags, so that a later try to schedule them looks up local prefixes again."""
        for request in self._asked:
            request.skip_reading_prefix_cache = False
        self._asked.clear()


def loaded_tokens(request: Any) -> int:
    """Return the number of tokens that another connector loads for a request with new blocks. 0 is expected."""
    stats = getattr(request, "prefill_stats", None)  # None after the first token
    return stats.num_external_cached_tokens if stats is not None else 0


def warn_of_loads(others: Iterable[Any]) -> None:
    """Log a warning that names the other connectors of the engine whose role is to load."""
    if names := sorted({type(c).__name__ for c in others if c._kv_transfer_config.is_kv_consumer}):
        log.warning(
            "%s: tokens are not loaded in an engine with HiddenStatesConnector, which computes the prompt of each "
            "request. If the connector must only save, set its kv_role to kv_producer",
            ", ".join(names),
        )
