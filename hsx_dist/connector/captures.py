"""Captured states that the model does not write to any more.

vLLM (0.31, 0.32) captures the embeddings, layer 0, as the tensor itself: there is no residual yet that they would be
added to. The first layer's fused norm then adds to that very tensor where its kernel works in place, as that of GPUs
does with ``enforce_eager``: what is cached as layer 0 is a later stream. Compiled, a norm owns its inputs too, and may
use their memory again. All other layers are sums of their own. Taken in every engine of a process that has this plugin:
what an engine without our connector captures, for a drafter, must stay as well.
"""

from __future__ import annotations

import functools
from typing import Any


def keep_captures() -> None:
    """Have vLLM's models capture copies where they would capture a tensor of theirs. More than once is once."""
    from vllm.model_executor.models import interfaces

    mixin = getattr(interfaces, "EagleModelMixin", None)
    theirs = getattr(mixin, "_maybe_add_hidden_state", None)
    if mixin is None or theirs is None or getattr(theirs, "hsx", False):
        return  # a vLLM whose models capture in another way, or done already

    @functools.wraps(theirs)
    def add(self: Any, captured: list[Any], layer_idx: int, hidden_states: Any, residual: Any) -> list[Any]:
        before = len(captured)
        found = theirs(self, captured, layer_idx, hidden_states, residual)
        if len(found) > before and found[-1] is hidden_states:
            found[-1] = hidden_states.clone()
        return found

    add.hsx = True  # type: ignore[attr-defined]
    mixin._maybe_add_hidden_state = add
