"""Tests of files that were joined one after the other (``cat a b > c``): libraries read only one of them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from hsx_dist.config import InputConfig
from hsx_dist.errors import ConfigError, FormatError
from hsx_dist.inputs import joined
from hsx_dist.inputs.joined import refuse_joined_arrow
from hsx_dist.inputs.rows import Row, read_rows

pytestmark = pytest.mark.usefixtures("in_process")

_JOINED = "got several that were joined one after the other"
#: Token ids of a row.
_LENGTH = 64


def _packed(rows: int, seed: int) -> pa.Table:
    """Return packed token ids of one length. The parts of two files with as many rows are at the same positions."""
    ids = np.random.default_rng(seed).integers(0, 49152, rows * _LENGTH, dtype=np.int32)
    values = {"token_ids": ids, "loss_mask": np.ones(len(ids), np.int8), "zz": ids}
    return pa.table(
        {name: pa.array(list(column.reshape(rows, _LENGTH)), pa.list_(pa.int32())) for name, column in values.items()}
    )


def _texts(rows: int, seed: int) -> pa.Table:
    words = pa.array([f"{seed} {i}" for i in range(rows)])
    return pa.table({"text": words, "kind": words.dictionary_encode()})


def _parquet(table: pa.Table, **options: object) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=20, **options)
    return out.getvalue()


def _arrow(table: pa.Table) -> bytes:
    out = io.BytesIO()
    with pa.ipc.new_file(out, table.schema, options=pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)) as writer:
        for start in range(0, len(table), 20):
            writer.write_table(table.slice(start, 20))
    return out.getvalue()


def _feather(table: pa.Table) -> bytes:
    out = io.BytesIO()
    feather.write_feather(table, out, compression="zstd")
    return out.getvalue()


_WRITERS: dict[str, Callable[[pa.Table], bytes]] = {
    "plain.parquet": lambda table: _parquet(table, compression="none", use_dictionary=False),
    "snappy.parquet": _parquet,
    "indexes.parquet": lambda table: _parquet(table, compression="zstd", write_page_index=True),
    "rows.arrow": _arrow,
    "rows.feather": _feather,
}


def _read(path: Path | str) -> int:
    rows = list(read_rows(InputConfig(path=str(path))))
    assert all(isinstance(row, Row) for row in rows)
    return len(rows)


@pytest.mark.parametrize("name", _WRITERS)
@pytest.mark.parametrize("table", [_packed, _texts])
@pytest.mark.parametrize("rows", [[50, 50], [40, 10], [10, 40], [10, 0], [0, 10], [30, 30, 30]])
def test_joined_tables_are_refused(
    tmp_path: Path, table: Callable[[int, int], pa.Table], name: str, rows: list[int]
) -> None:
    path = tmp_path / name
    parts = [_WRITERS[name](table(count, seed)) for seed, count in enumerate(rows)]
    for part, count in zip(parts, rows, strict=True):
        path.write_bytes(part)
        assert _read(path) == count
    path.write_bytes(b"".join(parts))
    with pytest.raises(FormatError, match=_JOINED):
        _read(path)


@pytest.mark.parametrize("name", _WRITERS)
@pytest.mark.parametrize("between", [b"\n", b"\r\n", bytes(3), bytes(12), bytes(512)], ids=len)
def test_tables_that_were_joined_with_bytes_between_them_are_refused(tmp_path: Path, name: str, between: bytes) -> None:
    path = tmp_path / name
    first, second, empty = (_WRITERS[name](_texts(rows, seed)) for seed, rows in enumerate((50, 50, 0)))
    for parts in ([first, second], [first, empty], [empty, second], [first, second, first]):
        path.write_bytes(between.join(parts))
        with pytest.raises(FormatError, match=_JOINED):
            _read(path)


def test_a_text_with_the_magics_is_read(tmp_path: Path) -> None:
    """Otherwise one row of a file with a page index ends the job."""
    path = tmp_path / "in.parquet"
    texts = pa.table({"text": ["PAR1", "PAR1PAR1 ARROW1\0\0", *map(str, range(5000))]})
    options = {"compression": "none", "use_dictionary": False, "data_page_size": 256, "write_page_index": True}
    path.write_bytes(_parquet(texts, **options))
    assert _read(path) == 5002
    path.write_bytes(_parquet(texts, **options) * 2)
    with pytest.raises(FormatError, match=_JOINED):
        _read(path)


@pytest.mark.parametrize("read", [1 << 10, 16 << 20])
def test_texts_like_the_magics_hide_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: int) -> None:
    monkeypatch.setattr(joined, "_READ", read)
    path = tmp_path / "in.parquet"
    parts = [
        _parquet(pa.table({"text": [f"{name} PAR1PAR1 {i:03d}" for i in range(120)]}), compression="none")
        for name in ("a", "b")
    ]
    path.write_bytes(parts[0])
    assert _read(path) == 120
    path.write_bytes(b"".join(parts))
    with pytest.raises(FormatError, match=_JOINED):
        _read(path)


class _Reads(io.BytesIO):
    """Counts the reads, as requests to a server."""

    count = 0

    def read(self, size: int | None = -1) -> bytes:
        self.count += 1
        return super().read(size)


@pytest.mark.parametrize("shift", range(9))
def test_a_file_is_found_where_two_reads_meet(monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    monkeypatch.setattr(joined, "_READ", 64)
    begin = b"PAR1" + b"\x15\2\x19" + bytes(57) + (60).to_bytes(4, "little")
    data = begin + b"PAR1PAR1" + bytes(50 + shift)
    with pytest.raises(FormatError, match=_JOINED):
        joined._refuse_joined(io.BytesIO(data), len(data), b"PAR1", footers=True)


def test_few_footers_are_looked_for_outside_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "_READ", 1 << 14)
    text = (1 << 14).to_bytes(4, "little") + b"PAR1PAR1"  # a length that leads out of the bytes that are searched
    file = _Reads(bytes(1 << 16) + text * 1000)
    with pytest.raises(FormatError, match="very many texts PAR1 there"):
        joined._refuse_joined(file, len(file.getvalue()), b"PAR1", footers=True)
    assert file.count < 110
    file = _Reads(bytes(1 << 16) + b"\0\0\0\1PAR1PAR1" * 1000)
    joined._refuse_joined(file, len(file.getvalue()), b"PAR1", footers=True)
    assert file.count < 10


def test_bytes_that_no_footer_explains_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "_READ", 1 << 10)
    monkeypatch.setattr(joined, "_MOST", 1 << 14)
    joined._refuse_joined(io.BytesIO(bytes(1 << 14)), 1 << 14, b"PAR1", footers=True)
    with pytest.raises(FormatError, match="at most 16384 bytes of page indexes and filters, got more"):
        joined._refuse_joined(io.BytesIO(bytes(1 << 15)), 1 << 15, b"PAR1", footers=True)


def _zipped(name: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, '{"text": "a"}\n')
    return out.getvalue()


def test_joined_zip_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.zip"
    path.write_bytes(_zipped("a.jsonl") + _zipped("b.jsonl"))
    with pytest.raises(ConfigError, match=_JOINED):
        _read(f"zip://*.jsonl::{path}")


def test_a_zip_file_and_the_beginning_of_another_one_are_refused(tmp_path: Path) -> None:
    path, second = tmp_path / "in.zip", _zipped("b.jsonl")
    for cut in (22, 23, len(second) - 4):  # zipfile reads the first one
        path.write_bytes(_zipped("a.jsonl") + second[:-cut])
        with pytest.raises(ConfigError, match=_JOINED):
            _read(f"zip://*.jsonl::{path}")
    path.write_bytes(_zipped("a.jsonl") + b"\n")
    assert _read(f"zip://*.jsonl::{path}") == 1


def test_a_comment_of_a_zip_file_may_look_like_one(tmp_path: Path) -> None:
    path = tmp_path / "in.zip"
    path.write_bytes(_zipped("a.jsonl"))
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"PK\3\4"
    assert _read(f"zip://*.jsonl::{path}") == 1


@pytest.mark.parametrize("program", [b"MZ" + bytes(100_000), b"#!/bin/sh\nexit\n", b"MZ PK\5\6 PK\1\2"])
def test_a_zip_file_behind_a_program_is_read(tmp_path: Path, program: bytes) -> None:
    path = tmp_path / "in.zip"
    path.write_bytes(program + _zipped("a.jsonl"))
    assert _read(f"zip://*.jsonl::{path}") == 1
    path.write_bytes(program + _zipped("a.jsonl") + _zipped("b.jsonl"))
    with pytest.raises(ConfigError, match=_JOINED):
        _read(f"zip://*.jsonl::{path}")


def test_a_zip_file_without_its_first_member_is_read(tmp_path: Path) -> None:
    path = tmp_path / "in.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("a.jsonl", "b.jsonl"):
            archive.writestr(name, '{"text": "a"}\n')
        del archive.filelist[0]  # as tools do that remove a member from the directory alone
    assert _read(f"zip://*.jsonl::{path}") == 1


@pytest.mark.parametrize("zip64", [False, True])
@pytest.mark.parametrize("comment", [0, 65_535])
def test_a_zip_file_with_fewer_entries_than_its_end_states_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comment: int, zip64: bool
) -> None:
    """zipfile takes entries for the comment of the entry before them, if one bit of its length is wrong."""
    path = tmp_path / "in.zip"
    with monkeypatch.context() as patch:
        if zip64:
            patch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 2)
        with zipfile.ZipFile(path, "w") as archive:
            archive.comment = b"c" * comment
            for i in range(5):
                archive.writestr(f"{i}.jsonl", '{"text": "a"}\n')
    data = bytearray(path.read_bytes())
    assert (b"PK\6\6" in data) == zip64
    assert _read(f"zip://*.jsonl::{path}") == 5
    first = data.find(b"PK\1\2")
    data[first + 33] ^= 1
    path.write_bytes(data)
    for pattern in ("", "*.jsonl", "0.jsonl"):
        with pytest.raises(ConfigError, match=r"expected 5 entries in the zip file's directory, .* got [0-4]\."):
            _read(f"zip://{pattern}::{path}")


def test_the_number_of_a_zip_files_entries_may_be_stated_modulo_65536(tmp_path: Path) -> None:
    """Writers without zip64, such as macOS's ditto, write it so."""
    path = tmp_path / "in.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for i in range((1 << 16) + 1):
            archive.writestr(f"{i}.md", "")
        archive.writestr("a.jsonl", '{"text": "a"}\n')
    data = path.read_bytes()
    at = data.rfind(b"PK\5\6")
    assert data[at - 76 : at].startswith(b"PK\6\6")
    end = data[at : at + 8] + 2 * (2).to_bytes(2, "little") + data[at + 12 :]
    path.write_bytes(data[: at - 76] + end)
    assert _read(f"zip://*.jsonl::{path}") == 1


