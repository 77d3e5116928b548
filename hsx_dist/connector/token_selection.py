"""Which of a request's tokens are stored, and what says so: in the sample's ``meta``, and in arrays attached to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hsx_dist.connector.request_params import RequestParams

#: What stands in a mean's ``token_ids``: it is no token's state.
NO_TOKEN = -1


@dataclass(slots=True)
class Chosen:
    """The tokens that are stored.

    ``token_ids``: theirs, int64 ``[n]``; ``positions``: where they stand in the request, None for all; ``mean_of``: of
    how many tokens the mean is stored, 0 for rows of their own; ``meta``, ``attached``: what is stored about the
    choice. Two choices from the same tokens differ in these or in ``n``.
    """

    token_ids: np.ndarray[Any, Any]
    positions: range | np.ndarray[Any, Any] | None = None
    mean_of: int = 0
    meta: dict[str, Any] = field(default_factory=dict)
    attached: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)


def choose(
    options: RequestParams, prompt_tokens: int, tokens: np.ndarray[Any, Any], refused: dict[str, str]
) -> Chosen | None:
    """What is stored of a request whose ``tokens`` (int64 ``[T]``) have states, of which the prompt has
    ``prompt_tokens``; None where a loss mask selects none of them.

    What cannot be done as asked is told in ``refused``, and all tokens are stored.
    """
    total = len(tokens)
    mask = _whole_mask(options.loss_mask, total - prompt_tokens)
    kind = options.tokens.kind
    if kind == "mean":
        ids = {"request_token_ids": tokens.astype(np.int32)}  # so that it can be checked over what it was taken
        none = np.array([NO_TOKEN], np.int64)
        return Chosen(none, None, total, {"tokens": {"mean": True, "of": total}}, ids)
    if kind == "loss_mask":
        if mask is None:
            refused.setdefault("hidden_states_tokens", "needs hidden_states_loss_mask; all tokens are stored")
        else:
            at = np.flatnonzero(mask)
            if not len(at):
                return None
            attached = {"loss_mask": mask[at], "positions": at.astype(np.int32)}
            meta = {"tokens": {"loss_mask": True, "of": total}}
            return Chosen(tokens[at], at, 0, meta, attached)
    span = options.tokens.of(total)
    if not span:
        refused["hidden_states_tokens"] = f"selects none of the {total} tokens; all are stored"
        span = range(total)
    attached = {} if mask is None else {"loss_mask": mask[span.start : span.stop : span.step]}
    if span == range(total):
        return Chosen(tokens, attached=attached)
    meta = {"tokens": {"start": span.start, "step": span.step, "of": total}}
    return Chosen(tokens[span.start : span.stop : span.step], span, 0, meta, attached)


def _whole_mask(mask: np.ndarray[Any, Any] | None, generated: int) -> np.ndarray[Any, Any] | None:
    """The prompt's mask, and a 1 for each generated token: what a model says itself is what it is trained on."""
    return None if mask is None else np.concatenate([mask, np.ones(generated, np.uint8)])
