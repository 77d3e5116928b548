"""Encodes rows as the token ids that the model gets, by the model's own tokenizer, with their loss mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hsx_dist.config import ExtractConfig, public_url
from hsx_dist.config.engine_arguments import trusts_remote_code
from hsx_dist.errors import ConfigError, InputError, is_error
from hsx_dist.inputs.loss_mask import mask_of_spans, spans_of_roles
from hsx_dist.inputs.rendered import Text, require_rendered, require_texts
from hsx_dist.inputs.row_values import shown, shown_problem
from hsx_dist.inputs.rows import Row
from hsx_dist.regular_files import check_folder
from hsx_dist.text import bounded

#: Limit of the characters that are rendered to derive one row's loss mask. For the time that a message takes, each
#: rendered message counts as ``_MESSAGE_COST`` more.
_MAX_RENDERED = 1 << 30
_MESSAGE_COST = 256
#: A row's text may have this many characters for each token that a row may have, and at least 256 Ki. A tokenizer takes
#: hundreds of bytes of memory for each token.
_CHARACTERS_PER_TOKEN = 64
_FREE_CHARACTERS = 1 << 18
#: Options with which ``apply_chat_template`` tokenises: the template has written the special tokens already.
_AS_RENDERED = {"add_special_tokens": False}


class TooLong(InputError):
    """A row has more tokens than allowed."""


class OutOfMemory(InputError):
    """The process had no memory to encode a row. Another process, or this one later, may encode it."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A row as the engine gets it. ``loss_mask``: a byte, 0 or 1, for each token; None if the row has none."""

    token_ids: list[int]
    loss_mask: bytes | None = None


@dataclass(frozen=True, slots=True)
class RowRules:
    """Settings of the encoding: fields of ``InputConfig`` and ``ExtractConfig`` with these names."""

    loss_roles: tuple[str, ...] | None = None
    max_length: int | None = None
    too_long: str = "skip"
    include_output_tokens: bool = False
    select: str = "all"

    @classmethod
    def of(cls, config: ExtractConfig) -> RowRules:
        """Return the rules of a configuration."""
        roles = config.input.loss_roles
        return cls(
            loss_roles=None if roles is None else tuple(roles),
            max_length=config.input.max_length,
            too_long=config.input.too_long,
            include_output_tokens=config.include_output_tokens,
            select=config.select,
        )


