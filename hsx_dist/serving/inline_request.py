"""A completion request that asks for its states: its parsed options, and the changed body for vLLM."""

from __future__ import annotations

import json
import reprlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hsx_dist.connector.request_params import PARAMS, TokenSelection, read_request_params
from hsx_dist.page import HIDDEN_STATES, sample_key
from hsx_dist.serving.refusals import bad_request
from hsx_dist.serving.states_file import Range, StatesFile

#: The member of a request's body that asks for its states.
INLINE = "hidden_states_inline"
#: Only the engine knows the captured layers and points, and the prompt's length. These parameters are checked on the
#: stored sample.
_CHECKED_LATER = ("hidden_states_layers", "hidden_states_points")


@dataclass(frozen=True)
class InlineRequest:
    """``body``: for vLLM, with a unique key. ``prompts``: number of prompts. ``choices``: number of choices per
    prompt."""

    body: bytes
    key: str
    prompts: int
    choices: int
    params: Mapping[str, Any]

    @property
    def wanted(self) -> Range:
        """The part of a stored sample that the answer has: all points that the client named, else the default."""
        return Range(points=None if self.params.get("hidden_states_points") is None else "all")

    def key_of(self, index: int) -> str:
        """Return the key of the choice with this ``index`` in vLLM's answer."""
        prompt, choice = divmod(index, self.choices)
        return sample_key(self.key, prompt=prompt, choice=choice)

    def check(self, file: StatesFile) -> None:
        """Check that the stored states are those that the client asked for.

        Raises:
            Refusal: the connector has refused a parameter, and stored other states.
        """
        layers = self.params.get("hidden_states_layers")
        if layers is not None and list(file.layer_ids.get(HIDDEN_STATES, ())) != layers:
            raise bad_request(
                "expected some of the captured layers of hidden_states, each once, in ascending order, got "
                f"{reprlib.repr(layers)}. Stored: {_shown(file)}",
                f"{PARAMS}.hidden_states_layers",
            )
        points = self.params.get("hidden_states_points")
        if points is not None and points != "all":
            asked = {**points, **({} if layers is None else {HIDDEN_STATES: layers})} if _is_choice(points) else {}
            stored = {name: list(ids) for name, ids in file.layer_ids.items()}
            if {n: stored.get(n) if ids == "all" else ids for n, ids in asked.items()} != stored:
                raise bad_request(
                    f"expected some of the captured points and layers, got {reprlib.repr(points)}. Stored: "
                    f"{_shown(file)}",
                    f"{PARAMS}.hidden_states_points",
                )
        tokens = TokenSelection.read(self.params.get("hidden_states_tokens") or "all")
        mask = self.params.get("hidden_states_loss_mask")
        prompt_tokens = file.meta.get("prompt_tokens", file.request_tokens)
        # A mean is stored without its mask.
        if mask is not None and not (len(mask) == prompt_tokens if tokens.kind == "mean" else file.has_mask):
            raise bad_request(
                f"expected {prompt_tokens} entries, one for each token of the prompt, got {_count(mask)}. Correct it",
                f"{PARAMS}.hidden_states_loss_mask",
            )
        if not (file.has_mask if tokens.kind == "loss_mask" else tokens.of(file.request_tokens)):
            raise bad_request(
                f"expected a selection of some of the request's {file.request_tokens} tokens, and for loss_mask a "
                f"hidden_states_loss_mask, got {reprlib.repr(self.params.get('hidden_states_tokens'))}",
                f"{PARAMS}.hidden_states_tokens",
            )


def _is_choice(points: Any) -> bool:
    return isinstance(points, Mapping) and all(isinstance(name, str) for name in points)


def _count(mask: Any) -> Any:
    return len(mask) if isinstance(mask, list) else reprlib.repr(mask)


def _shown(file: StatesFile) -> str:
    return ", ".join(f"{name} {list(ids)}" for name, ids in file.layer_ids.items())


def read_inline_request(body: bytes) -> InlineRequest | None:
    """Parse a request's body. Returns None if it asks for no states, or is no JSON object, which vLLM refuses.

    Raises:
        Refusal: an answer cannot hold the requested states.
    """
    if INLINE.encode() not in body:
        return None
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or INLINE not in found:
        return None
    inline = found.pop(INLINE)
    if inline is None:  # vLLM also treats null as an absent member
        return None
    if not isinstance(inline, bool):
        raise bad_request(f"expected true or false, got {reprlib.repr(inline)}", INLINE)
    if not inline:
        return None
    for name in ("use_beam_search", "prompt_embeds"):
        if found.get(name):
            raise bad_request(
                f"expected a request for stored choices, got one with {name}, which stores none. Remove {name}", name
            )
    params = found.get(PARAMS) or {}
    _check(params)
    key = f"inline-{uuid.uuid4().hex}"
    found[PARAMS] = {**params, "hidden_states_key": key}
    prompts, choices = _prompts(found.get("prompt")), _choices(found.get("n"))
    return InlineRequest(json.dumps(found).encode(), key, prompts, choices, params)


def _check(params: Any) -> None:
    if not isinstance(params, Mapping):
        raise bad_request(f"expected an object, got a {type(params).__name__}", PARAMS)
    for name in ("hidden_states_key", "hidden_states_path"):
        # With a key that was used before, an answer could hold another request's states: the answers of batches and
        # streams do not contain their identity.
        if params.get(name) is not None:
            raise bad_request(
                f"expected no key and no path with {INLINE}, got one. Remove it: the server makes a key, and the "
                "answer names the key of each choice",
                f"{PARAMS}.{name}",
            )
    if params.get("hidden_states_save") is False:
        raise bad_request(f"expected true or no value with {INLINE}, got false", f"{PARAMS}.hidden_states_save")
    mask = params.get("hidden_states_loss_mask")
    refused = read_request_params(
        "inline",
        {name: value for name, value in params.items() if name not in _CHECKED_LATER},
        prompt_tokens=len(mask) if isinstance(mask, list) else 0,
        captured={HIDDEN_STATES: ()},
        output="",
        allow_custom_path=False,
        include_output_tokens=False,
    ).refused
    for name, reason in refused.items():
        raise bad_request(reason, name if name == PARAMS else f"{PARAMS}.{name}")


# The keys of choices follow from both numbers. vLLM reads "2" and 2.0 as 2, and "12" as a token's id. Values that vLLM
# would read differently from these functions are refused; otherwise an answer could have another choice's states.


def _choices(n: Any) -> int:
    """Return the number of choices of each prompt."""
    if n is not None and type(n) is not int:
        raise bad_request(f"expected a whole number, got a {type(n).__name__}", "n")
    return n if n is not None and n > 0 else 1  # vLLM refuses other numbers


def _prompts(prompt: Any) -> int:
    """Return the number of prompts of a completion: texts or lists of token ids. A chat has no ``prompt``."""
    if not isinstance(prompt, list) or not prompt:
        return 1
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1 or not kinds <= {str, list, int}:
        raise bad_request(
            "expected a text, token ids, or a list of texts or of lists of token ids, got another value", "prompt"
        )
    return 1 if kinds == {int} else len(prompt)
