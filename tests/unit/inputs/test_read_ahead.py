"""A jump in a table or a zip file on a server fetches few bytes, and reads in order need few requests."""

from __future__ import annotations

import io
import random
import re
import struct
import threading
import zipfile
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.caching import caches
from fsspec.spec import AbstractBufferedFile

from hsx_dist.config import InputConfig
from hsx_dist.errors import FormatError
from hsx_dist.inputs import allowance, read_ahead
from hsx_dist.inputs.read_ahead import check_fetched, fetched_bytes
from hsx_dist.inputs.rows import read_rows
from hsx_dist.inputs.store_file import StoreFile
from tests.harness.http_server import Answers

#: An entry of an Arrow file's footer: a batch's offset, and the lengths of its metadata and body.
_BLOCK = struct.Struct("<qi4xq")


class _Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.body = b""
        self.sent: list[int] = []

    def url(self, name: str, body: bytes) -> str:
        self.body, self.sent = body, []
        return f"http://127.0.0.1:{self.server_port}/{name}"


class _Handler(Answers):
    server: _Server

    def do_HEAD(self) -> None:
        self.answer(200, self.server.body, Accept_Ranges="bytes")

    def do_GET(self) -> None:
        body = self.server.body
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert asked is not None
        start, end = int(asked[1]), min(int(asked[2]) + 1, len(body))
        self.server.sent.append(end - start)
        part = f"bytes {start}-{end - 1}/{len(body)}"
        self.answer(206, body[start:end], Accept_Ranges="bytes", Content_Range=part)


@pytest.fixture
def server(in_process: None) -> Iterator[_Server]:
    with _Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def _arrow(before: int, filler: int, after: int, *, jump: bool) -> bytes:
    """Return an Arrow file of ``before`` small batches, a large one, and ``after`` small batches. With ``jump`` its
    footer names them from the ends to the middle."""
    out, count = io.BytesIO(), before + 1 + after
    schema = pa.schema({"text": pa.string(), "x": pa.binary()})
    with pa.ipc.new_file(out, schema) as writer:
        for size in [0] * before + [filler] + [0] * after:
            writer.write_batch(pa.record_batch([["a"], [bytes(size)]], schema=schema))
    data = bytearray(out.getvalue())
    footer = len(data) - 10 - struct.unpack("<i", data[-10:-6])[0]
    at = data.index(struct.pack("<I", count), footer) + 4
    blocks = [bytes(data[at + i * _BLOCK.size :][: _BLOCK.size]) for i in range(count)]
    assert [_BLOCK.unpack(b)[0] for b in blocks] == sorted(_BLOCK.unpack(b)[0] for b in blocks)
    if jump:
        order = sorted(range(count), key=lambda i: min(i, count - 1 - i))
        data[at : at + count * _BLOCK.size] = b"".join(blocks[i] for i in order)
    return bytes(data)


def _read(path: str, **settings: Any) -> int:
    return len(list(read_rows(InputConfig(path=path, **settings))))


@pytest.mark.parametrize("jump", [False, True])
def test_a_jump_in_an_arrow_file_fetches_few_bytes(server: _Server, jump: bool) -> None:
    data = _arrow(10, 3 << 20, 10, jump=jump)
    assert _read(server.url("a.arrow", data)) == 21
    assert sum(server.sent) < len(data)
    assert jump or len(server.sent) < 8


def test_many_jumps_in_an_arrow_file_are_refused(server: _Server) -> None:
    data = _arrow(50, 1 << 18, 50, jump=True)
    with pytest.raises(FormatError, match="jumps many times"):
        _read(server.url("a.arrow", data))
    assert sum(server.sent) < 5 * len(data)
    assert _read(server.url("a.arrow", _arrow(50, 1 << 18, 50, jump=False))) == 101
    assert len(server.sent) < 10


def test_an_arrow_stream_needs_few_requests(server: _Server) -> None:
    out = io.BytesIO()
    batch = pa.record_batch({"text": ["a" * (1 << 15)]})
    with pa.ipc.new_stream(out, batch.schema) as writer:
        for _ in range(200):
            writer.write_batch(batch)
    assert _read(server.url("a.arrow", out.getvalue())) == 200
    assert len(server.sent) < 16
    assert sum(server.sent) < 1.1 * len(out.getvalue())


