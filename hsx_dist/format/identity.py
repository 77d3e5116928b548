"""When two requests with one key are the same sample. The scheduler, the writers and the markers use this definition.

Two requests are the same sample if all of these are equal:

- the model, the norm, and the revision and the hash of its weights if both requests have one;
- the request, ``identity["request"]``, known when the request is queued. It covers the ids of its prompt, the LoRA
  adapter (name and path), the images (identifiers and places) and the cache salt. It also covers the layers, the
  selection, the loss mask, the metadata, and whether generated tokens are included;
- the ids of all computed tokens, stored or not (``identity["tokens"]``);
- the object's layers, dtype, hidden size, token ids and attached arrays;
- every member of the object's ``meta`` that is not in ``OF_ONE_COMPUTATION``;
- the codec, if one of the two is lossy.

A reader compares ``meta["identity"]`` with the response's (``load_hidden_states(identity=)``), as two requests can have
the same key. The states may differ in their last bits, because batches differ. The hashes are 128 bits of SHA-256: no
client can find another request with the hash of a given request.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hsx_dist.format.container_read import Part
from hsx_dist.format.container_write import EncodedSegment
from hsx_dist.format.header import Origin
from hsx_dist.format.segment_info import stored_meta

#: The member of ``meta`` that holds both hashes: ``{"request", "tokens"}``.
IDENTITY = "identity"
#: Members of ``meta`` that describe one computation of a sample, not the sample.
OF_ONE_COMPUTATION = frozenset({"bad", "expires", "finish_reason"})


class Canonical(str):
    """The text of a JSON value, as of ``canonical``."""

    __slots__ = ()


def identity_hash(*parts: Any) -> str:
    """The first 128 bits of the SHA-256 of arrays and JSON values, in this order, as 32 hex digits."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            kind, data = f"{part.dtype.str} {part.shape}", np.ascontiguousarray(part).tobytes()
        else:
            kind, data = "json", (part if isinstance(part, Canonical) else canonical(part)).encode()
        digest.update(f"{kind} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()[:32]


def same_sample(part: Part, segments: Sequence[EncodedSegment], about: Mapping[str, Any]) -> bool:
    """Whether a stored part is the same sample as ``segments``, one whole segment per column, of the run ``about``."""
    if len(part.segments) != len(segments) or not _same_model(part.about, about):
        return False
    return all(_same_column(part, i, segment) for i, segment in enumerate(segments))


def _same_column(part: Part, i: int, segment: EncodedSegment) -> bool:
    there, here = part.segments[i], segment.info
    stored, ours = stored_meta(there.segment), stored_meta(here.segment)
    if IDENTITY not in stored:
        if "tokens" in stored:
            return False  # the object has only the selected tokens, and no hash of all
        ours.pop(IDENTITY, None)  # an earlier version wrote the object: it holds all tokens
    codecs = (part.codec, segment.codec)
    return (
        there.segment == here.segment
        and here.segment.num_tokens == here.segment.total
        and (there.layer_ids, there.dtype, there.hidden_size) == (here.layer_ids, here.dtype, here.hidden_size)
        and (codecs[0] == codecs[1] or not any(codec.lossy for codec in codecs))
        and canonical(_lasting(stored)) == canonical(_lasting(ours))
        and part.attached_names(i) == segment.attached.keys()
        and np.array_equal(part.token_ids(i), segment.token_ids)
        and all(_same_array(array, segment.attached[name]) for name, array in part.attached(i).items())
    )


def is_of_another(stored: Origin, request: str, about: Mapping[str, Any]) -> bool | None:
    """Whether a stored object belongs to another request than ``request`` (a hash).

    Tokens are not compared, since the request stored none. Returns None if the object does not name its request: an
    earlier version wrote it.
    """
    if not _same_model(stored.about, about):
        return True
    identity = stored.meta.get(IDENTITY)
    if identity is None:
        return None
    return not (isinstance(identity, dict) and identity.get("request") == request)


def _same_model(stored: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    if any(stored.get(name) != about.get(name) for name in ("model", "norm")):
        return False
    # Earlier versions recorded no commit of a moving branch, and no hash of a folder.
    pairs = [(stored.get(name), about.get(name)) for name in ("revision", "weights")]
    return all(there == here for there, here in pairs if None not in (there, here))


def _lasting(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in meta.items() if name not in OF_ONE_COMPUTATION}


def canonical(value: Any) -> Canonical:
    """JSON text, which differs for 1, 1.0 and true; in Python they are equal."""
    return Canonical(json.dumps(value, separators=(",", ":"), sort_keys=True))


def _same_array(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
