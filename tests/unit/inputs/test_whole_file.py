"""A server's answer that is not the asked bytes of an input file must not become rows, nor the end of the file."""

from __future__ import annotations

import gzip
import io
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zstandard
from fsspec.implementations.http import HTTPFileSystem
from fsspec.spec import AbstractBufferedFile
from multidict import CIMultiDict

from hsx_dist.config import InputConfig
from hsx_dist.errors import ConfigError, FormatError, Unavailable
from hsx_dist.inputs import store_file, web
from hsx_dist.inputs.listing import find_input
from hsx_dist.inputs.read_ahead import check_fetched
from hsx_dist.inputs.rows import read_rows
from hsx_dist.inputs.web import check_stream
from hsx_dist.inputs.whole_file import WholeFile, whole_ranges
from hsx_dist.store.s3_answers import STATED_SIZE
from tests.harness.http_server import Answers, listing, s3_options, served

_BLOCK = 1 << 16
_LINES = b"".join(b"row %06d %s\n" % (i, b"x" * 90) for i in range(6000))
_PAGE = b"<html>\n502 bad gateway\n</html>"
#: An answer to a GET: status, body, headers. None: the right one.
_Answer = tuple[int, bytes, dict[str, str]] | None
_Wrong = Callable[[int, int, bytes], _Answer]


@contextmanager
def _server(body: bytes, wrong: _Wrong | None = None, at: int = 1, **headers: str) -> Iterator[str]:
    """Serve ``body`` as a file with ranges. ``wrong`` gives the answer to GET number ``at``, or to each if 0."""
    seen = [0]

    class Handler(Answers):
        def do_HEAD(self) -> None:
            self.answer(200, body, ETag='"1"', Last_Modified="Thu, 01 Jan 2026 00:00:00 GMT", **headers)

        def do_GET(self) -> None:
            if "list-type" in self.path:  # whether the object hides a folder
                return self.answer(200, listing([]), Content_Type="application/xml")
            seen[0] += 1
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            start, end = (int(asked[1]), min(int(asked[2]) + 1, len(body))) if asked else (0, len(body))
            found = wrong(start, end, body) if wrong is not None and at in (0, seen[0]) else None
            status, part, more = found or (_range(start, end, body) if asked else (200, body, {}))
            return self.answer(status, part, ETag='"1"', Last_Modified="Thu, 01 Jan 2026 00:00:00 GMT", **more)

    with served(Handler) as url:
        yield url


def _range(start: int, end: int, body: bytes, of: int | str | None = None) -> tuple[int, bytes, dict[str, str]]:
    return 206, body[start:end], {"Content_Range": f"bytes {start}-{end - 1}/{of or len(body)}"}