def test_columns_of_a_parquet_file_are_fetched_about_once(server: _Server) -> None:
    out = io.BytesIO()
    column = [random.Random(i).randbytes(4000).hex() for i in range(400)]
    table = pa.table({"text": column, "notes": column})
    pq.write_table(table, out, compression="none", use_dictionary=False, data_page_size=1 << 16)
    assert _read(server.url("a.parquet", out.getvalue()), metadata=["notes"]) == 400
    assert sum(server.sent) < 1.3 * len(out.getvalue())
    assert len(server.sent) < 24


def test_columns_are_fetched_in_the_order_of_the_file(server: _Server) -> None:
    """Each step back in a row group would fetch 64 KiB more."""
    out, names = io.BytesIO(), ["d", "c", "b", "a", "text"]
    column = [random.Random(i).randbytes(100).hex() for i in range(2000)]
    pq.write_table(pa.table(dict.fromkeys(names, column)), out, compression="none", row_group_size=100)
    assert _read(server.url("a.parquet", out.getvalue()), metadata=sorted(names[:-1])) == 2000
    assert sum(server.sent) < 1.3 * len(out.getvalue())


def test_one_thread_reads_a_parquet_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: None) -> None:
    """Several threads would fetch the columns of a row group in any order."""
    threads, read = set[int](), StoreFile.read

    def noted(self: StoreFile, size: int = -1) -> bytes:
        threads.add(threading.get_ident())
        return read(self, size)

    monkeypatch.setattr(StoreFile, "read", noted)
    pq.write_table(pa.table({"text": ["a"], "notes": ["b"]}), tmp_path / "a.parquet")
    assert _read(str(tmp_path / "a.parquet"), metadata=["notes"]) == 1
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("jump", [False, True])
def test_a_jump_in_a_zip_file_fetches_few_bytes(server: _Server, jump: bool) -> None:
    out, names = io.BytesIO(), [f"{i:02}.txt" for i in range(20)]
    first = names[::2] if jump else names[:10]
    with zipfile.ZipFile(out, "w") as members:
        for name in first:
            members.writestr(name, "a\n")
        members.writestr("filler.bin", bytes(3 << 20))
        for name in names:
            if name not in first:
                members.writestr(name, "a\n")
    url = server.url("a.zip", out.getvalue())
    assert _read(f"zip://*.txt::{url}") == 20
    assert sum(server.sent) < len(out.getvalue())
    assert jump or len(server.sent) < 10


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_table_in_a_zip_file_does_not_make_it_decompress_again_without_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: None, kind: int
) -> None:
    """Each seek to an earlier byte decompresses the member from its start."""
    monkeypatch.setattr(allowance, "FREE_BYTES", 1 << 20)
    monkeypatch.setattr(allowance, "MAX_EXPANSION", 5000 if kind == zipfile.ZIP_DEFLATED else 10)
    for jump in (False, True):
        with zipfile.ZipFile(tmp_path / "a.zip", "w", kind) as members:
            members.writestr("a.arrow", _arrow(50, 1 << 20, 50, jump=jump))
        if not jump:
            assert _read(f"zip://a.arrow::{tmp_path}/a.zip") == 101
            continue
        with pytest.raises(FormatError, match="bytes for each stored byte of the input"):
            _read(f"zip://a.arrow::{tmp_path}/a.zip")


class _File(AbstractBufferedFile):  # type: ignore[misc]
    data = bytes(range(256)) * (1 << 12)

    def __init__(self, cache_type: str) -> None:
        super().__init__(None, "x", size=len(self.data), cache_type=cache_type)

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.data[start:end]


@pytest.mark.parametrize("kind", [kind for kind in read_ahead._DEFAULTS if kind in caches])
def test_a_default_cache_is_replaced_and_ended(kind: str) -> None:
    file = _File(kind)
    before = file.cache
    check_fetched(file, "x", in_order=False)
    assert getattr(before, "_prefetcher", None) is None
    for start, size in ((300_000, 7), (0, 300_000), (10, 5), (len(file.data) - 3, 9)):
        file.seek(start)
        assert file.read(size) == file.data[start : start + size]
    assert 300_000 < fetched_bytes(file) < 600_000


def test_a_file_that_is_read_in_order_keeps_its_size_of_a_block() -> None:
    file = _File("bytes")
    check_fetched(file, "x", in_order=True)
    assert file.read(10) == file.data[:10]
    assert file.cache.end == min(10 + file.blocksize, file.size)


def test_a_chosen_cache_is_kept() -> None:
    file = _File("none")
    before = file.cache
    check_fetched(file, "x", in_order=False)
    assert file.cache is before
    assert fetched_bytes(file) == 0
