"""What the routes need of ASGI: a request's body, a client that hangs up, one that does not read."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Send

#: A client that takes nothing for so long is cut off: it holds memory that others wait for.
SEND_SECONDS = 60.0


async def read_body(receive: Receive) -> bytes:
    """A request's body. ``ClientDisconnect``: the client went away before its end."""
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientDisconnect
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


def replayed(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives ``body`` first, and then what comes: a client that hangs up."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again


def timely(send: Send) -> Send:
    """``send`` that raises ``TimeoutError`` where the client does not read: the server then cuts the connection."""

    async def within(message: Message) -> None:
        async with asyncio.timeout(SEND_SECONDS):
            await send(message)

    return within


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``; cancel it when the client hangs up. The request's body must have been read."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        # What the work holds is released before the request ends.
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
