"""A request that the API server rejected never shares the id of a live request.

Versions: vLLM 0.31, 0.32 and 0.33, both runners. Upstream: no issue yet.

What vLLM does: with any connector, a rejected request with ``do_remote_prefill`` is added to the engine and aborted at
once, so that a connector can free remote blocks. Its id is the client's text, without the prefix and the random digits
of other ids. If a live request has this id, the scheduler raises, and the engine ends. A live streaming session is
aborted. ``POST /invocations``, which needs no API key, does this too.

The patch: ``EngineCore.add_request`` gives such a request a random id if a live request has its id. Other connectors
of a ``MultiConnector`` still get the request, to free remote blocks.

How a change of vLLM is noticed: without the method, or without a request's ``abort_immediately``, the start logs a
warning. The connector ignores these requests, and its answers name no id of the engine. The tests send such requests
to vLLM's classes and to a server.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any
from uuid import uuid4

from hsx_dist.logger import get_logger

log = get_logger(__name__)


def was_rejected(request: Any) -> bool:
    """Return whether the API server rejected this request of the engine."""
    return bool(getattr(request, "abort_immediately", False))


def install() -> None:
    """Patch vLLM in this process, the engine's. Calling it twice changes nothing."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

    theirs = getattr(EngineCore, "add_request", None)
    if theirs is None or "abort_immediately" not in inspect.signature(Request).parameters:
        log.warning("unknown vLLM: rejected requests with do_remote_prefill may enter the engine under a live id")
        return
    if getattr(theirs, "hsx", False):
        return

    @functools.wraps(theirs)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if was_rejected(request) and request.request_id in self.scheduler.requests:
            request.request_id = f"rejected-{uuid4().hex}"
        return theirs(self, request, *args, **kwargs)

    add_request.hsx = True  # type: ignore[attr-defined]
    EngineCore.add_request = add_request
