"""A request that is never drafted, of vLLM's own class."""

from __future__ import annotations

from vllm import SamplingParams
from vllm.v1.request import Request

from hsx_dist.vllm_patches.undrafted import never_draft


def request() -> Request:
    return Request("r", [1, 2, 3], SamplingParams(max_tokens=8), None)


def test_what_is_drafted_is_not_there():
    r, other = request(), request()
    never_draft(r)
    never_draft(r)
    assert isinstance(r, Request)
    r.append_output_token_ids([4])
    for one in (r, other):
        one.spec_token_ids = [4]
    assert (r.spec_token_ids, other.spec_token_ids) == ([], [4])
    assert r.num_tokens_with_spec == r.num_tokens == 4
    assert other.num_tokens_with_spec == 4  # three, and its draft
    assert type(r).__mro__[1] is Request
    again = request()
    never_draft(again)
    assert type(again) is type(r)
