"""From token ids back to text, by the tokenizer of the model that a run was made with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hsx_dist.jobs.encode import load_tokenizer
from hsx_dist.testing.models import resolve_model


def decoder_of(meaning: Mapping[str, Any]) -> Callable[[Sequence[int]], list[str]]:
    """Token ids → the text of each, for a run whose ``run.json`` has this ``meaning``.

    Raises:
        ConfigError: the model's tokenizer is not at hand.
        ImportError: transformers is not installed.
    """
    kwargs = meaning.get("engine_kwargs")
    tokenizer = load_tokenizer(
        resolve_model(str(meaning.get("model", ""))),
        revision=meaning.get("revision"),
        engine_kwargs=kwargs if isinstance(kwargs, dict) else {},
    )
    # One by one: a token that is part of a character is then one that cannot be shown, not its neighbours'.
    return lambda ids: [tokenizer.decode([i]) for i in ids]
