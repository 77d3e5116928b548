"""Clients that read slowly or not at all: neither their connection nor the memory of their answer stays."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import uvicorn

from hsx_dist.serving import asgi_calls, states_file
from hsx_dist.serving.inline_answers import _Answer
from hsx_dist.serving.sample_source import MemoryLimit
from hsx_dist.testing.samples import random_sample
from tests.unit.serving.outer_vllm import WITH_KEY, OuterServer, call, outer_server, store_sample

INLINE = {"model": "m", "prompt": "Hello.", "hidden_states_inline": True}
GET = ("GET", "/v1/hidden_states/k", None)
POST = ("POST", "/v1/completions", INLINE)
STREAM = ("POST", "/v1/completions", {**INLINE, "stream": True, "n": 3})
TOKENS = 4096  # 600 KB of states: more than the queues of the server and of the connection


def large(tmp_path: Any, **behaviour: Any) -> OuterServer:
    store_sample(tmp_path, random_sample("k", TOKENS))
    return outer_server(tmp_path, tokens=TOKENS, **behaviour)


async def never() -> Any:
    await asyncio.sleep(3600)


def memory_of(server: OuterServer) -> MemoryLimit:
    limit = next(route.app._source for route in server.app.router.routes if route.path == "/v1/completions").memory
    assert isinstance(limit, MemoryLimit)
    return limit


@pytest.fixture
def one_limit(monkeypatch):
    """The limit is 4 MiB: an answer that does not release its bytes blocks a later one."""
    made = MemoryLimit.__init__
    monkeypatch.setattr(MemoryLimit, "__init__", lambda self, _: made(self, 4 << 20))


@pytest.fixture
def alive(monkeypatch):
    """A function that counts the pieces and samples that exist, without the help of a garbage collection."""
    found: list[weakref.ref[Any]] = []
    piece, init = states_file.StatesFile.piece, states_file.StatesFile.__init__

    def keep_piece(self: Any, i: int) -> Any:
        data = piece(self, i)
        if i:
            found.append(weakref.ref(data.obj))
        return data

    def keep(self: Any, *args: Any) -> None:
        found.append(weakref.ref(self))
        init(self, *args)

    monkeypatch.setattr(states_file.StatesFile, "piece", keep_piece)
    monkeypatch.setattr(states_file.StatesFile, "__init__", keep)

    def count() -> int:
        assert found
        return sum(one() is not None for one in found)

    gc.disable()
    yield count
    gc.enable()


async def until_none(alive: Any) -> None:
    """The event loop and the pool's thread refer to an error until their next step."""
    async with asyncio.timeout(10):
        while alive():
            await asyncio.sleep(0.001)