def test_the_offset_of_a_zip_files_directory_may_look_like_its_end(tmp_path: Path) -> None:
    path, directory = tmp_path / "in.zip", _zipped("a.jsonl").find(b"PK\1\2")
    with path.open("wb") as file:
        file.seek(int.from_bytes(b"PK\5\6", "little") - directory)
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("a.jsonl", '{"text": "a"}\n')
    assert path.read_bytes().count(b"PK\5\6") == 2
    assert _read(f"zip://*.jsonl::{path}") == 1


@pytest.mark.parametrize("moved", [False, True], ids=["pyarrow", "polars"])
def test_an_arrow_file_alone_is_not_searched(moved: bool) -> None:
    """The search would fetch a file on a server twice."""
    data = _arrow(_texts(50, 0))
    length = int.from_bytes(data[-10:-6], "little")
    at, footer = len(data) - 10 - length, data[-10 - length :]
    if moved:  # polars writes the list of fields after their table
        table = int.from_bytes(footer[:4], "little")
        fields = table - int.from_bytes(footer[table : table + 4], "little", signed=True)
        offset = (table - len(footer)).to_bytes(4, "little", signed=True)
        footer = footer[:table] + offset + footer[table + 4 :] + footer[fields:table]
    refuse_joined_arrow(file := io.BytesIO(data), at, footer)
    assert file.tell() == 0
    joined = io.BytesIO(data + data)
    with pytest.raises(FormatError, match=_JOINED):
        refuse_joined_arrow(joined, len(data) + at, footer)
