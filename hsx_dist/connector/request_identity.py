"""Hashes of a request's inputs. Two requests with one key are the same sample if their hashes are equal."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from hsx_dist.connector.request_params import RequestParams
from hsx_dist.connector.token_selection import choose
from hsx_dist.format.identity import Canonical, canonical, identity_hash
from hsx_dist.page import HIDDEN_STATES

if TYPE_CHECKING:
    from vllm.v1.request import Request

#: Image identifiers up to so many characters are stored unchanged.
MAX_IDENTIFIER = 128
#: Limit of the characters of each hashed text. The scheduler's thread hashes them, in about 10 microseconds.
MAX_TEXT = 1024


def too_long(request: Request) -> str | None:
    """Return the reason if a request's texts are too long to be hashed.

    A client chooses the images' identifiers (vLLM's ``uuid``) and the cache salt, of any length. vLLM bounds the number
    of images.
    """
    lora = request.lora_request
    texts = [("the identifier of an image", feature.identifier) for feature in request.mm_features or ()]
    texts += [("cache_salt", request.cache_salt or "")]
    texts += [] if lora is None else [("a LoRA adapter's name", lora.lora_name), ("its path", lora.lora_path)]
    for what, text in texts:
        if len(text) > MAX_TEXT:
            return f"expected {what} of at most {MAX_TEXT} characters, got {len(text)}. Send a shorter one"
    return None


def request_hash(request: Request, options: RequestParams) -> str:
    """Return the hash of a sample's properties that are known when its request is queued (``format.identity``)."""
    if not request.prompt_token_ids or request.prompt_embeds is not None:
        return identity_hash(options.id)  # nothing is stored for it: its hash must differ from all others
    prompt = np.asarray(request.prompt_token_ids, dtype=np.int64)
    lora = request.lora_request
    inputs = {
        "lora": None if lora is None else [lora.lora_name, lora.lora_path],
        "images": [[f.identifier, f.mm_position.offset, f.mm_position.length] for f in request.mm_features or ()],
        "cache_salt": request.cache_salt,
        "layers": options.layer_ids,
        **({} if options.points.keys() == {HIDDEN_STATES} else {"points": options.points}),
        "outputs": options.include_output_tokens,
    }
    texts = {name: canonical(value) for name, value in inputs.items()}
    texts["metadata"] = _canonical_again(options.metadata or "null")
    whole = Canonical("{" + ",".join(f'"{name}":{texts[name]}' for name in sorted(texts)) + "}")
    if not options.include_output_tokens:  # hash the selected tokens, not the words that the request selects them by
        chosen = choose(options, len(prompt), prompt, {})
        found = None if chosen is None else [chosen.meta, len(chosen.token_ids)]
        arrays = {} if chosen is None else chosen.attached
    else:
        found = [asdict(options.tokens)]
        arrays = {} if options.loss_mask is None else {"loss_mask": options.loss_mask}
    names = sorted(arrays)
    return identity_hash(prompt, whole, found, names, *(arrays[name] for name in names))


@lru_cache(maxsize=8)  # all choices and prompts of a client's request have the same metadata
def _canonical_again(text: str) -> Canonical:
    return canonical(json.loads(text))


def inputs_of(request: Request) -> dict[str, Any]:
    """Return the inputs of a request other than its tokens."""
    found: dict[str, Any] = {}
    if request.mm_features:
        # The tokens of images are placeholders, the same for every image. Only the identifiers distinguish samples.
        found["multimodal"] = [_short(feature.identifier) for feature in request.mm_features]
    if request.lora_request is not None:
        found["lora"] = request.lora_request.lora_name
    return found


def _short(identifier: str) -> str:
    """Return the identifier of an image, or the hash of a long one. A client may choose it; ``too_long`` bounds it."""
    if len(identifier) <= MAX_IDENTIFIER:
        return identifier
    return hashlib.sha256(identifier.encode("utf-8", "surrogatepass")).hexdigest()
