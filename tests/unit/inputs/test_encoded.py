"""Objects with a Content-Encoding are read as they are stored, and unknown sizes do not lift limits."""

from __future__ import annotations

import gzip
import http.server
import io
import json
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from aiohttp import ClientTimeout, ServerTimeoutError
from fsspec.asyn import sync
from fsspec.exceptions import FSTimeoutError

from hsx_dist.config import InputConfig
from hsx_dist.errors import ConfigError, FormatError, Unavailable
from hsx_dist.format.manifest import RowFate
from hsx_dist.inputs import allowance
from hsx_dist.inputs.rows import read_rows
from hsx_dist.store import web_answers
from hsx_dist.store.bounded_response import BoundedResponse, PartialResponse, SameServerResponse
from hsx_dist.store.opening import open_store
from hsx_dist.store.web_answers import bounding_answers
from tests.harness.http_server import Answers, served

PLAIN = b'{"text": "a"}\n' * 1000
GZIP = gzip.compress(PLAIN)


class _Server(http.server.ThreadingHTTPServer):
    """``objects``: end of a path → body and Content-Encoding. A body without an encoding is sent in chunks."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.accepted: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(Answers):
    server: _Server

    def do_GET(self) -> None:
        self.server.accepted.add(self.headers["Accept-Encoding"])
        path = self.path.partition("?")[0]
        found = next((known for name, known in self.server.objects.items() if path.endswith(name)), None)
        if found is None:
            self.send_error(404)
            return
        body, encoding = found
        self.send_response(200)
        self.send_header("Connection", "close")
        if encoding:
            self.send_header("Content-Encoding", encoding)
            self.send_header("Content-Length", str(len(body)))
        else:
            self.send_header("Transfer-Encoding", "chunked")
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize(
    ("encoding", "body"), [("gzip", GZIP), ("zstd", zstandard.compress(PLAIN))], ids=("gzip", "zstd")
)
@pytest.mark.parametrize("scheme", ["http", "gs"])
def test_a_store_does_not_decode(server: _Server, scheme: str, encoding: str, body: bytes) -> None:
    server.objects["x"] = body, encoding
    options = {"endpoint_url": server.url, "token": "anon"} if scheme == "gs" else {}
    store = open_store("gs://bucket" if scheme == "gs" else server.url, options, backend="fsspec", retry_seconds=0)
    assert store.get("x") == body
    assert server.accepted == {"identity"}


@pytest.mark.parametrize("chain", ["", "simplecache::"])
def test_an_input_does_not_decode(server: _Server, chain: str) -> None:
    server.objects["x.jsonl"] = GZIP, "gzip"
    server.objects["x.jsonl.gz"] = GZIP, "gzip"
    path = f"{chain}{server.url}/x.jsonl"
    with fsspec.open(path, **bounding_answers(path, {})) as file:
        assert file.read() == GZIP
    if chain:
        return
    assert all(isinstance(row, RowFate) for row in read_rows(InputConfig(path=path)))
    assert len(list(read_rows(InputConfig(path=f"{path}.gz")))) == 1000


def test_a_chain_does_not_decode(server: _Server) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as members:
        members.writestr("x.jsonl", PLAIN)
    server.objects["x.zip"] = gzip.compress(packed.getvalue()), "gzip"
    with pytest.raises(ConfigError):
        list(read_rows(InputConfig(path=f"zip://x.jsonl::{server.url}/x.zip")))
    assert server.accepted == {"identity"}


def test_the_users_options_are_kept() -> None:
    given: dict[str, Any] = {"http": {"a": 1}, "b": 2, "client_kwargs": {"trust_env": True, "headers": {"Cookie": "c"}}}
    given["client_kwargs"]["timeout"] = ClientTimeout(total=7)
    own = {"auto_decompress": False, "response_class": BoundedResponse}
    timeout = ClientTimeout(total=None, sock_connect=30, sock_read=60)
    session = {**own, "timeout": timeout, "headers": {"Accept-Encoding": "identity"}}
    merged = {
        **own,
        "response_class": SameServerResponse,  # the cookie is for this server
        "timeout": ClientTimeout(total=7),
        "trust_env": True,
        "headers": {"Accept-Encoding": "identity", "Cookie": "c"},
    }
    assert bounding_answers("http://h/x", given) == {"a": 1, "b": 2, "client_kwargs": merged}
    of_gcs = {
        "token": "t", "session_kwargs": {**session, "response_class": PartialResponse}, "requests_timeout": timeout
    }  # fmt: skip
    assert bounding_answers("zip://x::gs://b/y", {"gs": {"token": "t"}}) == {"gs": of_gcs}
    assert bounding_answers("gs://b/y", {"requests_timeout": 7})["requests_timeout"] == 7
    assert bounding_answers("s3://b/x", given) == given
    assert bounding_answers("zip://x::simplecache::s3://b/y", {"s3": {"key": "k"}}) == {
        "s3": {"key": "k", "max_concurrency": 1}
    }


@pytest.mark.parametrize("scheme", ["http", "gs"])
def test_a_server_that_sends_no_more_bytes_ends_a_request(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    ended = threading.Event()

    class Handler(Answers):
        def do_GET(self) -> None:
            self.answer(200, b"a", length=10)
            ended.wait(20)

    monkeypatch.setattr(web_answers, "_NEXT_BYTES_S", 0.1)
    with served(Handler) as url:
        options = bounding_answers(f"{scheme}://b/x", {"endpoint_url": url, "token": "anon"} if scheme == "gs" else {})
        fs = fsspec.filesystem(scheme, **options, skip_instance_cache=True)
        once = type(fs)._request.__wrapped__ if scheme == "gs" else type(fs)._cat_file  # without gcsfs's retries
        try:
            with pytest.raises(FSTimeoutError) as raised:
                sync(fs.loop, once, fs, *(["GET"] if scheme == "gs" else []), f"{url}/x", timeout=5)
            assert isinstance(raised.value.__cause__, ServerTimeoutError)
        finally:
            ended.set()


@pytest.mark.usefixtures("in_process")
def test_a_compressed_input_of_unknown_size_has_limits(server: _Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowance, "FREE_ROWS", 100)
    server.objects["x.jsonl.zst"] = zstandard.compress(PLAIN), ""
    server.objects["x.jsonl"] = PLAIN, ""
    with pytest.raises(FormatError, match="expected at most 2 rows"):
        list(read_rows(InputConfig(path=f"{server.url}/x.jsonl.zst")))
    assert len(list(read_rows(InputConfig(path=f"{server.url}/x.jsonl")))) == 1000


def test_an_encoded_object_of_gcs_is_no_input(server: _Server) -> None:
    about = {"kind": "storage#object", "name": "x.jsonl", "bucket": "b", "size": "20", "generation": "1"}
    server.objects["/b/o"] = b'{"kind": "storage#objects"}', "identity"
    server.objects["/o/x.jsonl"] = json.dumps({**about, "contentEncoding": "gzip"}).encode(), "identity"
    options = {"endpoint_url": server.url, "token": "anon"}
    with pytest.raises(ConfigError, match="expected an object without a Content-Encoding, got 'gzip'"):
        list(read_rows(InputConfig(path="gs://b/x.jsonl", storage_options=options)))


def test_an_answer_that_is_no_object_of_gcs_is_no_empty_file(server: _Server) -> None:
    server.objects["/b/o"] = b'{"kind": "storage#objects"}', "identity"
    server.objects["/o/x.jsonl"] = b'{"name": "x.jsonl"}', "identity"
    options = {"endpoint_url": server.url, "token": "anon"}
    with pytest.raises(Unavailable, match="expected an answer with an object's generation"):
        list(read_rows(InputConfig(path="gs://b/x.jsonl", storage_options=options)))


@pytest.mark.usefixtures("in_process")
def test_a_table_of_unknown_size_names_what_the_server_lacks(server: _Server) -> None:
    """Arrow seeks to the end first. A retry would not help."""
    table = io.BytesIO()
    pq.write_table(pa.table({"text": ["a"]}), table)
    server.objects["x.parquet"] = table.getvalue(), ""
    with pytest.raises(
        ConfigError, match=r"expected the parts of http.*x\.parquet.*, got a stream.* that sends Content-Length"
    ):
        list(read_rows(InputConfig(path=f"{server.url}/x.parquet")))


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("cache", ["simplecache", "filecache", "blockcache"])
def test_a_cache_before_a_file_of_unknown_size_is_refused(server: _Server, cache: str) -> None:
    """The copy of a page, or of an empty answer, would look like the file."""
    server.objects["x.jsonl"] = PLAIN, ""
    with pytest.raises(ConfigError, match=r"expected a server that states the size of http.*Remove the link such as"):
        list(read_rows(InputConfig(path=f"{cache}::{server.url}/x.jsonl")))


@pytest.mark.usefixtures("in_process")
def test_an_empty_gzip_file_of_unknown_size_is_not_whole(server: _Server) -> None:
    """Python's gzip would read it as a file without rows."""
    server.objects["x.jsonl.gz"] = b"", ""
    with pytest.raises(FormatError, match=r"x\.jsonl\.gz to be whole, got broken compressed data"):
        list(read_rows(InputConfig(path=f"{server.url}/x.jsonl.gz")))
    server.objects["x.jsonl.gz"] = gzip.compress(b""), ""
    assert list(read_rows(InputConfig(path=f"{server.url}/x.jsonl.gz"))) == []


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("chain", ["", "zip://x.jsonl::"])
def test_a_cache_of_whole_files_gets_an_object_of_gcs_in_one_request(
    server: _Server, monkeypatch: pytest.MonkeyPatch, chain: str
) -> None:
    """A copy of gcsfs in parts, from 100 MB on, waits forever after a short part. gcsfs gives no headers to parts."""
    given, packed = [], io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("x.jsonl", PLAIN)
    body = packed.getvalue() if chain else PLAIN

    async def copied(_: object, __: str, local: str, **how: Any) -> None:
        given.append(how)
        Path(local).write_bytes(body)

    monkeypatch.setattr("gcsfs.core.GCSFileSystem._get_file", copied)
    about = {"kind": "storage#object", "name": "y.jsonl", "bucket": "b", "size": str(len(body)), "generation": "1"}
    server.objects["/b/o"] = b'{"kind": "storage#objects"}', "identity"
    server.objects["/o/y.jsonl"] = json.dumps(about).encode(), "identity"
    options = {"gs": {"endpoint_url": server.url, "token": "anon"}}
    assert (
        len(list(read_rows(InputConfig(path=f"{chain}simplecache::gs://b/y.jsonl", storage_options=options)))) == 1000
    )
    assert [how["headers"] for how in given] == [{}]