def _zipped(lines: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as members:
        members.writestr("a.txt", lines)
    return out.getvalue()


def _config(url: str, name: str, scheme: str) -> InputConfig:
    if scheme == "http":
        return InputConfig(path=f"{url}/{name}", storage_options={"block_size": _BLOCK})
    return InputConfig(path=f"s3://b/{name}", storage_options={**s3_options(url), "default_block_size": _BLOCK})


_WRONG: dict[str, _Wrong] = {
    "a page": lambda *_: (200, _PAGE, {"Content_Type": "text/html"}),
    "a chunked page": lambda *_: (200, _PAGE, {"Transfer_Encoding": "chunked"}),
    "an empty answer": lambda *_: (200, b"", {}),
    "no content": lambda *_: (204, b"", {}),
    "an empty part": lambda s, e, _: (206, b"", {"Content_Range": f"bytes {s}-{e - 1}/{len(_LINES)}"}),
    "a short part": lambda s, e, body: (206, body[s : e - 9], {"Content_Range": f"bytes {s}-{e - 1}/{len(body)}"}),
    "another part": lambda s, e, body: (200 if s else 206, body[s + 7 : e], {"Content_Range": "bytes 7-9/10"}),
    "past the end": lambda *_: (416, b"", {}),
}


@pytest.mark.parametrize("scheme", ["http", "s3"])
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("answer", _WRONG)
def test_another_answer_gives_no_row_and_no_end(in_process: None, scheme: str, at: int, answer: str) -> None:
    texts: list[str] = []
    with _server(_LINES, _WRONG[answer], at) as url, pytest.raises(Unavailable):
        texts.extend(row.text for row in read_rows(_config(url, "a.txt", scheme)))  # type: ignore[union-attr,misc]
    assert texts == _LINES.decode().splitlines()[: len(texts)]
    assert len(texts) < (1 if at == 1 else 6000)


def test_the_whole_object_in_place_of_a_later_range_of_s3_is_refused(in_process: None) -> None:
    with (
        _server(_LINES, lambda *_: (200, _LINES, {}), at=2) as url,
        pytest.raises(Unavailable, match="as a part"),
    ):
        list(read_rows(_config(url, "a.txt", "s3")))


@pytest.mark.parametrize("path", ["s3://b/a.txt", "zip://a.txt::s3://b/a.zip"])
def test_a_page_in_place_of_the_head_of_an_object_is_no_size(in_process: None, path: str) -> None:
    """The page is shorter than the object, so a part of the object would be the input."""
    body = _LINES if path.endswith("/a.txt") else _zipped(_LINES[:1020])

    class Handler(Answers):
        heads = 0
        wrong = 0

        def do_HEAD(self) -> None:
            Handler.heads += 1
            if Handler.wrong in (0, Handler.heads):
                # A directory of a zip file is found from its end.
                self.answer(200, body if path.startswith("zip") else _PAGE, Content_Type="text/html")
            else:
                self.answer_object(200, body)

        def do_GET(self) -> None:
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if asked is None:
                return self.answer(200, listing([]), Content_Type="application/xml")
            status, part, more = _range(int(asked[1]), min(int(asked[2]) + 1, len(body)), body)
            return self.answer(status, part, ETag='"1"', **more)

    def count(url: str) -> int:
        return len(list(read_rows(InputConfig(path=path, storage_options={"s3": s3_options(url)}))))

    with served(Handler) as url:
        Handler.wrong = -1
        whole = count(url)
        assert whole == (10 if path.startswith("zip") else 6000)
        asked = Handler.heads
        for wrong in range(asked + 1):
            Handler.heads, Handler.wrong = 0, wrong
            with pytest.raises(Unavailable, match="an object's ETag and Last-Modified"):
                count(url)


@pytest.mark.parametrize("headers", [{}, {"Content_Range": "bytes {}-{}/611999"}])
def test_a_part_of_another_object_of_s3_is_refused(in_process: None, headers: dict[str, str]) -> None:
    def part(start: int, end: int, body: bytes) -> _Answer:
        return 206, body[start:end], {name: value.format(start, end - 1) for name, value in headers.items()}

    with _server(_LINES, part, at=2) as url, pytest.raises(Unavailable, match=r"expected (the bytes|a part of an obj)"):
        list(read_rows(_config(url, "a.txt", "s3")))


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_an_older_shorter_copy_of_a_web_file_is_refused(in_process: None, ending: str) -> None:
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[ending]
    old = pack(_LINES[:3030])

    def cached(start: int, end: int, _: bytes) -> _Answer:
        return _range(start, min(end, len(old)), old) if start < len(old) else (416, b"", {})

    with _server(old + pack(_LINES[3030:]), cached, at=0) as url, pytest.raises(Unavailable):
        list(read_rows(_config(url, f"a.txt{ending}", "http")))


@pytest.mark.parametrize("scheme", ["http", "s3"])
@pytest.mark.parametrize("answer", ["a page", "an empty answer", "a short part"])
def test_another_answer_in_a_table_gives_no_value(in_process: None, scheme: str, answer: str) -> None:
    out = io.BytesIO()
    table = pa.table({"text": [f"{i:06d} {'x' * 93}" for i in range(8000)]})
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=2000)
    for at in (1, 3, 5):
        with _server(out.getvalue(), _WRONG[answer], at) as url, pytest.raises(Unavailable):
            list(read_rows(_config(url, "a.arrow", scheme)))