@contextmanager
def running(app: Any, loop: Any, http: Any = "auto") -> Iterator[tuple[uvicorn.Server, tuple[str, int]]]:
    """uvicorn, with small queues of the system."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        server = uvicorn.Server(uvicorn.Config(app, loop=loop, http=http, log_config=None))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield server, listener.getsockname()
        finally:
            server.should_exit = True
            thread.join(20)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])  # vLLM uses uvloop
@pytest.mark.parametrize(("method", "path", "body"), [GET, POST, STREAM])
def test_a_client_that_does_not_read_loses_its_connection(
    tmp_path, monkeypatch, caplog, alive, loop, method, path, body
):
    monkeypatch.setattr(asgi_calls, "SEND_SECONDS", 0.5)
    outer = large(tmp_path)
    content = json.dumps(body).encode() if body else b""
    head = {"Host": "x", "Content-Type": "application/json", "Content-Length": len(content), **WITH_KEY}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", ""]
    with running(outer.app, loop) as (server, address), socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(address)
        client.sendall("\r\n".join(lines).encode() + content)
        end = time.monotonic() + 30
        state = server.server_state
        while "client disconnected" not in caplog.text or state.connections or state.tasks:
            assert time.monotonic() < end, caplog.text
            time.sleep(0.02)
        assert memory_of(outer)._held == 0
        assert alive() == 0
        client.settimeout(30)
        with suppress(ConnectionResetError):  # what the system has queued, then the end
            while client.recv(1 << 20):
                pass
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("http", ["httptools", "h11"])  # vLLM uses httptools
@pytest.mark.parametrize("count", [1, 3])
def test_the_requests_of_a_client_that_disconnects_end(tmp_path, monkeypatch, caplog, http, count):
    """httptools marks only the last of several requests that were sent without waiting for their answers."""
    monkeypatch.setattr(asgi_calls, "CLOSED_SECONDS", 0.05)
    head = {"Host": "x", **WITH_KEY}
    lines = ["GET /v1/hidden_states/absent?wait=300 HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
    with running(outer_server(tmp_path).app, "uvloop", http) as (server, address):
        tasks = server.server_state.tasks
        with socket.create_connection(address) as client:
            client.sendall("\r\n".join([*lines, "", ""]).encode() * count)
            end = time.monotonic() + 30
            while not tasks:
                assert time.monotonic() < end
                time.sleep(0.001)
        while tasks:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert "Traceback" not in caplog.text


@pytest.mark.usefixtures("one_limit")
@pytest.mark.parametrize(
    ("method", "path", "body", "stall"),
    [
        *((*request, stall) for request in (GET, POST) for stall in ("start", "more", "end")),
        ("HEAD", "/v1/hidden_states/k", None, "start"),
        (*STREAM, "safetensors"),
        (*STREAM, "[DONE]"),
        (*STREAM, "end"),
    ],
)
def test_a_client_that_does_not_read_is_cut_off_and_releases_its_memory(
    tmp_path, monkeypatch, caplog, alive, method, path, body, stall
):
    monkeypatch.setattr(asgi_calls, "SEND_SECONDS", 0.1)

    async def run() -> None:
        server, queue = large(tmp_path), []

        async def send(message: Any) -> None:
            queue.append(message)  # as uvloop does
            data = message.get("body", b"")
            kind = {True: "more", False: "end", None: "start"}[message.get("more_body")]
            if stall == kind or stall.encode() in data:
                await never()

        for _ in range(2):
            async with asyncio.timeout(20):
                await call(server, method, path, body, never, send)
            await until_none(alive)
        async with asyncio.timeout(1), memory_of(server).hold(4 << 20):
            pass
        bodies = [message["body"] for message in queue if "body" in message]
        assert all(type(one) is bytes and len(one) <= 64 << 10 for one in bodies)

    asyncio.run(run())
    assert caplog.text.count("client disconnected") == 2
    assert "Traceback" not in caplog.text  # a client can cause it at any time, so it is logged in one line


@pytest.mark.parametrize(("method", "path", "body"), [GET, POST, STREAM])
def test_a_client_that_reads_too_slowly_is_cut_off(tmp_path, monkeypatch, method, path, body):
    """Otherwise a slow client would keep memory that other requests wait for. The limit is for all choices together."""
    monkeypatch.setattr(asgi_calls, "SEND_SECONDS", 0.4)
    monkeypatch.setattr(asgi_calls, "SEND_RATE", 1 << 30)

    async def read(pause: float) -> int:
        sent = 0

        async def send(message: Any) -> None:
            nonlocal sent
            begins = b'"safetensors"' in message.get("body", b"")  # one message of each choice
            await asyncio.sleep(pause if begins or method == "GET" else 0)
            sent += len(message.get("body", b""))

        async with asyncio.timeout(60):
            await call(large(tmp_path), method, path, {**body, "n": 3} if body else None, never, send)
        return sent

    whole = asyncio.run(read(0))
    assert asyncio.run(read(0.25)) < whole - 1000


@pytest.mark.usefixtures("one_limit")
def test_a_stream_keeps_no_states_of_a_choice_while_it_waits_for_the_next(tmp_path, monkeypatch):
    loaded: list[bytearray] = []
    load, find = _Answer._load, _Answer._find

    async def keep(self: Any, index: int, file: Any, data: bytearray) -> None:
        loaded.append(data)
        await load(self, index, file, data)

    async def look(self: Any, index: int, end: float) -> Any:
        assert not any(loaded)
        return await find(self, index, end)

    monkeypatch.setattr(_Answer, "_load", keep)
    monkeypatch.setattr(_Answer, "_find", look)
    sent = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    asyncio.run(call(large(tmp_path), *STREAM, never, send))
    assert b"".join(sent).count(b'"safetensors"') == len(loaded) == 3


@pytest.mark.parametrize(("method", "path", "body"), [GET, POST, STREAM])
def test_an_error_is_answered_without_the_sample_in_memory(tmp_path, monkeypatch, alive, method, path, body):
    """Its memory is released by then, and a client may read the error slowly."""
    monkeypatch.setattr(states_file, "PIECE_BYTES", 64 << 10)
    read, answered = states_file.StatesFile.piece, []

    def damaged(self: Any, i: int) -> Any:
        if i == (1 if method == "GET" else 3):
            raise states_file.FormatError("a damaged piece")
        return read(self, i)

    monkeypatch.setattr(states_file.StatesFile, "piece", damaged)

    async def send(message: Any) -> None:
        if b"FormatError" in message.get("body", b""):
            await until_none(alive)
            answered.append(message)

    asyncio.run(call(large(tmp_path), method, path, body, never, send))
    assert len(answered) == 1
