"""The middleware. It adds its routes behind the authentication of vLLM's own routes.

vLLM adds ``--middleware`` outside of its authentication (``init_entrypoints_middleware``). So the middleware itself
answers no request. When the application starts, it adds a route to the application's router and wraps the routes for
completions. Authentication, CORS and every other middleware of the server then apply to them as to any route of vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hsx_dist.connector.connector_config import ConnectorConfig, read_connector_config
from hsx_dist.errors import ConfigError
from hsx_dist.logger import get_logger
from hsx_dist.serving.inline_answers import InlineStates
from hsx_dist.serving.sample_route import SampleRoute
from hsx_dist.serving.sample_source import SampleSource

log = get_logger(__name__)

PATH = "/v1/hidden_states/{key:path}"
_WITH_STATES = frozenset({"/v1/completions", "/v1/chat/completions"})
#: These routes accept ``kv_transfer_params`` too, but their answers cannot hold states.
_WITHOUT = frozenset(
    {"/v1/chat/completions/batch", "/v1/responses", "/v1/messages", "/inference/v1/generate", "/cohere/v2/chat"}
)
_CONNECTOR = "HiddenStatesConnector"


class HiddenStatesMiddleware:
    """Pure ASGI middleware for ``--middleware`` of vLLM's server. Reads its settings from the server's connector.

    Raises:
        ConfigError: at the server's start: it has no connector that stores samples which this process can read.

    Example:
        .. code-block:: sh

            vllm serve MODEL \\
              --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1,
                  "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 15, 27]}}}' \\
              --kv-transfer-config '{"kv_connector": "HiddenStatesConnector", "kv_role": "kv_producer",
                  "kv_connector_extra_config": {"shared_storage_path": "s3://bucket/states"}}' \\
              --middleware hsx_dist.serving.HiddenStatesMiddleware
    """

    def __init__(self, app: ASGIApp):
        self._app = app
        self._installed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._installed:
            try:
                install(scope["app"])
            except ConfigError as e:
                if scope["type"] == "lifespan":
                    # Without this message uvicorn treats an exception as a missing lifespan, and starts to serve.
                    await receive()
                    await send({"type": "lifespan.startup.failed", "message": str(e)})
                raise
            self._installed = True
        await self._app(scope, receive, send)


def install(app: Any) -> None:
    """Add the routes to a Starlette application whose ``state.vllm_config`` is set.

    Raises:
        ConfigError: the server has no connector that stores samples which this process can read, or it has a path
            prefix that disables vLLM's authentication.
    """
    root = app.root_path or ""  # None without --root-path
    if root.endswith("/") or root == "/v" or root.startswith("/v1/"):
        # vLLM removes the prefix as text before it compares paths with /v1. Starlette removes it only before a /. So
        # with the prefix /v, the path /v1/hidden_states has a route and needs no key.
        raise ConfigError(
            f"--root-path: expected a path without / at its end, and other than /v and paths below /v1, got {root!r}. "
            "With it vLLM requires no API key. Choose another prefix"
        )
    settings = connector_settings(getattr(app.state, "vllm_config", None))
    posts = [route for route in app.router.routes if "POST" in (getattr(route, "methods", None) or ())]
    if not any(route.path in _WITH_STATES for route in posts):
        raise ConfigError(
            f"HiddenStatesMiddleware: expected a server with a route of {', '.join(sorted(_WITH_STATES))}, got none. "
            "Serve a model that generates"
        )
    source = SampleSource(settings)
    for route in posts:
        if route.path in _WITH_STATES | _WITHOUT:
            route.app = InlineStates(route.app, source if route.path in _WITH_STATES else None)
    route = Route(PATH, SampleRoute(source), methods=["GET"])
    # Starlette's expression ignores a line break at the path's end, and matches no path with another line break. So the
    # key "a\n" would get the sample of "a".
    route.path_regex = re.compile(route.path_regex.pattern.removesuffix("$") + r"\Z", re.DOTALL)
    app.router.routes.append(route)
    log.info("hidden states are answered: route=%s inline_bytes=%d", PATH, settings.inline_bytes)


def connector_settings(vllm_config: Any) -> ConnectorConfig:
    """Return the settings of the server's HiddenStatesConnector.

    Raises:
        ConfigError: the server has no such connector, or this process cannot read the connector's store.
    """
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    extras = [] if transfer is None else list(_extras(transfer.kv_connector, transfer.kv_connector_extra_config))
    if not extras:
        raise ConfigError(
            f"HiddenStatesMiddleware: expected a server with the {_CONNECTOR} in --kv-transfer-config, got none. "
            "Add it, or remove --middleware"
        )
    settings = read_connector_config(extras[0])
    if not settings.one_object or settings.output.startswith("memory:"):
        raise ConfigError(
            "HiddenStatesMiddleware: expected a connector that stores each sample where this process can read it, got "
            f"output {settings.output!r} of transport {settings.transport!r}. Set "
            "shared_storage_path to a folder or a URL"
        )
    return settings


def _extras(name: str | None, extra: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Return ``kv_connector_extra_config`` of HiddenStatesConnector, also inside vLLM's ``MultiConnector``."""
    if name == _CONNECTOR:
        yield extra
    for child in extra.get("connectors") or ():
        yield from _extras(child.get("kv_connector"), child.get("kv_connector_extra_config") or {})
