"""ASGI helpers of the routes: read a request's body, and end work for clients that disconnect or read too slowly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Send

from hsx_dist.logger import get_logger

log = get_logger(__name__)

#: A client that reads fewer than ``SEND_RATE`` bytes a second for so many seconds is disconnected. It holds memory that
#: other requests wait for, and could hold it forever by reading a byte now and then.
SEND_SECONDS = 60.0
SEND_RATE = 256 << 10


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


def timely(send: Send) -> Send:
    """Return a ``send`` that raises ``ClientDisconnect`` if the client reads too slowly.

    The server closes the connection of a request that returns before the end of its answer.
    """
    left = SEND_SECONDS

    async def within(message: Message) -> None:
        nonlocal left
        before = time.monotonic()
        try:
            async with asyncio.timeout(left):
                await send(message)
        except TimeoutError:
            log.warning(
                "client disconnected: it read less than %d bytes a second for %g s of an answer with hidden states",
                SEND_RATE,
                SEND_SECONDS,
            )
            raise ClientDisconnect from None
        gained = len(message.get("body", b"")) / SEND_RATE
        left = min(SEND_SECONDS, left + gained - (time.monotonic() - before))

    return within


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``; cancel it when the client disconnects. The request's body must be read before."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        # Wait for the cancelled work, so that it releases its memory before the request ends.
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