@pytest.mark.parametrize("answer", ["a page", "an empty answer", "a short part"])
def test_another_answer_in_a_zip_file_gives_no_row(in_process: None, answer: str) -> None:
    rows: list[Any] = []
    with _server(_zipped(_LINES), _WRONG[answer], at=5) as url, pytest.raises(Unavailable):
        rows.extend(read_rows(InputConfig(path=f"zip://a.txt::{url}/a.zip")))
    assert [row.text for row in rows] == _LINES.decode().splitlines()[: len(rows)]


@pytest.mark.parametrize("scheme", ["http", "s3"])
@pytest.mark.parametrize("answer", _WRONG)
def test_another_answer_in_the_directory_of_a_zip_file_can_be_tried_again(
    in_process: None, answer: str, scheme: str
) -> None:
    """zipfile takes an error of a read for a broken file."""
    for at in (1, 2, 3, 4):
        with _server(_zipped(_LINES), _WRONG[answer], at) as url:
            path = f"{url}/a.zip" if scheme == "http" else "s3://b/a.zip"
            config = InputConfig(path=f"zip://a.txt::{path}", storage_options={"s3": s3_options(url)})
            with pytest.raises(Unavailable):
                find_input(config)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.parquet"])
def test_a_web_server_may_send_fewer_bytes_of_a_range_and_name_them(in_process: None, name: str) -> None:
    out = io.BytesIO()
    table = pa.table({"text": _LINES.decode().splitlines()})
    pq.write_table(table, out, compression="none", use_dictionary=False)
    body = {"a.txt": _LINES, "a.txt.gz": gzip.compress(_LINES, 0), "a.parquet": out.getvalue()}[name]
    with _server(body, lambda s, e, b: _range(s, min(e, s + 50_000), b, "*"), at=0) as url:
        assert [row.text for row in read_rows(_config(url, name, "http"))] == _LINES.decode().splitlines()  # type: ignore[union-attr]


def test_a_web_server_may_send_fewer_bytes_of_a_zip_files_directory(in_process: None) -> None:
    with _server(_zipped(_LINES[:1020]), lambda s, e, b: _range(s, min(e, s + 15), b), at=0) as url:
        assert len(list(read_rows(InputConfig(path=f"zip://a.txt::{url}/a.zip")))) == 10


#: Answers that only the reader of a web server's files knows.
_WRONG_OF_WEB: dict[str, _Wrong] = {
    "a part of another unit": lambda s, e, body: (206, body[s:e], {"Content_Range": f"rows {s}-{e - 1}/{len(body)}"}),
    "a short part without a range": lambda s, e, body: (206, body[s : e - 9], {}),
    "a part of another file": lambda s, e, body: _range(s, e, body, of=len(body) - 1),
    "a later part of the same size": lambda s, e, body: _range(s + 102, e + 102, body),
    "a longer part": lambda s, e, body: (206, body[s : e + 9], _range(s, e, body)[2]),
    "a longer file": lambda _, __, body: (200, body + b"x\n", {"Transfer_Encoding": "chunked"}),
}


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("answer", _WRONG_OF_WEB)
def test_another_answer_of_a_web_server_gives_no_row(in_process: None, at: int, answer: str) -> None:
    texts: list[str] = []
    with _server(_LINES, _WRONG_OF_WEB[answer], at) as url, pytest.raises(Unavailable, match="another answer"):
        texts.extend(row.text for row in read_rows(_config(url, "a.txt", "http")))  # type: ignore[union-attr,misc]
    assert texts == _LINES.decode().splitlines()[: len(texts)]


