"""The limits of rows and decompressed bytes hold for all files of an input together."""

from __future__ import annotations

import bz2
import gzip
import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from hsx_dist.config import InputConfig
from hsx_dist.errors import FormatError
from hsx_dist.inputs import allowance, joined
from hsx_dist.inputs.rows import read_rows
from tests.harness.http_server import Answers, served

pytestmark = pytest.mark.usefixtures("in_process")


def _count(path: Path | str) -> int:
    return sum(1 for _ in read_rows(InputConfig(path=str(path), id=None)))


def _lines(unit: bytes, times: int) -> bytes:
    return gzip.compress(unit * times)


def _table(unit: bytes, times: int, *, arrow: bool = False) -> bytes:
    written = io.BytesIO()
    table = pa.table({"text": pa.array([unit.decode()] * times).dictionary_encode()})
    if not arrow:
        pq.write_table(table, written, compression="zstd")
        return written.getvalue()
    with pa.ipc.new_file(written, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    return written.getvalue()


def _arrow(unit: bytes, times: int) -> bytes:
    return _table(unit, times, arrow=True)


_FILES = [("a.txt.gz", _lines), ("a.parquet", _table), ("a.arrow", _arrow)]


@pytest.mark.parametrize(("name", "make"), _FILES)
@pytest.mark.parametrize("archive", [False, True], ids=["folder", "zip"])
def test_rows_of_all_files_count_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, make: Callable[[bytes, int], bytes], archive: bool
) -> None:
    monkeypatch.setattr(allowance, "FREE_ROWS", 2500)
    monkeypatch.setattr(allowance, "MOST_ROWS", 0)
    path = str(tmp_path)
    for count in (2, 3):
        for i in range(count):
            (tmp_path / f"{i}{name}").write_bytes(make(b"a\n", 1000))
        if archive:
            with zipfile.ZipFile(tmp_path / "all.zip", "w", zipfile.ZIP_DEFLATED) as file:
                for i in range(count):
                    file.write(tmp_path / f"{i}{name}", f"{i}{name}")
            path = f"zip://*{name}::{tmp_path}/all.zip"
        else:
            path = f"{tmp_path}/*{name}"
        if count == 2:
            assert _count(path) == 2000
            continue
        with pytest.raises(FormatError, match="at most 0 rows for each stored byte of the input so far"):
            _count(path)


@pytest.mark.parametrize(("name", "make"), _FILES)
def test_decompressed_bytes_of_all_files_count_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, make: Callable[[bytes, int], bytes]
) -> None:
    monkeypatch.setattr(allowance, "FREE_BYTES", 1 << 20)
    monkeypatch.setattr(allowance, "MAX_EXPANSION", 1)
    (tmp_path / f"0{name}").write_bytes(make(b"a" * 600_000 + b"\n", 1))
    assert _count(tmp_path) == 1
    (tmp_path / f"1{name}").write_bytes(make(b"a" * 600_000 + b"\n", 1))
    with pytest.raises(FormatError, match="at most 1 bytes for each stored byte of the input so far"):
        _count(tmp_path)


@pytest.mark.parametrize("archive", [False, True], ids=["folder", "zip"])
def test_stored_bytes_of_all_files_count_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, archive: bool
) -> None:
    """Many small files are no repetition."""
    monkeypatch.setattr(allowance, "FREE_ROWS", 10)
    monkeypatch.setattr(allowance, "FREE_BYTES", 100)
    path = str(tmp_path)
    if archive:
        with zipfile.ZipFile(tmp_path / "all.zip", "w", zipfile.ZIP_DEFLATED) as file:
            for i in range(200):
                file.writestr(f"{i}.jsonl", '{"text": "a"}\n')
        path = f"zip://*.jsonl::{tmp_path}/all.zip"
    else:
        for i in range(200):
            (tmp_path / f"{i}.txt{'.gz' if i % 2 else ''}").write_bytes(gzip.compress(b"a\n") if i % 2 else b"a\n")
    assert _count(path) == 200


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("a.txt.bz2", "at most 2 bytes for each stored byte"),
        ("a.parquet", "at most 1048576 bytes of page indexes and filters, got more"),
    ],
)
def test_a_size_that_a_server_invents_permits_no_more_rows(
    monkeypatch: pytest.MonkeyPatch, name: str, error: str
) -> None:
    monkeypatch.setattr(joined, "_MOST", 1 << 20)
    monkeypatch.setattr(allowance, "PART_BYTES", 0)
    monkeypatch.setattr(allowance, "FREE_BYTES", 10_000)
    monkeypatch.setattr(allowance, "MAX_EXPANSION", 2)
    claim, written = 10**12, io.BytesIO()
    table = pa.table({"text": pa.array(["a" * 100_000] * 1000)})
    pq.write_table(table, written, compression="zstd", use_dictionary=False)
    body = bz2.compress(b"aaaaaaaaaa\n" * 1_000_000) if name.endswith("bz2") else written.getvalue()

    class Handler(Answers):
        def do_HEAD(self) -> None:
            self.answer(200, Content_Type="application/octet-stream", Accept_Ranges="bytes", length=claim)

        def do_GET(self) -> None:
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            # A table's footer is at its end. Its other bytes are at its beginning, as the footer says.
            tail, last = claim - len(body), min(last, claim - 1)
            near = body[first : last + 1] if first < len(body) else b""
            part = near.ljust(last + 1 - first, b"\0")
            if last >= tail:
                part = bytes(max(tail - first, 0)) + body[max(first - tail, 0) : last + 1 - tail]
            self.answer(206, part, Content_Range=f"bytes {first}-{last}/{claim}")

    with served(Handler) as url, pytest.raises(FormatError, match=error):
        _count(f"{url}/{name}")


