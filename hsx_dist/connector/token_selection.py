"""Selection of the tokens of a request to store. The sample's ``meta`` and attached arrays describe the selection."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hsx_dist.connector.request_params import RequestParams

#: The only entry of a mean's ``token_ids``, since a mean is not the state of a token.
NO_TOKEN = -1


@dataclass(slots=True)
class Chosen:
    """The tokens to store.

    ``token_ids``: int64 ``[n]``. ``positions``: their positions in the request, None for all tokens. ``mean_of``:
    number of tokens whose mean is stored as one row; 0 to store a row per token. ``meta``, ``attached``: the stored
    description of the selection. Two different selections of the same tokens differ in these or in ``n``.
    """

    token_ids: np.ndarray[Any, Any]
    positions: range | np.ndarray[Any, Any] | None = None
    mean_of: int = 0
    meta: dict[str, Any] = field(default_factory=dict)
    attached: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)


def choose(
    options: RequestParams, prompt_tokens: int, tokens: np.ndarray[Any, Any], refused: dict[str, str]
) -> Chosen | None:
    """Select the tokens to store from ``tokens`` (int64 ``[T]``), which have states.

    The first ``prompt_tokens`` of them are the prompt's. Returns None if a loss mask selects no token. If a selection
    is not possible, ``refused`` gets the reason and all tokens are selected.
    """
    total = len(tokens)
    mask = _whole_mask(options.loss_mask, total - prompt_tokens)
    kind = options.tokens.kind
    if kind == "mean":
        ids = {"request_token_ids": tokens.astype(np.int32)}  # lets readers check which tokens the mean covers
        none = np.array([NO_TOKEN], np.int64)
        return Chosen(none, None, total, {"tokens": {"mean": True, "of": total}}, ids)
    if kind == "loss_mask":
        if mask is None:
            refused.setdefault(
                "hidden_states_tokens", "expected hidden_states_loss_mask too, got none; all tokens are stored"
            )
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
    """Return the prompt's mask and a 1 for each generated token: a model is trained on its own output."""
    return None if mask is None else np.concatenate([mask, np.ones(generated, np.uint8)])