@pytest.mark.parametrize("headers", [{}, {"Content_Range": "Bytes {}-{}/612000"}, {"Content_Range": "bytes {}-{}/*"}])
def test_a_web_server_may_name_a_range_in_another_way_or_not(in_process: None, headers: dict[str, str]) -> None:
    def part(start: int, end: int, body: bytes) -> _Answer:
        return 206, body[start:end], {name: value.format(start, end - 1) for name, value in headers.items()}

    with _server(_LINES, part, at=0) as url:
        assert len(list(read_rows(_config(url, "a.txt", "http")))) == 6000


def test_a_file_without_ranges_is_read_in_order(in_process: None) -> None:
    def whole(_: int, __: int, body: bytes) -> _Answer:
        return 200, body, {}

    with _server(_LINES, whole, at=0, Accept_Ranges="none") as url:
        assert len(list(read_rows(_config(url, "a.txt", "http")))) == 6000


@pytest.mark.parametrize("body", [b"", _PAGE, _LINES[:-102]])
def test_another_answer_of_a_server_without_ranges_is_refused(in_process: None, body: bytes) -> None:
    with _server(_LINES, lambda *_: (200, body, {}), at=0, Accept_Ranges="none") as url, pytest.raises(Unavailable):
        list(read_rows(_config(url, "a.txt", "http")))


def test_a_stream_of_unknown_size_is_read_in_any_time(monkeypatch: pytest.MonkeyPatch, in_process: None) -> None:
    class Handler(Answers):
        def do_GET(self) -> None:
            self.answer(200, b"a\nb\n", Content_Type="text/plain", Transfer_Encoding="chunked")

        do_HEAD = do_GET

    # aiohttp's own limit for a whole transfer, however slowly its rows are taken.
    monkeypatch.setattr(aiohttp.client, "DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=1e-9))
    HTTPFileSystem.clear_instance_cache()  # its session has the limit of its first use
    with served(Handler) as url:
        assert len(list(read_rows(InputConfig(path=f"{url}/a.txt")))) == 2


@pytest.mark.parametrize("protocol", ["HTTP/1.0", "HTTP/1.1"])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_stream_without_a_stated_end_is_refused(in_process: None, protocol: str, name: str) -> None:
    """The end of the connection ends the body, also if the server dies after one of two rows."""

    class Handler(Answers):
        protocol_version = protocol

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Connection", "close")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(gzip.compress(b"a\n") if name.endswith(".gz") else b"a\n")

        do_HEAD = do_GET

    with (
        served(Handler) as url,
        pytest.raises(ConfigError, match="got one whose end is not stated"),
    ):
        list(read_rows(InputConfig(path=f"{url}/{name}")))


def test_a_chunked_stream_that_breaks_off_is_refused(in_process: None) -> None:
    class Handler(Answers):
        def do_HEAD(self) -> None:
            self.answer(200, Content_Type="text/plain", Transfer_Encoding="chunked")

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"2\r\na\n\r\n")
            self.close_connection = True

    with served(Handler) as url, pytest.raises(Unavailable, match="got ClientPayloadError"):
        list(read_rows(InputConfig(path=f"{url}/a.txt")))


@pytest.mark.parametrize(
    "codings", [["x-chunked"], ["chunked", "gzip"], ["chunked", "identity"], ["identity;chunked"], ["foo=chunked"]]
)
def test_a_coding_that_only_looks_like_chunked_states_no_end(codings: list[str]) -> None:
    """aiohttp reads until the connection ends, and so until it breaks off."""
    headers = CIMultiDict([("Transfer-Encoding", coding) for coding in codings])
    answer = SimpleNamespace(status=200, content_type="text/plain", content_length=None, headers=headers)
    with pytest.raises(ConfigError, match="got one whose end is not stated"):
        check_stream(SimpleNamespace(r=answer), "x", None)


