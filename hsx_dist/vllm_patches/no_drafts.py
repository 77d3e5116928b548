"""Requests without draft tokens, for the V1 model runner.

Versions: vLLM 0.31, 0.32 and 0.33 with the V1 runner. Upstream: issue 56417.

What vLLM does: the drafter of ``extract_hidden_states`` only writes states into the cache. The "draft" that it returns
is the token that was just sampled. The next step computes that token again to verify it. This doubles the decoded
tokens, and the V1 runner accepts wrong drafts. With asynchronous scheduling an accepted draft repeats a token. The
rejection sampler of the CPU build follows neither the model's distribution nor the request's seed. The V2 runner
verifies correctly, and keeps its drafts.

The rejection sampler also gets batches without drafts, and two kinds of requests then end the engine: those with
``top_k`` and no ``top_p`` (CPU build), and those with ``logprob_token_ids``.

The patch: a request's class gets an attribute ``spec_token_ids`` that is always empty, so the scheduler never
schedules a draft. States are cached all the same: the drafter runs on every scheduled token. The workers sample a batch
without drafts with vLLM's sampler of models without a drafter.

How a change of vLLM is noticed: the first request does not have the attribute. A warning is logged, and drafts are
verified as without the patch. The tests run the real schedulers and count scheduled drafts. ``sample_without_drafts``
raises if the rejection sampler is missing; the tests send both kinds of requests to a server.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from hsx_dist.logger import get_logger

log = get_logger(__name__)

#: Attribute of the patched method: vLLM's method.
_OF_VLLM = "_hsx_of_vllm"
_UNDRAFTED: dict[type, type] = {}


def uses_v1_runner(vllm_config: Any) -> bool:
    """Whether an engine of this configuration has the V1 model runner. Releases before the V2 runner have no switch."""
    return not getattr(vllm_config, "use_v2_model_runner", False)


def sample_without_drafts() -> None:
    """Patch vLLM's rejection sampler in this process. A second call changes nothing."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    theirs = RejectionSampler.forward
    if hasattr(theirs, _OF_VLLM):
        return

    @wraps(theirs)
    def forward(self: Any, metadata: Any, draft_probs: Any, logits: Any, sampling_metadata: Any) -> Any:
        if len(metadata.draft_token_ids):
            return theirs(self, metadata, draft_probs, logits, sampling_metadata)
        return self.sampler(logits=logits, sampling_metadata=sampling_metadata)

    setattr(forward, _OF_VLLM, theirs)
    RejectionSampler.forward = forward


def never_draft(request: Any) -> None:
    """Make the draft tokens of the scheduler's ``request`` always empty."""
    found = type(request)
    if found in _UNDRAFTED.values():
        return
    if found not in _UNDRAFTED:
        if not hasattr(request, "spec_token_ids"):
            log.warning(
                "drafts are verified: this vLLM's requests keep them in a way that hsx_dist does not know. With the V1 "
                "runner, generated tokens may repeat. Use VLLM_USE_V2_MODEL_RUNNER=1, or store prompts only"
            )
        # vLLM's scheduler assigns the attribute and reads it back; there is no option for it by request.
        nothing = property(lambda _: [], lambda _, __: None)
        _UNDRAFTED[found] = type(found.__name__, (found,), {"spec_token_ids": nothing})
    request.__class__ = _UNDRAFTED[found]
