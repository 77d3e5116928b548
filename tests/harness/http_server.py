"""A small HTTP server on loopback whose answers a test chooses, and the listings of S3."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["Answers", "entry", "listing", "s3_options", "served"]


class Answers(BaseHTTPRequestHandler):
    """Base of a handler. A subclass has ``do_GET`` and others, which call ``answer``."""

    protocol_version = "HTTP/1.1"  # botocore waits for "100 Continue"
    disable_nagle_algorithm = True  # otherwise each answer waits 40 ms for the client's acknowledgement of its headers

    def received(self) -> bytes:
        """Return the request's body."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, body: bytes = b"", *, length: int | None = None, **headers: str) -> None:
        """Send an answer, without the body if the request is a HEAD.

        ``length``: the stated length, if it is not the body's. ``headers``: with ``_`` in place of ``-``. With
        ``Transfer_Encoding="chunked"`` no length is stated.
        """
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if headers.get("Transfer_Encoding") == "chunked":
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
        else:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_object(self, status: int, body: bytes = b"") -> None:
        """Send an answer with the headers of an object of S3."""
        self.answer(status, body, ETag='"1"', Last_Modified="Thu, 01 Jan 2026 00:00:00 GMT")

    def log_message(self, *_: object) -> None: ...


@contextmanager
def served(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve a handler on a free port. Yields the server's URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def s3_options(url: str) -> dict[str, str]:
    """Return the storage options of S3 at ``url``."""
    return {"key": "k", "secret": "s", "endpoint_url": url}


def entry(name: str, size: int = 1) -> str:
    """Return the entry of an object in a listing of S3."""
    date = "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    return f"<Contents><Key>{name}</Key>{date}<Size>{size}</Size></Contents>"


def listing(entries: Iterable[str], said: str = "<IsTruncated>false</IsTruncated>") -> bytes:
    """Return a page of a listing of S3. ``said``: what it says about further pages."""
    return (
        '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"{said}{''.join(entries)}<Name>b</Name></ListBucketResult>"
    ).encode()