@pytest.mark.parametrize(
    ("status", "kind", "length"), [(204, "text/plain", None), (200, "text/html", None), (200, "text/plain", 3)]
)
def test_a_stream_of_another_answer_is_refused(status: int, kind: str, length: int | None) -> None:
    answer = SimpleNamespace(status=status, content_type=kind, content_length=length)
    with pytest.raises(Unavailable, match=f"another answer of its server .status {status}, type {kind}"):
        check_stream(SimpleNamespace(r=answer), "x", 5)


@pytest.mark.parametrize("arguments", ["read_kw", "req_kw"])
def test_s3fs_passes_the_stated_size_to_each_request(arguments: str) -> None:
    """s3fs before 2026.9 has only ``req_kw``."""
    said = {"ETag": '"1"', "LastModified": "now"}
    of_s3 = SimpleNamespace(fs=SimpleNamespace(protocol=("s3", "s3a")), details=said, size=3, _fetch_range=None)
    setattr(of_s3, arguments, {"RequestPayer": "requester"})
    whole_ranges(of_s3, "s3://b/x")
    assert getattr(of_s3, arguments) == {"RequestPayer": "requester", STATED_SIZE: 3}


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("name", ["a.arrow", "a.parquet"])
def test_a_small_table_of_a_server_without_ranges_is_read_whole(
    monkeypatch: pytest.MonkeyPatch, in_process: None, name: str, says: bool
) -> None:
    out = io.BytesIO()
    table = pa.table({"text": [f"{i}" * 1000 for i in range(1000)]})
    write: Any = feather.write_feather if name.endswith("arrow") else pq.write_table
    write(table, out, compression="uncompressed" if name.endswith("arrow") else "none")
    gets: list[int] = []

    def whole(start: int, _: int, body: bytes) -> _Answer:
        gets.append(start)
        return 200, body, {}

    headers = {"Accept_Ranges": "none"} if says else {}
    with _server(out.getvalue(), whole, at=0, **headers) as url:
        assert len(list(read_rows(_config(url, name, "http")))) == 1000
        assert len(gets) == 1
        monkeypatch.setattr(web, "MOST_WHOLE", 1000)
        monkeypatch.setattr("hsx_dist.inputs.sources.MOST_WHOLE", 1000)
        with pytest.raises(ConfigError, match="that sends Content-Length and answers ranges"):
            list(read_rows(_config(url, name, "http")))


def test_a_large_file_of_a_server_without_ranges_and_lengths_is_refused(
    monkeypatch: pytest.MonkeyPatch, in_process: None
) -> None:
    def whole(_: int, __: int, body: bytes) -> _Answer:
        return 200, body, {"Transfer_Encoding": "chunked"}

    with _server(_LINES, whole, at=0) as url:
        assert len(list(read_rows(_config(url, "a.txt", "http")))) == 6000
        monkeypatch.setattr(web, "MOST_WHOLE", 1000)
        with pytest.raises(ConfigError, match="that sends Content-Length and answers ranges"):
            list(read_rows(_config(url, "a.txt", "http")))


@pytest.mark.parametrize("answer", ["a page", "a chunked page"])
def test_a_page_in_place_of_a_large_file_is_retryable(
    monkeypatch: pytest.MonkeyPatch, in_process: None, answer: str
) -> None:
    monkeypatch.setattr(web, "MOST_WHOLE", 1000)
    with _server(_LINES, _WRONG[answer]) as url, pytest.raises(Unavailable, match="another answer"):
        list(read_rows(_config(url, "a.txt", "http")))


def test_a_whole_large_file_in_place_of_a_later_range_is_retryable(
    monkeypatch: pytest.MonkeyPatch, in_process: None
) -> None:
    """The server has answered a range before."""
    monkeypatch.setattr(web, "MOST_WHOLE", 1000)
    with _server(_LINES, lambda _, __, body: (200, body, {}), at=2) as url, pytest.raises(Unavailable):
        list(read_rows(_config(url, "a.txt", "http")))


