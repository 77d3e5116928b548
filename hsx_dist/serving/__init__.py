"""States inside the answers of vLLM's OpenAI server, for clients that cannot read the store.

``--middleware hsx_dist.serving.HiddenStatesMiddleware`` adds ``GET /v1/hidden_states/{key}``, and the states to answers
of requests with ``"hidden_states_inline": true``.
"""

from hsx_dist.serving.middleware import HiddenStatesMiddleware

__all__ = ["HiddenStatesMiddleware"]
