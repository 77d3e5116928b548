"""vLLM's server without its engine. vLLM's middleware and authentication are around routes that answer like vLLM's
routes, and that store generated samples instead of running an engine.
"""

from __future__ import annotations

import json
import threading
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, StreamingResponse
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

from hsx_dist import sample_key
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.format.markers import marker_name
from hsx_dist.store import open_store
from hsx_dist.testing.samples import RandomSample, random_sample
from hsx_dist.writers.sink import PartSink, SinkOptions

LAYERS = (2, 15, 30)
API_KEY = "a-key-of-this-server"
WITH_KEY = {"Authorization": f"Bearer {API_KEY}"}


def store_sample(
    folder: Path, sample: RandomSample, *, codec: str = "none", attached: Any = None, **meta: Any
) -> RandomSample:
    """Store one object in the form of a server's connector."""
    segment = replace(sample.segments()[0], meta=meta, attached=attached or {})
    options = SinkOptions(resolve_codec(codec), {"model": "m"}, "w", layout="sample")
    sink = PartSink(open_store(str(folder)), options, lambda _: None)
    for page in sample.pages(segment):
        sink.add(page)
    sink.close()
    return sample


@dataclass
class OuterServer:
    """``app``: the server. ``seen``: the bodies that vLLM received.

    The behaviour of its routes:

    - ``delay``: seconds from the answer to the stored samples.
    - ``stores``: whether samples are stored. ``fails``: the reason why not.
    - ``fail_stream``: an error in the stream.
    - ``refused``: the parameters that the connector refused.
    - ``meta``: of the stored samples.
    """

    folder: Path
    layers: tuple[int, ...] = LAYERS
    tokens: int = 37
    delay: float = 0
    stores: bool = True
    fails: str = ""
    fail_stream: bool = False
    attached: Any = None
    refused: Mapping[str, str] | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    app: Any = None
    seen: list[bytes] = field(default_factory=list)
    stored: dict[str, RandomSample] = field(default_factory=dict)

    async def complete(self, request: Request) -> Any:
        self.seen.append(await request.body())
        asked = json.loads(self.seen[-1])
        if asked.get("model") == "none":
            error = {"message": "no such model", "type": "NotFoundError", "param": "model", "code": 404}
            return JSONResponse({"error": error}, 404)
        if asked.get("model") == "gone":
            return JSONResponse(None)  # as vLLM answers a client that has disconnected
        n, prompts = asked.get("n") or 1, asked.get("prompt", "")
        prompts = prompts if isinstance(prompts, list) else [prompts]
        key = asked.get("kv_transfer_params", {}).get("hidden_states_key")
        places = [(p, c) for p in range(len(prompts)) for c in range(n)]
        if key is not None and self.stores:
            timer = threading.Timer(self.delay, self._store, [[sample_key(key, prompt=p, choice=c) for p, c in places]])
            timer.start()
        chat = "chat" in request.url.path
        if asked.get("stream"):
            return StreamingResponse(self._events(chat, len(places)), media_type="text/event-stream")
        choices = [{"index": i, "text": "é\u2028", "finish_reason": "length"} for i in range(len(places))]
        params = {"hidden_states_meta": {"refused": self.refused}} if self.refused else None
        return {"id": "cmpl-1", "object": "text_completion", "choices": choices, "kv_transfer_params": params}

    def _store(self, keys: list[str]) -> None:
        for i, key in enumerate(keys):
            if self.fails:
                marker = {"key": key, "error": self.fails, "until_stored": True}
                name = marker_name(f"{key}.safetensors")
                (self.folder / f"{name}.new").write_text(json.dumps(marker))
                (self.folder / f"{name}.new").rename(self.folder / name)  # a waiting request reads it whole
                continue
            self.stored[key] = random_sample(key, self.tokens, layer_ids=self.layers, seed=i)
            store_sample(self.folder, self.stored[key], attached=self.attached, **self.meta)

    async def _events(self, chat: bool, choices: int) -> Any:
        about = {
            "id": "c-1",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 1,
            "model": "m",
        }
        for i in range(choices):
            event = f"data: {json.dumps({**about, 'choices': [{'index': i, 'text': 'word'}]})}\n\n"
            yield event[:20]  # chunks of the stream split events and messages anywhere
            yield event[20:]
        if self.fail_stream:
            yield f"data: {json.dumps({'error': {'message': 'the engine died', 'code': 500}})}\n\n"
        yield "data: [DONE]\n\n"


def outer_server(
    folder: Path, *, hsx: dict[str, Any] | None = None, extra: Any = None, **behaviour: Any
) -> OuterServer:
    """A server with ``--api-key`` and ``--middleware hsx_dist.serving.HiddenStatesMiddleware``."""
    server = OuterServer(folder, **behaviour)
    app = FastAPI()
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        app.add_api_route(path, server.complete, methods=["POST"], response_model=None)
    args = Namespace(
        allowed_origins=["*"],
        allow_credentials=False,
        allowed_methods=["*"],
        allowed_headers=["*"],
        api_key=[API_KEY],
        enable_request_id_headers=True,
        middleware=["hsx_dist.serving.HiddenStatesMiddleware"],
    )
    init_entrypoints_middleware(args, app, ())
    given = {"shared_storage_path": str(folder), "hsx": hsx or {}} if extra is None else extra
    transfer = SimpleNamespace(kv_connector="HiddenStatesConnector", kv_connector_extra_config=given)
    app.state.vllm_config = SimpleNamespace(kv_transfer_config=transfer)
    server.app = app
    return server


def call(
    server: Any, method: str, path: str, body: dict[str, Any] | None, receive: Any, send: Any, *, more: bool = False
) -> Any:
    headers = [(name.lower().encode(), value.encode()) for name, value in WITH_KEY.items()]
    headers.append((b"content-type", b"application/json"))
    scope = {"type": "http", "http_version": "1.1", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": method,
             "path": path, "raw_path": path.encode(), "query_string": b"wait=300" if method == "GET" else b"",
             "root_path": "", "scheme": "http", "headers": headers, "client": None, "server": None}  # fmt: skip
    first = [{"type": "http.request", "body": json.dumps(body).encode() if body else b"", "more_body": more}]

    async def receive_first() -> Any:
        return first.pop() if first else await receive()

    return server.app(scope, receive_first, send)
