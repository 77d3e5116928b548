"""States inside the answers of vLLM's routes for completions."""

from __future__ import annotations

import json
import time
import uuid
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hsx_dist.errors import HsxError
from hsx_dist.serving.asgi_calls import TimelySend, read_body, replayed, until_closed, while_connected
from hsx_dist.serving.inline_request import INLINE, InlineRequest, read_inline_request
from hsx_dist.serving.refusals import Refusal, bad_request, refusal_of
from hsx_dist.serving.sample_source import SampleSource
from hsx_dist.serving.states_file import StatesFile
from hsx_dist.text import head

#: Seconds from vLLM's answer until its states are stored.
_WAIT = 60.0
#: Bytes of a file that are encoded at once: a multiple of three, which base64 encodes without padding.
_ENCODED_AT_ONCE = 3 << 18
_DONE = b"data: [DONE]"
_STREAM_ENDS = (b"\n\n", b"\r\n\r\n")


class InlineStates:
    """Wrapper of one of vLLM's routes: adds the states to answers of requests that ask. Other answers pass unchanged.

    ``source``: None for a route whose answers cannot hold states. That route refuses requests that ask for states.
    """

    def __init__(self, app: ASGIApp, source: SampleSource | None):
        self._app = app
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            body = await read_body(receive)
            try:
                asked = read_inline_request(body)
                if asked is not None and self._source is None:
                    raise bad_request(
                        f"expected {INLINE} at /v1/completions or /v1/chat/completions, got the route "
                        f"{head(scope['path'], 80)!r}. Send the request to one of these",
                        INLINE,
                    )
            except Refusal as e:
                await e.response()(scope, receive, send)
                return
            if asked is None or self._source is None:
                receive = replayed(body, receive)
                del body  # vLLM keeps its own copy
                await self._app(scope, receive, send)
                return
            headers = MutableHeaders(raw=list(scope["headers"]))
            headers["content-length"] = str(len(asked.body))
            answer = _Answer(asked, self._source, send, TimelySend(send, receive))
            await self._app({**scope, "headers": headers.raw}, replayed(asked.body, until_closed(receive)), answer.send)
            if answer.held is not None:
                await while_connected(receive, answer.finish(scope, receive))