def test_a_server_of_python_serves_lines_and_tables(tmp_path: Path, in_process: None) -> None:
    (tmp_path / "a.txt").write_bytes(_LINES)
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "a.parquet")
    with served(partial(SimpleHTTPRequestHandler, directory=str(tmp_path))) as url:
        assert len(list(read_rows(InputConfig(path=f"{url}/a.txt")))) == 6000
        assert len(list(read_rows(InputConfig(path=f"{url}/a.parquet")))) == 2


@pytest.mark.parametrize("name", ["a.txt", "a.parquet"])
def test_a_cache_of_whole_files_does_not_hide_another_answer(in_process: None, name: str) -> None:
    with _server(_LINES, lambda *_: (200, _PAGE, {}), at=0) as url, pytest.raises(Unavailable, match="612000 bytes"):
        list(read_rows(InputConfig(path=f"simplecache::{url}/{name}")))
    with _server(_LINES) as url:
        assert len(list(read_rows(InputConfig(path=f"simplecache::{url}/a.txt")))) == 6000


def test_a_cache_of_whole_files_gets_an_object_of_s3_in_one_request(in_process: None) -> None:
    """s3fs gives the copy its full size first. So a part with another answer would not change the size."""

    def read(url: str) -> list[Any]:
        options = {**s3_options(url), "default_block_size": _BLOCK, "max_concurrency": 4}
        return list(read_rows(InputConfig(path="simplecache::s3://b/a.txt", storage_options={"s3": options})))

    with _server(_LINES, lambda s, *_: (200, _PAGE, {}) if s else None, at=0) as url:
        assert [row.text for row in read(url)] == _LINES.decode().splitlines()
    for body in (_PAGE, b"", _LINES[:-102], _LINES * 2):
        with _server(_LINES, lambda *_, body=body: (200, body, {})) as url, pytest.raises(Unavailable):  # type: ignore[misc]
            read(url)


@pytest.mark.parametrize("cache", ["blockcache", "filecache", "simplecache"])
def test_a_cache_reads_a_web_server_without_pages_of_links(in_process: None, tmp_path: Path, cache: str) -> None:
    options = {cache: {"cache_storage": str(tmp_path)}, "http": {"block_size": _BLOCK}}
    with _server(_LINES) as url:
        rows = list(read_rows(InputConfig(path=f"{cache}::{url}/a.txt", storage_options=options)))
    assert [row.text for row in rows] == _LINES.decode().splitlines()  # type: ignore[union-attr]


@pytest.mark.parametrize("cache", ["", "simplecache::"])
def test_a_version_of_an_object_is_read_by_the_ending_of_its_name(in_process: None, cache: str) -> None:
    with _server(gzip.compress(_LINES)) as url:
        options: dict[str, Any] = {**s3_options(url), "version_aware": True}
        options = {"s3": options} if cache else options
        path = f"{cache}s3://b/a.txt.gz?versionId=v1"
        rows = list(read_rows(InputConfig(path=path, storage_options=options)))
    assert [row.text for row in rows] == _LINES.decode().splitlines()  # type: ignore[union-attr]
    assert rows[7].key == "a:00000007"


class _File(AbstractBufferedFile):  # type: ignore[misc]
    def __init__(self, cache_type: str, block_size: int = _BLOCK) -> None:
        self.answers = [b"page", _LINES[:100]]
        super().__init__(None, "x", block_size=block_size, size=100, cache_type=cache_type)

    def _fetch_range(self, *_: int) -> bytes:
        return self.answers.pop(0)


@pytest.mark.parametrize("kind", ["none", "mmap", "blockcache", "first"])
def test_a_chosen_cache_keeps_no_other_answer(kind: str) -> None:
    file = _File(kind)
    check_fetched(file, "x", in_order=True)
    with pytest.raises(Unavailable, match="from 0 to 100 of x, got an answer of 4 bytes"):
        file.read(100)
    file.seek(0)
    assert file.read(100) == _LINES[:100]