def load_tokenizer(model: str, *, revision: str | None = None, engine_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Return the transformers tokenizer that vLLM uses for ``model`` with these engine arguments.

    Raises ConfigError if there is none.
    """
    from transformers import AutoTokenizer  # seconds of import that only a driver needs

    engine_kwargs = engine_kwargs or {}
    source = engine_kwargs.get("tokenizer") or model
    if source == model:
        revision = engine_kwargs.get("tokenizer_revision") or revision
    else:
        revision = engine_kwargs.get("tokenizer_revision")
    check_folder(source)
    try:
        return AutoTokenizer.from_pretrained(
            source,
            revision=revision,
            trust_remote_code=trusts_remote_code(engine_kwargs),
            use_fast=engine_kwargs.get("tokenizer_mode") != "slow",
        )
    except BaseException as e:
        if not is_error(e):
            raise
        # For a tokenizer that is missing or unreadable, transformers raises OSError, ValueError, KeyError, …
        why = bounded(public_url((str(e).splitlines() or [""])[0]), 200)  # it may name the hub's URL
        raise ConfigError(
            f"model: expected a model with a tokenizer at {source!r}, got {type(e).__name__}: {why}. Check the "
            "name, the revision and the access to it"
        ) from e


class RowEncoder:
    """Encodes rows as token ids, and refuses rows that the model cannot take.

    ``max_tokens`` is the longest prompt that the engine accepts (vLLM: ``max_model_len - 1``); ``vocab_size`` bounds
    the ids of every row (default: the tokenizer's size).

    Raises:
        ConfigError: a loss mask must be derived, and the tokenizer does not map tokens to characters.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_tokens: int,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        vocab_size: int | None = None,
        rules: RowRules = RowRules(),
    ) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.vocab_size = len(tokenizer) if vocab_size is None else vocab_size
        self.rules = rules
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        if rules.loss_roles and not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                "input.loss_roles: expected a fast tokenizer, which maps tokens to characters, got "
                f"{type(tokenizer).__name__}. Give each row a loss_mask, or use another tokenizer_mode"
            )

    def encode(self, row: Row) -> Encoded:
        """Return the row's token ids and loss mask.

        Raises:
            InputError: the row has no tokens, or unknown ones. The message has the reason.
            OutOfMemory: there was no memory for the row.
            TooLong: the row has more tokens than allowed, and must not be cut.
        """
        try:
            return self._encoded(row)
        except MemoryError as e:
            raise OutOfMemory(
                "expected memory to render and tokenise the row, got MemoryError. Shorten the row, correct the "
                "chat template, or give replicas more memory"
            ) from e

    def _encoded(self, row: Row) -> Encoded:
        mask: Sequence[int] | None = None
        if row.token_ids is not None:
            ids = list(row.token_ids)
        elif row.messages is not None:
            ids, mask = self._chat(row)
        else:
            ids = self._text(row.text or "")
        if not ids:
            raise InputError("expected at least one token, got none after tokenising. Remove the row")
        self._require_known(ids, given=row.token_ids is not None)
        mask = self._mask(row, ids, mask)
        self._check_length(len(ids))
        ids, mask = ids[: self._limit], None if mask is None else mask[: self._limit]
        if mask is not None and not any(mask) and not self.rules.include_output_tokens:
            raise InputError(
                f"expected a loss mask with a 1 in it, got {len(ids)} zeros, from which nothing would be learned. "
                "Correct the mask, or remove the row"
            )
        return Encoded(ids, None if mask is None else bytes(mask))

    @property
    def _limit(self) -> int:
        return min(self.max_tokens, self.rules.max_length or self.max_tokens)

    def _check_length(self, length: int) -> None:
        self._require_at_most(self._limit, length, "tokens")

    def _require_at_most(self, most: int, got: int, what: str) -> None:
        if got > most and self.rules.too_long != "truncate":
            raise TooLong(
                f"expected at most {most} {what}, got {got}. Shorten the row, set input.too_long="
                "truncate, or extract it with a larger input.max_length or engine_kwargs.max_model_len into another run"
            )

    def _mask(self, row: Row, ids: list[int], derived: Sequence[int] | None) -> Sequence[int] | None:
        rules = self.rules
        if row.loss_mask is not None:
            if len(row.loss_mask) != len(ids):
                raise InputError(
                    f"loss_mask: expected {len(ids)} entries, one for each token, got {len(row.loss_mask)}; derive it "
                    "with the model's own tokenizer"
                )
            return row.loss_mask
        if derived is not None or not (rules.loss_roles or rules.select == "loss_mask"):
            return derived
        if rules.include_output_tokens:
            return bytes(len(ids))  # only generated tokens count
        raise InputError(
            "expected a loss mask, or messages from which input.loss_roles derives one, got neither. Add a loss_mask "
            "to the row, or remove the row"
        )

    def _text(self, text: str) -> list[int]:
        try:
            return _ints(self._tokenised(text)["input_ids"])
        except (InputError, MemoryError):
            raise
        except BaseException as e:
            if not is_error(e):
                raise
            raise InputError(
                f"expected text that the tokenizer accepts, got {shown_problem(e)}. Correct the row"
            ) from e

    def _tokenised(self, text: str, **options: Any) -> Any:
        # Without memory a tokenizer ends its process.
        most = max(_FREE_CHARACTERS, self._limit * _CHARACTERS_PER_TOKEN)
        self._require_at_most(most, len(text), f"characters for {self._limit} tokens")
        # verbose=False: else the tokenizer warns of each text above its own limit, which may not be the model's.
        return self.tokenizer(text, verbose=False, **options)

    def _chat(self, row: Row) -> tuple[list[int], bytes | None]:
        messages = row.messages or []
        options = self._chat_options(row)
        try:
            # A template is a program of the model's author, and may raise any error.
            order = require_rendered(messages, options.get("tools"), partial(self._rendered, options))
            if not getattr(self.tokenizer, "is_fast", False):
                self._require_texts_if_rendered(messages, options, order)
                ids = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
                return _ints(ids), None
            whole = self._rendered(options, messages, None)
            require_texts(messages, whole, order)
            if self.rules.loss_roles and row.loss_mask is None:
                return self._chat_with_mask(whole, messages, options)
            return _ints(self._tokenised(whole, **_AS_RENDERED)["input_ids"]), None
        except (InputError, MemoryError):
            raise
        except BaseException as e:
            if not is_error(e):
                raise
            raise InputError(
                f"expected messages that the model's chat template accepts, got {shown_problem(e)}. Correct the row, "
                "or chat_template_kwargs"
            ) from e

    def _require_texts_if_rendered(
        self, messages: list[dict[str, Any]], options: Mapping[str, Any], order: list[Text] | None
    ) -> None:
        # Mistral's own tokenizer has no template: its text is that of tokens, with other characters for blanks.
        if not (options.get("chat_template") or getattr(self.tokenizer, "chat_template", None)):
            return
        try:
            whole = self._rendered(options, messages, None)
        except MemoryError:
            raise  # not the row's fault
        except Exception:  # noqa: BLE001 - only the rendering as tokens decides whether the row is refused
            return
        require_texts(messages, whole, order)

    def _rendered(self, options: Mapping[str, Any], messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        changed = options if tools is None else {**options, "tools": tools}
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **changed))

    def _chat_options(self, row: Row) -> dict[str, Any]:
        """Return the template's arguments. If the answer will be generated, the chat ends with the answer's header."""
        options = dict(self.chat_template_kwargs)
        asks = bool(row.messages) and (row.messages or [])[-1].get("role") != "assistant"
        options.setdefault("add_generation_prompt", self.rules.include_output_tokens and asks)
        if row.tools is not None:
            options["tools"] = row.tools
        return options

    def _chat_with_mask(
        self, whole: str, messages: list[dict[str, Any]], options: dict[str, Any]
    ) -> tuple[list[int], bytes]:
        left = _MAX_RENDERED

        def render(some: list[dict[str, Any]], header: bool, tools: list[Any] | None = None) -> str:
            nonlocal left
            changed = {**options, "add_generation_prompt": header, "continue_final_message": False}
            text = self._rendered(changed, some, tools)
            left -= len(text) + _MESSAGE_COST * len(some)
            if left < 0:  # all prefixes of a chat together grow with the square of its length
                raise InputError(
                    f"loss_roles: expected a chat whose prefixes have at most {_MAX_RENDERED >> 20} Mi characters in "
                    f"all, got more with {len(messages)} messages. Give the row a loss_mask, or split it"
                )
            return text

        encoded = self._tokenised(whole, **_AS_RENDERED, return_offsets_mapping=True)
        ids = _ints(encoded["input_ids"])
        self._check_length(len(ids))  # before prefixes are rendered, which takes minutes for a long row
        spans = spans_of_roles(whole, messages, self.rules.loss_roles or (), render, options.get("tools"))
        return ids, mask_of_spans(whole, ids, encoded["offset_mapping"], spans, self._special)

    def _require_known(self, ids: list[int], *, given: bool) -> None:
        # vLLM takes an id of its padded embeddings, of which the model knows nothing. A larger id ends the engine.
        if min(ids) >= 0 and max(ids) < self.vocab_size:
            return
        at, token = next((i, token) for i, token in enumerate(ids) if not 0 <= token < self.vocab_size)
        expected = f"expected token ids below {self.vocab_size}, the model's vocabulary, got {token} at position {at}"
        if given:
            raise InputError(f"{expected}; tokenise with this model's tokenizer")
        raise InputError(
            f"{expected}: the tokenizer adds {shown(self.tokenizer.convert_ids_to_tokens(token))}. Remove it from the "
            "row and the chat template, use the model's own tokenizer, or resize the model's embeddings"
        )


def _ints(ids: Any) -> list[int]:
    return [int(i) for i in ids]
