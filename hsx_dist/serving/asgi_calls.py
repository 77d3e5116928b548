"""ASGI helpers of the routes: read a request's body, and end work for clients that disconnect or read too slowly."""

from __future__ import annotations

import asyncio
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
CLOSED_SECONDS = 1.0


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


def _cycle(receive: Receive) -> Any:
    """Return uvicorn's object for the request if ``receive`` is uvicorn's own, else None. It has a transport."""
    cycle = getattr(receive, "__self__", None)
    return cycle if hasattr(cycle, "transport") else None


def _abort(receive: Receive) -> None:
    """Drop the connection and its queue.

    ASGI has no message for it. When an answer ends early, uvicorn closes the connection only after the client has read
    the queue. So a client that never reads would keep the descriptor.
    """
    if (cycle := _cycle(receive)) is not None:
        cycle.transport.abort()


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``; cancel it when the client disconnects. The request's body must be read before."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    cycle = _cycle(receive)
    seconds = None if cycle is None else CLOSED_SECONDS
    try:
        while not (task.done() or gone.done()):
            await asyncio.wait({task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if cycle is not None and not task.done() and cycle.transport.is_closing():
                # The client had sent another request: uvicorn with httptools marks the last request alone.
                cycle.disconnected = True
                break
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