class _Answer:
    """The answer to one request that asks for its states, on its way from vLLM to the client.

    A JSON answer is held until the states are stored. A stream passes at once; its states precede its ``[DONE]``.
    """

    def __init__(self, asked: InlineRequest, source: SampleSource, send: Send, timely: TimelySend):
        self.held: bytearray | None = None
        self._asked, self._source = asked, source
        self._send, self._timely = send, timely  # vLLM's own messages have no limit of time
        self._start: Message = {}
        self._streams = False
        self._event = b""  # incomplete event of a stream
        self._about: dict[str, Any] | None = None
        self._failed = False
        self._left = source.inline_bytes

    async def send(self, message: Message) -> None:
        """Handle a message that vLLM sends."""
        if message["type"] == "http.response.start":
            kind = Headers(raw=message["headers"]).get("content-type", "").partition(";")[0].strip()
            self._streams = message["status"] == 200 and kind == "text/event-stream"
            if message["status"] == 200 and kind == "application/json":
                self.held, self._start = bytearray(), message
                return
        elif message["type"] == "http.response.body":
            if self.held is not None:
                self.held += message.get("body", b"")
                return
            if self._streams:
                await self._send_events(message.get("body", b""), more=message.get("more_body", False))
                return
        await self._send(message)

    # -- an answer in JSON ---------------------------------------------------------------------------------------------

    async def finish(self, scope: Scope, receive: Receive) -> None:
        """Send the held answer with its states, or the reason why it has none."""
        assert self.held is not None
        answer = json.loads(self.held)
        if not isinstance(answer, dict):  # vLLM's answer to a client that disconnected
            await self._send(self._start)
            await self._send({"type": "http.response.body", "body": bytes(self.held), "more_body": False})
            return
        self.held.clear()
        try:
            _check_refused(answer.get("kv_transfer_params"))
            choices = {choice["index"]: choice for choice in answer["choices"]}
            async with self._files(list(choices), time.monotonic() + _WAIT) as files:
                for i, choice in choices.items():
                    choice["hidden_states"] = files[i]
                await self._send_document(answer)
            return
        except Refusal as e:
            response = e.response()
        await response(scope, receive, self._timely)  # after ``e``, whose traceback keeps the samples

    async def _send_document(self, answer: dict[str, Any]) -> None:
        text, between = _with_states(answer)
        headers = MutableHeaders(raw=list(self._start["headers"]))
        headers["content-length"] = str(sum(map(len, text)) + sum(map(_encoded_size, between)))
        await self._timely({**self._start, "headers": headers.raw})
        await self._send_pieces(text, between)
        await self._timely({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_pieces(self, text: Sequence[bytes], between: Sequence[bytearray]) -> None:
        for piece in _interleaved(text, between):
            await self._timely.body(piece)

    # -- a stream ------------------------------------------------------------------------------------------------------

    async def _send_events(self, data: bytes, *, more: bool) -> None:
        self._event += data
        while self._event:
            at, end = min(((i, e) for e in _STREAM_ENDS if (i := self._event.find(e)) >= 0), default=(-1, b""))
            if at < 0:
                break
            event, self._event = self._event[: at + len(end)], self._event[at + len(end) :]
            if event.startswith(_DONE):
                self._send = self._timely  # the rest, too: the queue may be full of states
                await self._send_states()
            else:
                self._read_event(event)
            await self._send({"type": "http.response.body", "body": event, "more_body": True})
        if not more:
            await self._send({"type": "http.response.body", "body": self._event, "more_body": False})

    def _read_event(self, event: bytes) -> None:
        if self._failed or (self._about is not None and b'"error"' not in event):
            return
        try:
            said = json.loads(event.removeprefix(b"data:"))
        except ValueError:  # a comment that keeps the connection open
            return
        if isinstance(said, dict):
            self._failed = said.get("error") is not None  # vLLM sends [DONE] after the error
            self._about = self._about or {name: said.get(name) for name in ("id", "object", "created", "model")}

    async def _send_states(self) -> None:
        """Send a chunk with the states of each choice."""
        if self._failed or self._about is None:
            return
        end = time.monotonic() + _WAIT
        part: dict[str, Any] = (
            {"delta": {}} if self._about["object"] == "chat.completion.chunk" else {"text": "", "logprobs": None}
        )
        try:
            for i in range(self._asked.prompts * self._asked.choices):
                await self._send_choice({"index": i, **part, "finish_reason": None}, end)
            return
        except Refusal as e:
            event = f"data: {json.dumps(e.body)}\n\n".encode()
        await self._timely.body(event)  # after ``e``, whose traceback keeps the sample

    async def _send_choice(self, choice: dict[str, Any], end: float) -> None:
        async with self._files([choice["index"]], end) as files:
            choice["hidden_states"] = files[choice["index"]]
            text, between = _with_states({**(self._about or {}), "choices": [choice]})
            await self._send_pieces([b"data: " + text[0], *text[1:-1], text[-1] + b"\n\n"], between)

    # -- both ----------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _files(self, indices: Sequence[int], end: float) -> AsyncIterator[dict[int, tuple[str, bytearray]]]:
        """Load the states of some choices. Yields the key and the file of each, and holds their memory.

        An open ``StatesFile`` takes memory in addition to its file. So only one is open at a time, and none while the
        request waits for memory.
        """
        total, loading = 0, 0
        for i in indices:
            file: StatesFile | None = await self._find(i, end)
            assert file is not None
            self._count(i, file)
            total, loading = total + file.size, max(loading, file.loading_bytes)
        if len(indices) > 1 or not self._source.memory.has_room(total + loading):
            file = None
        found: dict[int, tuple[str, bytearray]] = {}
        async with self._source.memory.hold(total + loading):
            try:
                for i in indices:
                    file = file or await self._find(i, end)
                    found[i] = (self._asked.key_of(i), bytearray(file.size))
                    await self._load(i, file, found[i][1])
                    file = None
                yield found
            finally:  # before the memory is released: an error's traceback keeps the files
                for _, data in found.values():
                    data.clear()

    async def _find(self, index: int, end: float) -> StatesFile:
        key = self._asked.key_of(index)
        try:
            file = await self._source.find(key, self._asked.wanted, wait=max(0.0, end - time.monotonic()))
        except Refusal as e:
            if e.status != 404:
                raise
            raise Refusal(
                504,
                "Timeout",
                f"expected the states of key {key!r} to be stored within {_WAIT:.0f} s of the answer, got none yet. "
                f"Get /v1/hidden_states/{key} later",
            ) from e
        self._asked.check(file)
        return file

    def _count(self, index: int, file: StatesFile) -> None:
        self._left -= file.size
        if self._left < 0:
            limit = self._source.inline_bytes
            raise Refusal(
                413,
                "AnswerTooLarge",
                f"expected at most {limit} bytes of states in an answer (inline_bytes), got {limit - self._left} with "
                f"choice {index}. Ask for fewer layers or tokens (hidden_states_layers, hidden_states_tokens), or get "
                f"/v1/hidden_states/{self._asked.key_of(index)}",
                INLINE,
            )

    async def _load(self, index: int, file: StatesFile, data: bytearray) -> None:
        """Read the whole file into ``data``. It is read before the answer starts: a read error changes the status."""
        key, at = self._asked.key_of(index), 0
        for i in range(len(file)):
            try:
                piece = await self._source.piece(file, i, lambda: self._source.look(key, self._asked.wanted))
            except HsxError as e:
                raise refusal_of(e, key) from e
            data[at : at + len(piece)] = piece
            at += len(piece)
            del piece  # before the next is loaded


def _check_refused(answered: Any) -> None:
    """Refuse an answer whose ``kv_transfer_params`` name a refused parameter: its states differ from the request."""
    meta = answered.get("hidden_states_meta") if isinstance(answered, Mapping) else None
    refused = meta.get("refused") if isinstance(meta, Mapping) else None
    for name, reason in (refused or {}).items():
        raise bad_request(f"{reason}", f"kv_transfer_params.{name}")


def _with_states(document: dict[str, Any]) -> tuple[list[bytes], list[bytearray]]:
    """Return the JSON text of ``document`` in pieces, and the files that go between these pieces as base64.

    The choices of ``document`` have a key and a file as ``hidden_states``.
    """
    mark, data = uuid.uuid4().hex, []  # no text of an answer contains the mark
    for choice in document["choices"]:
        key, content = choice["hidden_states"]
        choice["hidden_states"] = {"key": key, "safetensors": mark}
        data.append(content)
    return json.dumps(document, separators=(",", ":")).encode().split(mark.encode()), data


def _interleaved(text: Sequence[bytes], between: Sequence[bytearray]) -> Iterator[bytes]:
    yield text[0]
    for content, after in zip(between, text[1:], strict=True):
        for at in range(0, len(content), _ENCODED_AT_ONCE):
            yield b64encode(content[at : at + _ENCODED_AT_ONCE])
        yield after


def _encoded_size(content: bytearray) -> int:
    return -(-len(content) // 3) * 4
