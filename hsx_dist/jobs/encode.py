"""From a row to the token ids that the model gets, by the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hsx_dist.errors import ConfigError, InputError
from hsx_dist.jobs.rows import Row


def load_tokenizer(model: str, *, revision: str | None = None, engine_kwargs: Mapping[str, Any] | None = None) -> Any:
    """The transformers tokenizer that vLLM would take for ``model`` with these engine arguments.

    Raises ConfigError when there is none.
    """
    from transformers import AutoTokenizer  # seconds of import that only a driver needs

    engine_kwargs = engine_kwargs or {}
    source = engine_kwargs.get("tokenizer") or model
    if source == model:
        revision = engine_kwargs.get("tokenizer_revision") or revision
    else:
        revision = engine_kwargs.get("tokenizer_revision")
    try:
        return AutoTokenizer.from_pretrained(
            source,
            revision=revision,
            trust_remote_code=bool(engine_kwargs.get("trust_remote_code", False)),
            use_fast=engine_kwargs.get("tokenizer_mode") != "slow",
        )
    except Exception as e:
        # transformers raises OSError, ValueError, KeyError, … for one thing: it is not there or not readable.
        why = (str(e).splitlines() or [""])[0][:200]
        raise ConfigError(
            f"model: expected a model with a tokenizer at {source!r}, came {type(e).__name__}: {why}; check the "
            "name, the revision and the access to it"
        ) from e


class RowEncoder:
    """Turns rows into token ids, and refuses those that the model cannot take.

    ``max_tokens`` is the longest prompt that the engine accepts (vLLM: ``max_model_len - 1``); ``vocab_size`` bounds
    the ids of ``token_ids`` rows (default: the tokenizer's size).
    """

    def __init__(
        self,
        tokenizer: Any,
        max_tokens: int,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        vocab_size: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.chat_template_kwargs = {"add_generation_prompt": False, **(chat_template_kwargs or {})}
        self.vocab_size = len(tokenizer) if vocab_size is None else vocab_size

    def encode(self, row: Row) -> list[int]:
        """The row's token ids; InputError, with the reason, when it has none, too many, or unknown ones."""
        if row.token_ids is not None:
            ids = self._checked(row.token_ids)
        elif row.messages is not None:
            ids = self._chat(row.messages)
        else:
            ids = self._text(row.text or "")
        if not ids:
            raise InputError("expected at least one token, came none after tokenising; remove the row")
        if len(ids) > self.max_tokens:
            raise InputError(
                f"expected at most {self.max_tokens} tokens, came {len(ids)}; shorten the row, or extract it with "
                "a larger engine_kwargs.max_model_len into another run"
            )
        return ids

    def _text(self, text: str) -> list[int]:
        try:
            # verbose=False: the tokenizer would warn of each text longer than its own idea of the limit.
            return _ints(self.tokenizer(text, verbose=False)["input_ids"])
        except Exception as e:
            raise InputError(f"expected text that the tokenizer takes, came {_told(e)}; correct the row") from e

    def _chat(self, messages: list[dict[str, Any]]) -> list[int]:
        try:
            # A template is a program of the model's author: anything can be raised.
            return _ints(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=True, return_dict=False, **self.chat_template_kwargs
                )
            )
        except Exception as e:
            raise InputError(
                f"expected messages that the model's chat template takes, came {_told(e)}; correct the row, or "
                "chat_template_kwargs"
            ) from e

    def _checked(self, ids: list[int]) -> list[int]:
        for i, token in enumerate(ids):
            if not 0 <= token < self.vocab_size:
                raise InputError(
                    f"expected token ids below {self.vocab_size}, the model's vocabulary, came {token} at position "
                    f"{i}; tokenise with this model's tokenizer"
                )
        return list(ids)


def _ints(ids: Any) -> list[int]:
    return [int(i) for i in ids]


def _told(e: Exception) -> str:
    return f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:200]}"
