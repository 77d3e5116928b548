"""``GET /v1/hidden_states/{key}``: a stored sample, or a range of its tokens, as a stream."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote_to_bytes

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from hsx_dist.errors import HsxError
from hsx_dist.format.names import MAX_KEY
from hsx_dist.serving.asgi_calls import TimelySend, while_connected
from hsx_dist.serving.refusals import Refusal, bad_request, refusal_of
from hsx_dist.serving.sample_source import SampleSource
from hsx_dist.serving.states_file import Range, StatesFile
from hsx_dist.text import head

#: Seconds that one request may wait for its sample.
MAX_WAIT = 300.0
#: For a batch, the connector appends the prompt and the choice to the client's key.
_MAX_KEY = MAX_KEY + 24
#: Limit of the values of one parameter: more than any model has layers.
_MAX_LIST = 4096
#: Characters of an identity: two hashes and their names take about 100. Errors show it, at each look for the sample.
_MAX_IDENTITY = 1024
_KNOWN = ("identity", "layers", "points", "tokens", "wait")
_TOKENS = re.compile(r"(-?[0-9]{1,12})?:(-?[0-9]{1,12})?")


class SampleRoute:
    """Answers with the safetensors file of ``StatesFile``, while it is loaded. A request holds one piece in memory."""

    def __init__(self, source: SampleSource):
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        try:
            key, wanted = _key(request), _range(request.query_params)
            wait, identity = _wait(request.query_params.get("wait")), _identity(request.query_params.get("identity"))
            _check_names(request)
        except Refusal as e:
            await e.response()(scope, receive, send)
            return

        async def held(timely: TimelySend) -> None:
            async with self._source.held(key, wanted, wait=wait, identity=identity) as file:
                await self._send_file(file, key, wanted, timely, head_only=request.method == "HEAD")

        async def answer() -> None:
            timely = TimelySend(send, receive)
            try:
                await held(timely)
                return
            except Refusal as e:
                response = e.response()
            await response(scope, receive, timely)  # after ``e``, whose traceback keeps the sample

        with suppress(ClientDisconnect):
            await while_connected(receive, answer())

    async def _send_file(self, file: StatesFile, key: str, wanted: Range, send: TimelySend, *, head_only: bool) -> None:
        async def piece(i: int) -> bytes | memoryview:
            return await self._source.piece(file, i, lambda: self._source.look(key, wanted))

        try:  # before the status is sent, which depends on whether the sample can be read
            loaded = [await piece(1)] if len(file) > 1 else []
        except HsxError as e:
            raise refusal_of(e, key) from e
        headers = [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % file.size)]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for i in range(0 if head_only else len(file)):
                # An error here closes the connection, so the client knows that the file is incomplete.
                # ``with`` frees the piece before the next is loaded, also for frames of an error's traceback.
                with memoryview(loaded.pop() if i == 1 else await piece(i)) as data:
                    await send.body(data)
        finally:
            loaded.clear()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _key(request: Request) -> str:
    key = request.path_params["key"]
    try:
        # Servers decode invalid UTF-8 in the path to a replacement character, which would make another key.
        unquote_to_bytes(request.scope.get("raw_path") or b"").decode()
    except UnicodeDecodeError:
        raise bad_request("expected a key in percent-encoded UTF-8, got other bytes. Encode it", "key") from None
    if not 0 < len(key) <= _MAX_KEY:
        raise bad_request(f"expected a key of 1 to {_MAX_KEY} characters, got {len(key)}", "key")
    return str(key)


def _check_names(request: Request) -> None:
    for name in request.query_params:
        if name not in _KNOWN:
            shown = head(name, 80)
            raise bad_request(
                f"expected parameters among {', '.join(_KNOWN)}, got the unknown parameter {shown!r}. Remove it", shown
            )
        if (given := len(request.query_params.getlist(name))) > 1:
            raise bad_request(f"expected each parameter once, got {name!r} {given} times. Give it once", name)


def _range(given: Mapping[str, str]) -> Range:
    return Range(
        layers=None if "layers" not in given else _layers(given["layers"]),
        tokens=None if "tokens" not in given else _tokens(given["tokens"]),
        points=None if "points" not in given else tuple(_names(given["points"], "points")),
    )


def _names(value: str, param: str) -> list[str]:
    """Parse a list of names, each once. With repeated names, the file could be many times larger than the sample."""
    names = value.split(",")
    if not all(names) or len(names) > _MAX_LIST:
        raise bad_request(
            f"expected 1 to {_MAX_LIST} values separated by commas, got {head(value, 80)!r}. Correct it", param
        )
    if len(set(names)) < len(names):
        raise bad_request(f"expected each value once, got {head(value, 80)!r}. Remove the repeated ones", param)
    return names


def _layers(value: str) -> tuple[int, ...]:
    names = _names(value, "layers")
    if not all(re.fullmatch(r"0|[1-9][0-9]{0,8}", name) for name in names):  # 2 and 02 would be the same layer twice
        raise bad_request(
            f"expected layer ids such as 2,15, got {head(value, 80)!r}. Use numbers of stored layers", "layers"
        )
    return tuple(map(int, names))


def _tokens(value: str) -> tuple[int | None, int | None]:
    found = _TOKENS.fullmatch(value)
    if found is None:
        raise bad_request(f"expected START:STOP as in Python, such as 0:128 or -1:, got {head(value, 80)!r}", "tokens")
    start, stop = (None if text is None else int(text) for text in found.groups())
    return start, stop


def _wait(value: str | None) -> float:
    try:
        wait = 0.0 if value is None else float(value)
    except ValueError:
        wait = math.nan
    if not 0 <= wait <= MAX_WAIT:
        raise bad_request(f"wait: expected seconds from 0 to {MAX_WAIT:.0f}, got {head(str(value), 80)!r}", "wait")
    return wait


def _identity(value: str | None) -> dict[str, Any] | None:
    if value is None:
        return None
    try:
        found = json.loads(value) if len(value) <= _MAX_IDENTITY else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not found:
        raise bad_request("expected the identity of an answer as a JSON object, got another value", "identity")
    return found