def test_members_have_no_more_stored_bytes_than_their_zip_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory of a zip file may name the same bytes in many members, or false sizes."""
    monkeypatch.setattr(allowance, "FREE_ROWS", 1000)
    path, members = tmp_path / "a.zip", 400
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for i in range(members):
            file.writestr(f"{i:03d}.txt", b"a\n" * 1200)
    data = bytearray(path.read_bytes())
    at = directory = data.index(b"PK\x01\x02")
    for _ in range(members):
        data[at + 20 : at + 24] = (1 << 31).to_bytes(4, "little")  # the compressed size
        at = data.find(b"PK\x01\x02", at + 1)
    assert 1200 < allowance.MOST_ROWS * directory < 1200 * members
    path.write_bytes(data)
    with pytest.raises(FormatError, match="at most 2 rows for each stored byte of the input so far"):
        _count(f"zip://*.txt::{path}")


def test_values_of_runs_in_parquet_count_although_they_take_no_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allowance, "FREE_BYTES", 4 << 20)
    monkeypatch.setattr(allowance, "MAX_EXPANSION", 0)
    for values, fits in ((1 << 19, True), ((1 << 20) + 1, False)):
        column = pa.ListArray.from_arrays(pa.array([0, values], pa.int32()), pa.array([0] * values, pa.int32()))
        pq.write_table(pa.table({"token_ids": column}), tmp_path / "a.parquet", compression="none")
        assert (tmp_path / "a.parquet").stat().st_size < 4000
        if fits:
            assert _count(str(tmp_path / "a.parquet")) == 1
        else:
            with pytest.raises(FormatError, match="after row -1: expected at most 0 bytes for each stored byte"):
                _count(str(tmp_path / "a.parquet"))


#: Compressed files of one line, which continue with very many parts without lines.
_PARTS: dict[str, Callable[[int], bytes]] = {
    "a.txt.gz": lambda n: gzip.compress(b"a\n") + gzip.compress(b"") * n,
    "a.txt.zst": lambda n: zstandard.compress(b"a\n") + struct.pack("<II", 0x184D2A50, 0) * n,
    "a.txt.bz2": lambda n: bz2.compress(b"a\n") + bz2.compress(b"") * n,
    "a.arrow": lambda n: _batches(["a"], *[[]] * n),
}


def _batches(*texts: list[str]) -> bytes:
    written, schema = io.BytesIO(), pa.schema({"text": pa.string()})
    with pa.ipc.new_stream(written, schema) as writer:
        for column in texts:
            writer.write_batch(pa.record_batch([pa.array(column, pa.string())], schema=schema))
    return written.getvalue()


@pytest.mark.parametrize("name", _PARTS)
def test_parts_without_rows_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each takes time. A zip file of some MiB may have hours of them."""
    monkeypatch.setattr(allowance, "FREE_BYTES", 1 << 20)
    for parts, archive in ((20, True), (5000, False), (5000, True)):
        path = tmp_path / name
        path.write_bytes(_PARTS[name](parts))
        if not archive:
            assert _count(path) == 1
            continue
        with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
            file.write(path, name)
        if parts == 20:
            assert _count(f"zip://{name}::{tmp_path}/a.zip") == 1
            continue
        with pytest.raises(FormatError, match="at most 1000 bytes for each stored byte"):
            _count(f"zip://{name}::{tmp_path}/a.zip")


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt"])
def test_bytes_of_a_member_of_a_zip_file_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The name in the header of a gzip file may have any length."""
    monkeypatch.setattr(allowance, "FREE_BYTES", 100_000)
    monkeypatch.setattr(allowance, "MAX_EXPANSION", 100)
    packed = bytearray(gzip.compress(b"a\n"))
    packed[3] = 8  # a name follows
    long = packed[:10] + b"n" * 200_000 + b"\0" + packed[10:] if name.endswith("gz") else b"a" * 200_000
    path = tmp_path / name
    path.write_bytes(long)
    assert _count(path) == 1
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.write(path, name)
    with pytest.raises(FormatError, match="at most 100 bytes"):
        _count(f"zip://{name}::{tmp_path}/a.zip")


def test_the_values_of_compressed_lines_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes alone would permit hours of empty objects, each of which takes a microsecond."""
    monkeypatch.setattr(allowance, "FREE_BYTES", 2 << 20)
    line = b'{"text": "a", "other": [' + b",".join([b"{}"] * 20_000) + b"]}\n"
    (tmp_path / "a.jsonl").write_bytes(line * 10)
    assert _count(tmp_path / "a.jsonl") == 10
    for times in (2, 10):
        (tmp_path / "a.jsonl.gz").write_bytes(_lines(line, times))
        if times == 2:
            assert _count(tmp_path / "a.jsonl.gz") == times
            continue
        with pytest.raises(FormatError, match="at most 1000 bytes for each stored byte"):
            _count(tmp_path / "a.jsonl.gz")


def test_row_groups_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a third of a millisecond, and a zip file of some KiB may have very many."""
    monkeypatch.setattr(allowance, "FREE_BYTES", 1 << 20)
    monkeypatch.setattr(allowance, "MAX_EXPANSION", 0)
    path, table = tmp_path / "a.parquet", pa.table({"text": ["a"] * 110})
    for rows in (11, 1):
        pq.write_table(table, path, row_group_size=rows)
        if rows > 1:
            assert _count(path) == 110
            continue
        with pytest.raises(FormatError, match="at most 0 bytes for each stored byte"):
            _count(path)
