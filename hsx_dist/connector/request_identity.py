"""What makes two requests of one key the same sample: hashes of what a request's states come from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from hsx_dist.connector.request_params import RequestParams
from hsx_dist.connector.token_selection import choose
from hsx_dist.format.identity import identity_hash
from hsx_dist.page import HIDDEN_STATES

if TYPE_CHECKING:
    from vllm.v1.request import Request

#: Characters of an image's identifier that are stored as they are.
MAX_IDENTIFIER = 128
#: Characters of each text of a request that is hashed here, on the scheduler's thread: about 10 microseconds.
MAX_TEXT = 1024


def too_long(request: Request) -> str | None:
    """Why a request's texts are not hashed. A client chooses the images' identifiers (vLLM's ``uuid``) and the cache
    salt, of any length. vLLM bounds the number of images."""
    lora = request.lora_request
    texts = [("the identifier of an image", feature.identifier) for feature in request.mm_features or ()]
    texts += [("cache_salt", request.cache_salt or "")]
    texts += [] if lora is None else [("a LoRA adapter's name", lora.lora_name), ("its path", lora.lora_path)]
    for what, text in texts:
        if len(text) > MAX_TEXT:
            return f"expected {what} of at most {MAX_TEXT} characters, got {len(text)}. Send a shorter one"
    return None


def request_hash(request: Request, options: RequestParams) -> str:
    """The hash of what is known of a sample when its request is queued: see ``format.identity``."""
    if not request.prompt_token_ids or request.prompt_embeds is not None:
        return identity_hash(options.id)  # nothing is stored of it: it is the same as no other
    prompt = np.asarray(request.prompt_token_ids, dtype=np.int64)
    lora = request.lora_request
    inputs = {
        "lora": None if lora is None else [lora.lora_name, lora.lora_path],
        "images": [[f.identifier, f.mm_position.offset, f.mm_position.length] for f in request.mm_features or ()],
        "cache_salt": request.cache_salt,
        "layers": options.layer_ids,
        **({} if options.points.keys() == {HIDDEN_STATES} else {"points": options.points}),
        "outputs": options.include_output_tokens,
        "metadata": json.loads(options.metadata or "null"),
    }
    if not options.include_output_tokens:  # what is selected is known too, by whatever words it was asked for
        chosen = choose(options, len(prompt), prompt, {})
        found = None if chosen is None else [chosen.meta, len(chosen.token_ids)]
        arrays = {} if chosen is None else chosen.attached
    else:
        found = [asdict(options.tokens)]
        arrays = {} if options.loss_mask is None else {"loss_mask": options.loss_mask}
    names = sorted(arrays)
    return identity_hash(prompt, inputs, found, names, *(arrays[name] for name in names))


def inputs_of(request: Request) -> dict[str, Any]:
    """What else than its tokens a request's states come from."""
    found: dict[str, Any] = {}
    if request.mm_features:
        # Their tokens are placeholders, the same for every image: what tells the samples apart is this.
        found["multimodal"] = [_short(feature.identifier) for feature in request.mm_features]
    if request.lora_request is not None:
        found["lora"] = request.lora_request.lora_name
    return found


def _short(identifier: str) -> str:
    """The identifier of an image, which may be the client's own: hashed where it is longer than a hash. ``too_long``
    bounds it."""
    if len(identifier) <= MAX_IDENTIFIER:
        return identifier
    return hashlib.sha256(identifier.encode("utf-8", "surrogatepass")).hexdigest()
