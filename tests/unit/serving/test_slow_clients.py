"""Clients that read slowly or not at all, or that have gone: no connection or memory of theirs stays."""

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
from hsx_dist.serving.sample_source import MemoryLimit, SampleSource
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


def source_of(server: OuterServer) -> SampleSource:
    source = next(route.app._source for route in server.app.router.routes if route.path == "/v1/completions")
    assert isinstance(source, SampleSource)
    return source


def memory_of(server: OuterServer) -> MemoryLimit:
    return source_of(server).memory


def http_request(method: str, path: str, body: Any) -> bytes:
    content = json.dumps(body).encode() if body else b""
    head = {"Host": "x", "Content-Type": "application/json", "Content-Length": len(content), **WITH_KEY}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", ""]
    return "\r\n".join(lines).encode() + content


def until(condition: Any) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


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
    with running(outer.app, loop) as (server, address), socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(address)
        client.sendall(http_request(method, path, body))
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


@pytest.mark.parametrize(
    ("http", "loop", "paused"),
    [("httptools", "uvloop", False), ("httptools", "asyncio", True), ("h11", "uvloop", True)],
)
@pytest.mark.parametrize(("method", "path", "body"), [("GET", "/v1/hidden_states/k?wait=300", None), POST, STREAM])
def test_a_request_ends_if_its_client_sends_another_and_closes_the_connection(
    tmp_path, monkeypatch, caplog, http, loop, paused, method, path, body
):
    """``paused``: whether the second request arrives later. Then uvicorn stops reading, and does not see the close."""
    monkeypatch.setattr(asgi_calls, "LOOK_SECONDS", 0.05)
    outer = outer_server(tmp_path, stores=False)
    first = http_request(method, path, body)
    with running(outer.app, loop, http) as (server, address):
        until(lambda: server.started)
        state = server.server_state
        with socket.create_connection(address) as client:
            client.sendall(first if paused else 2 * first)
            until(lambda: source_of(outer)._waiting)
            if paused:  # sent until then, because the first request's ``receive`` may continue to read
                until(lambda: all(each.flow.read_paused for each in state.connections) or client.sendall(first))
        until(lambda: not (source_of(outer)._waiting or state.connections or state.tasks))
    assert len(outer.seen) == (method == "POST")  # the second request does not start
    assert "Traceback" not in caplog.text
    assert "ASGI callable" not in caplog.text


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
