"""An S3 server that keeps names and sizes and drops the bytes, to measure clients and to record their requests.

It checks no signature. ``requests`` lists the received requests. ``answer`` can refuse a request or answer it slowly.
``stored`` is called after each stored object, before the response. Objects of up to 1 MiB can be read back.

    python -m tests.harness.discard [BYTES_PER_SECOND]    # prints its port, serves until its standard input ends
"""

from __future__ import annotations

import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

#: Bodies up to this size are kept, so that receipts and attempts can be read back.
_KEEP = 1 << 20
_BUFFER = 1 << 20


@dataclass(frozen=True)
class Request:
    """A received request. ``path`` is ``BUCKET/NAME``, unquoted; header names are in lower case."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """A response that replaces the usual one. ``slowly``: seconds between its bytes."""

    status: int
    body: bytes = b""
    slowly: float = 0.0
    content_range: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class DiscardServer:
    """Serves on loopback from its construction on, in threads of this process."""

    answer: Callable[[Request], Answer | None] = lambda _: None
    stored: Callable[[Request], None] = lambda _: None
    requests: list[Request] = field(default_factory=list)
    received_bytes: int = 0
    #: Bytes per second that it receives in bodies, over all connections. 0: no limit.
    rate: float = 0.0

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[int, bytes]] = {}
        self._pieces: dict[str, dict[str, int]] = {}  # sizes of uploads in pieces
        self._open: set[socket.socket] = set()
        self._free = 0.0  # when the bytes received so far are through at ``rate``
        threading.Thread(target=self._accept, name="s3-discard", daemon=True).start()

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def storage_options(self, **more: Any) -> dict[str, Any]:
        """Options for fsspec and s3fs; any keys are accepted."""
        return {
            "key": "any-key",
            "secret": "any-secret",
            "endpoint_url": self.endpoint_url,
            "client_kwargs": {"region_name": "us-east-1"},
            **more,
        }

    def close(self) -> None:
        with self._lock:
            ending = [self._listener, *self._open]
        for s in ending:
            with suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
            s.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._open.add(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        buffer = bytearray(_BUFFER)
        try:
            while self._one(connection, buffer):
                pass
        except OSError:
            pass  # the client disconnected, or the server was closed
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _one(self, connection: socket.socket, buffer: bytearray) -> bool:
        """Serve one request. Returns False when the client has closed the connection."""
        head = b""
        while b"\r\n\r\n" not in head:
            got = connection.recv(65536)
            if not got:
                return False
            head += got
        head, _, start = head.partition(b"\r\n\r\n")
        request = _parse(head)
        if request.headers.get("expect", "").lower() == "100-continue":
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = int(request.headers.get("content-length", 0))
        kept = bytearray(start) if length <= _KEEP else None
        seen = len(start)
        view = memoryview(buffer)
        while seen < length:
            n = connection.recv_into(view[: min(_BUFFER, length - seen)])
            if not n:
                return False
            if kept is not None:
                kept += view[:n]
            seen += n
            self._pace(n)
        with self._lock:
            self.requests.append(request)
            self.received_bytes += length
        told = self.answer(request)
        if told is None:
            told = self._usual(request, length, bytes(kept or b""))
            self.stored(request)
        _send(connection, request, told)
        return True

    def _pace(self, nbytes: int) -> None:
        if not self.rate:
            return
        with self._lock:
            self._free = max(self._free, time.monotonic()) + nbytes / self.rate
            pause = self._free - time.monotonic()
        time.sleep(max(pause, 0.0))

    def _usual(self, request: Request, length: int, body: bytes) -> Answer:
        if request.method == "POST" and "uploads" in request.query:
            return Answer(200, b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
        if request.method == "POST":
            with self._lock:
                self._objects[request.path] = (sum(self._pieces.pop(request.path, {}).values()), b"")
            return Answer(200, b'<CompleteMultipartUploadResult><ETag>"x"</ETag></CompleteMultipartUploadResult>')
        if "list-type" in request.query:
            return self._listing(request)
        with self._lock:
            known = self._objects.get(request.path)
            if request.method == "PUT":
                if known is not None and request.headers.get("if-none-match") == "*":
                    return Answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                if "partNumber" in request.query:
                    self._pieces.setdefault(request.path, {})[request.query["partNumber"]] = length
                else:
                    self._objects[request.path] = (length, body)
                return Answer(200)
            if request.method == "DELETE":
                self._objects.pop(request.path, None)
                return Answer(204)
        if known is None:
            return Answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        size, content = known
        content = content if len(content) == size else bytes(size)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
        if wanted is None:
            return Answer(200, content)
        start, stop = int(wanted[1]), min(int(wanted[2]) + 1, size)
        if start >= size:
            return Answer(416, b"<Error><Code>InvalidRange</Code></Error>")
        return Answer(206, content[start:stop], content_range=f"bytes {start}-{stop - 1}/{size}")

    def _listing(self, request: Request) -> Answer:
        bucket = request.path.partition("/")[0]
        prefix = f"{bucket}/{request.query.get('prefix', '')}"
        with self._lock:
            found = sorted((n[len(bucket) + 1 :], s) for n, (s, _) in self._objects.items() if n.startswith(prefix))
        entries = "".join(
            f"<Contents><Key>{name}</Key><Size>{size}</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            '<ETag>"x"</ETag></Contents>'
            for name, size in found
        )
        text = f"<ListBucketResult><Name>{bucket}</Name><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
        return Answer(200, text.encode())


@contextmanager
def discard_server(answer: Callable[[Request], Answer | None] = lambda _: None) -> Iterator[DiscardServer]:
    """A ``DiscardServer`` that is closed on exit."""
    server = DiscardServer(answer)
    try:
        yield server
    finally:
        server.close()


def _parse(head: bytes) -> Request:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    parts = urlsplit(target)
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    return Request(method, unquote(parts.path).lstrip("/"), query, headers)


def _send(connection: socket.socket, request: Request, answer: Answer) -> None:
    lines = [
        f"HTTP/1.1 {answer.status} -",
        f"Content-Length: {len(answer.body)}",
        'ETag: "x"',
        "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT",
        *([f"Content-Range: {answer.content_range}"] if answer.content_range else []),
        *(f"{name}: {value}" for name, value in answer.headers.items()),
    ]
    head = "\r\n".join([*lines, "", ""])
    data = head.encode() + (b"" if request.method == "HEAD" else answer.body)
    if not answer.slowly:
        connection.sendall(data)
        return
    for i in range(len(data)):
        connection.sendall(data[i : i + 1])
        time.sleep(answer.slowly)


def main() -> None:
    server = DiscardServer(rate=float(sys.argv[1]) if len(sys.argv) > 1 else 0.0)
    print(server.endpoint_url.rpartition(":")[2], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
