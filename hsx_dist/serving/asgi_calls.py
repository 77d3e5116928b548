"""ASGI helpers of the routes: read a request's body, and end work for clients that disconnect or read too slowly."""

from __future__ import annotations

import asyncio
import select
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Send

from hsx_dist.logger import get_logger

log = get_logger(__name__)

#: A client that reads fewer than ``SEND_RATE`` bytes a second for so many seconds is disconnected. It holds memory that
#: other requests wait for, and could hold it forever by reading a byte now and then.
SEND_SECONDS = 60.0
SEND_RATE = 256 << 10
#: Bytes that are sent at once. A server queues what the client has not read.
SLICE = 64 << 10
#: Seconds between two looks at the connection of a waiting request.
LOOK_SECONDS = 1.0


async def read_body(receive: Receive) -> bytes:
    """Read a request's body. Raises ``ClientDisconnect`` if the client disconnects before its end."""
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientDisconnect
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that returns ``body`` first, and then the client's messages, such as its disconnect."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again


class TimelySend:
    """A ``send`` for one answer. It disconnects a client that reads too slowly, and raises ``ClientDisconnect``."""

    def __init__(self, send: Send, receive: Receive):
        self._send, self._receive = send, receive
        self._left = SEND_SECONDS

    async def __call__(self, message: Message) -> None:
        before = time.monotonic()
        with suppress(TimeoutError):  # its traceback refers to the task, so as a context it would make a cycle
            async with asyncio.timeout(self._left):
                await self._send(message)
            gained = len(message.get("body", b"")) / SEND_RATE
            self._left = min(SEND_SECONDS, self._left + gained - (time.monotonic() - before))
            return
        log.warning(
            "client disconnected: it read less than %d bytes a second for %g s of an answer with hidden states",
            SEND_RATE,
            SEND_SECONDS,
        )
        _abort(self._receive)
        raise ClientDisconnect

    async def body(self, data: bytes | bytearray | memoryview) -> None:
        """Send ``data`` as a part of the body, in small copies.

        uvloop queues the object that it gets. A slice without a copy would keep all of ``data`` after the answer's end.
        """
        for at in range(0, len(data), SLICE):
            await self({"type": "http.response.body", "body": bytes(data[at : at + SLICE]), "more_body": True})


def _transport(receive: Receive) -> Any:
    """Return the connection, if ``receive`` is uvicorn's own; else None. ASGI has no message for its state or end."""
    return getattr(getattr(receive, "__self__", None), "transport", None)


def _abort(receive: Receive) -> None:
    """Drop the connection and its queue.

    When an answer ends early, uvicorn closes the connection only after the client has read the queue. So a client that
    never reads would keep the descriptor.
    """
    if (transport := _transport(receive)) is not None:
        transport.abort()
        # uvicorn sets it only for the connection's newest request. For others, it would write to the closed transport.
        receive.__self__.disconnected = True  # type: ignore[attr-defined]


def _is_closed(receive: Receive) -> bool:
    """Whether the client has closed the connection, also if uvicorn has paused reading it."""
    transport = _transport(receive)
    if transport is None:
        return False
    if transport.is_closing():
        return True
    poll = select.poll()
    poll.register(transport.get_extra_info("socket"), getattr(select, "POLLRDHUP", 0))  # macOS has no POLLRDHUP
    return bool(poll.poll(0))


def until_closed(receive: Receive) -> Receive:
    """Return a ``receive`` that also returns a disconnect if the server does not report it.

    uvicorn pauses reading when a second request arrives during the first one. Then it does not see the client's close.
    With httptools, it reports a close to the connection's newest request only.
    """

    async def receive_or_close() -> Message:
        message = asyncio.ensure_future(receive())
        try:
            while not (await asyncio.wait({message}, timeout=LOOK_SECONDS))[0]:
                if _is_closed(receive):
                    _abort(receive)  # else uvicorn would start the connection's next request
                    return {"type": "http.disconnect"}
            return message.result()
        finally:
            message.cancel()

    return receive_or_close


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``; cancel it when the client disconnects. The request's body must be read before."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(until_closed(receive)))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        # Wait for the cancelled work, so that it releases its memory before the request ends.
        await asyncio.gather(task, gone, return_exceptions=True)
        del task  # its error refers to this frame: the cycle would keep the answer's buffers until a garbage collection


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
