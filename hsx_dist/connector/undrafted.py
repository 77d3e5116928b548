"""Keeps vLLM's CPU build from verifying the "drafts" of ``extract_hidden_states``.

That method has vLLM's drafter only put states into the cache; what it returns as a draft is the token that was just
sampled, and the next step computes it again behind itself to verify it. For a request that generates, that is twice the
tokens, all but never one accepted; and the answer comes out of the rejection sampler, whose CPU build (vLLM 0.32) draws
neither from the model's distribution nor by the request's seed: half the requests of a batch repeat one token.
A request without drafts is sampled as in any other engine.
"""

from __future__ import annotations

from typing import Any

_UNDRAFTED: dict[type, type] = {}


def never_draft(request: Any) -> None:
    """Make vLLM's ``request`` (as the scheduler holds it) one that has no draft tokens, whatever it is given. Its
    states are cached all the same: the drafter runs on every token that is scheduled."""
    found = type(request)
    if found in _UNDRAFTED.values():
        return
    if found not in _UNDRAFTED:
        # vLLM's scheduler assigns the attribute and reads it back; there is no switch for it by request.
        nothing = property(lambda _: [], lambda _, __: None)
        _UNDRAFTED[found] = type(found.__name__, (found,), {"spec_token_ids": nothing})
    request.__class__ = _UNDRAFTED[found]