def test_a_cache_of_blocks_gets_no_range_behind_the_end() -> None:
    """fsspec's ``MMapCache`` asks for one. S3 answers with the whole file."""
    file = _File("mmap", 64)
    file.answers = [_LINES[:100], _LINES[:100]]
    check_fetched(file, "x", in_order=True)
    assert file.read(90) == _LINES[:90]
    assert file.read(90) == _LINES[90:100]
    assert len(file.answers) == 1


def test_a_file_that_was_fetched_when_it_was_opened_is_checked() -> None:
    with pytest.raises(Unavailable, match="got 4"):
        check_fetched(_File("all"), "x", in_order=True)


def test_a_cache_of_known_parts_is_not_taken_for_a_file_of_another_size() -> None:
    check_fetched(_File("parts"), "x", in_order=True)


def test_a_local_file_may_grow_but_not_end_early() -> None:
    def read(size: int, *, may_grow: bool = True) -> int:
        return len(io.BufferedReader(WholeFile(io.BytesIO(b"12345"), "x", size, may_grow=may_grow)).read())

    assert (read(5), read(3), read(5, may_grow=False)) == (5, 5, 5)
    with pytest.raises(Unavailable, match=r"expected x to have 6 bytes.* got 5"):
        read(6)
    with pytest.raises(Unavailable, match="got 5 or more"):
        read(3, may_grow=False)


@pytest.fixture
def newer_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from Python 3.12 on, a seek in a member of a zip file ends the check of its checksum."""
    seek = zipfile.ZipExtFile.seek

    def seeked(member: Any, *place: int) -> int:
        member._expected_crc = None
        return seek(member, *place)

    monkeypatch.setattr(zipfile.ZipExtFile, "seek", seeked)


def _damaged(path: Path, files: dict[str, bytes], old: bytes, new: bytes) -> None:
    """Write a zip file whose members have other bytes than their checksums say."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))


@pytest.mark.usefixtures("in_process", "newer_python")
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_damaged_table_in_a_zip_file_gives_no_changed_rows(tmp_path: Path, form: str) -> None:
    table, out, path = pa.table({"text": ["Pay 100 dollars"]}), io.BytesIO(), tmp_path / "a.zip"
    if form == "parquet":
        pq.write_table(table, out, use_dictionary=False, compression="none", write_statistics=False)
    else:
        with pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table)
    files = {f"a.{form}": out.getvalue()}
    _damaged(path, files, b"Pay 100", b"Pay 100")
    assert len(list(read_rows(InputConfig(path=f"zip://a.{form}::{path}")))) == 1
    _damaged(path, files, b"Pay 100", b"Pay 900")
    with pytest.raises(FormatError, match=r"got broken compressed data after row -1 \(BadZipFile\)"):
        list(read_rows(InputConfig(path=f"zip://a.{form}::{path}")))


@pytest.mark.usefixtures("in_process", "newer_python")
def test_a_damaged_list_of_a_saved_data_sets_files_in_a_zip_file_is_noticed(tmp_path: Path) -> None:
    path, table = tmp_path / "a.zip", pa.table({"text": ["a"]})
    out = io.BytesIO()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    state = b'{"_data_files": [{"filename": "1.arrow"}], "_indices_data_files": null}'
    _damaged(path, {"1.arrow": out.getvalue(), "2.arrow": out.getvalue(), "state.json": state}, b'"1.a', b'"2.a')
    with pytest.raises(ConfigError, match="BadZipFile"):
        list(read_rows(InputConfig(path=f"zip://::{path}")))


def test_a_member_of_a_zip_file_is_counted_as_it_is_read_before_arrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_file, "_PIECE", 1000)
    counted: list[int] = []
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", bytes(2500))
    with zipfile.ZipFile(tmp_path / "a.zip") as archive, archive.open("a") as member:
        file = store_file.StoreFile(member, "a", None, counted.append)
        assert (counted, file.size, file.tell()) == ([1000, 1000, 500], 2500, 0)
