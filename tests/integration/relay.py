"""A relay before a real S3 server. It runs a function at a chosen moment of one request, and forwards all else."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

When = Literal["before", "halfway", "after"]


@dataclass
class Strike:
    """Call ``do`` at the ``at``-th request whose line begins with ``line``.

    - ``before``: no byte of the request has reached the server.
    - ``halfway``: half of the body has reached the server.
    - ``after``: the server has answered, and the client has not received the answer.

    After it nothing more of that connection is forwarded.
    """

    line: bytes
    when: When
    do: Callable[[], None]
    at: int = 1
    struck: threading.Event = field(default_factory=threading.Event)
    seen: int = 0


class Relay:
    """Forwards connections to ``port`` of this machine. ``alter`` may change what clients send."""

    def __init__(self, port: int):
        self._target = port
        self._lock = threading.Lock()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint_url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self.strike: Strike | None = None
        self.alter: Callable[[bytes], bytes] = lambda data: data
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            answered: list[Strike] = []
            for pump in (self._requests, self._answers):
                threading.Thread(target=pump, args=(client, server, answered), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, answered: list[Strike]) -> None:
        with _both_closed(client, server):
            while data := client.recv(1 << 16):
                strike = self._due(data)
                if strike is None:
                    server.sendall(self.alter(data))
                elif strike.when == "after":
                    answered.append(strike)
                    server.sendall(data)
                else:
                    if strike.when == "halfway":
                        server.sendall(_half(data, client))
                    strike.do()
                    return

    def _answers(self, client: socket.socket, server: socket.socket, answered: list[Strike]) -> None:
        with _both_closed(client, server):
            while data := server.recv(1 << 16):
                if answered and not data.startswith(b"HTTP/1.1 100"):
                    answered.pop().do()
                    return
                client.sendall(data)

    def _due(self, data: bytes) -> Strike | None:
        strike = self.strike
        if strike is None or not data.startswith(strike.line):
            return None
        with self._lock:
            strike.seen += 1
            if strike.seen != strike.at:
                return None
        strike.struck.set()
        return strike


def _half(data: bytes, client: socket.socket) -> bytes:
    """The head of a request, and half of its body."""
    while b"\r\n\r\n" not in data:
        data += client.recv(1 << 16)
    length = re.search(rb"(?i)\r\ncontent-length: (\d+)", data)
    assert length is not None
    wanted = data.index(b"\r\n\r\n") + 4 + int(length[1]) // 2
    while len(data) < wanted:
        data += client.recv(1 << 16)
    return data[:wanted]


@contextmanager
def _both_closed(client: socket.socket, server: socket.socket) -> Iterator[None]:
    """Close both connections if one direction ends. Errors of a peer that has disconnected are ignored."""
    try:
        with suppress(OSError):
            yield
    finally:
        for end in (client, server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextmanager
def relay(endpoint_url: str) -> Iterator[Relay]:
    """A relay to the server at ``endpoint_url``."""
    made = Relay(int(endpoint_url.rpartition(":")[2]))
    try:
        yield made
    finally:
        made.close()
