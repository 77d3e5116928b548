"""Input files of a few KiB that expand to much more."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import time
import tracemalloc
import zipfile
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pytest
import zstandard

from hsx_dist import text
from hsx_dist.config import InputConfig
from hsx_dist.errors import ConfigError, FormatError, InputError
from hsx_dist.format.manifest import RowFate
from hsx_dist.inputs import allowance, decompress, refused, row_values
from hsx_dist.inputs.content import as_messages, as_tools
from hsx_dist.inputs.decompress import DECOMPRESSORS, DecompressedFile
from hsx_dist.inputs.row_cost import cost_of_columns, cost_of_json, most_cost
from hsx_dist.inputs.rows import Row, read_rows, rows_from
from tests.harness.traced_memory import trace_memory

pytestmark = pytest.mark.usefixtures("in_process")
_PACK = {".gz": gzip.compress, ".zst": zstandard.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


def _rows(path: Path, most: int = 20, **settings: Any) -> tuple[list[Row | RowFate], int]:
    """The first rows, and the peak of allocated bytes."""
    trace_memory()
    found = list(islice(read_rows(InputConfig(path=str(path), **settings)), most))
    return found, tracemalloc.get_traced_memory()[1]


@pytest.mark.traced
@pytest.mark.parametrize("ending", _PACK)
def test_a_compressed_line_is_not_expanded_beyond_the_limit(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"in.jsonl{ending}"
    path.write_bytes(_PACK[ending](b'{"text": "' + b"x" * (40 << 20) + b'"}\n{"text": "b"}\n'))
    assert path.stat().st_size < 82_000
    (first, second), held = _rows(path, max_row_bytes="1MiB")
    assert isinstance(first, RowFate)
    assert "input.max_row_bytes" in first.reason
    assert isinstance(second, Row)
    assert held < 16 << 20


@pytest.mark.parametrize(("more", "end"), [(0, b""), (0, b"\n"), (0, b"\r\n"), (1, b""), (1, b"\n"), (1, b"\r\n")])
def test_the_end_of_a_line_does_not_count_for_its_limit(tmp_path: Path, more: int, end: bytes) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(b"x" * (1024 + more) + end)
    (row,) = read_rows(InputConfig(path=str(path), max_row_bytes="1KiB"))
    assert isinstance(row, RowFate if more else Row)


@pytest.mark.traced
@pytest.mark.parametrize("ending", _PACK)
def test_a_line_without_end_ends_the_input(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"in.jsonl{ending}"
    path.write_bytes(_PACK[ending](b"x" * (10 << 20)))
    with pytest.raises(FormatError, match=r"raise input\.max_row_bytes"):
        _rows(path, max_row_bytes="100KiB")


@pytest.mark.traced
@pytest.mark.parametrize("ending", _PACK)
def test_very_many_empty_lines_end_the_input(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"in.jsonl{ending}"
    path.write_bytes(_PACK[ending](b"\n" * 200_000 + b'{"text": "a"}'))
    with pytest.raises(FormatError, match="empty lines in a row"):
        _rows(path)


@pytest.mark.traced
def test_a_row_of_many_small_values_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "a", "x": [' + b"[]," * 900_000 + b"[]]}\n")
    (fate,), held = _rows(path, max_row_bytes="4MiB")
    assert isinstance(fate, RowFate)
    assert "input.max_row_bytes" in fate.reason
    assert held < 24 << 20


@pytest.mark.traced
def test_a_row_of_many_members_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    """Each takes 200 bytes, also when its text has ten."""
    path = tmp_path / "in.jsonl"
    members = ",".join(f'"{i:06}":1' for i in range(360_000))
    path.write_text(f'{{"text": "a", "x": {{{members}}}}}\n')
    (fate,), held = _rows(path, max_row_bytes="4MiB")
    assert isinstance(fate, RowFate)
    assert "input.max_row_bytes" in fate.reason
    assert held < 24 << 20


@pytest.mark.parametrize("kind", [bytes, str])
def test_long_chats_with_tools_fit_a_row(kind: type) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": json.dumps({"a": "b: c"})}}
    chat = [
        {
            "role": "user",
            "content": "At 12:30:00 see https://example.com: it says {a: 1}; then answer my question. " * 4,
        },
        {"role": "assistant", "content": "I look it up now: one moment please.", "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "content": json.dumps({"found": "12:31:00", "text": "some words " * 50}),
        },
    ]
    row = json.dumps({"messages": chat * 14_000})
    assert 15 << 20 < len(row) < 16 << 20
    assert cost_of_json(row if kind is str else row.encode()) < most_cost(16 << 20)
    text = json.dumps({"text": "12:30:00 " * (1_700_000)})
    assert cost_of_json(text if kind is str else text.encode()) < most_cost(16 << 20)


def test_two_million_tokens_fit_a_row() -> None:
    assert cost_of_json(b'{"token_ids": [' + b"123456," * 2_000_000 + b"1]}") < most_cost(16 << 20)
    assert cost_of_json(b'{"text": "' + b"a, b. " * (2 << 20) + b'"}') < most_cost(16 << 20)


@pytest.mark.traced
def test_an_xz_file_does_not_allocate_the_dictionary_that_it_claims(tmp_path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 28, "mode": lzma.MODE_FAST, "mf": lzma.MF_HC3}]
    packed = bytearray(lzma.compress(b'{"text": "a"}\n', filters=filters))
    path = tmp_path / "in.jsonl.xz"
    path.write_bytes(bytes(packed))
    with pytest.raises(FormatError, match="broken compressed data"):
        _rows(path)


@pytest.mark.parametrize("frame", [zstandard.compress(b""), b"\x50\x2a\x4d\x18" + bytes(4)])
def test_many_frames_without_bytes_take_linear_time(frame: bytes) -> None:
    """The bytes of a read that follow a frame are copied for each frame. A read of 128 KiB took 2 s per MiB."""
    given, make = [], DECOMPRESSORS[".zst"]

    class Counted:
        def __init__(self) -> None:
            self._frame = make()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._frame, name)

        def decompress(self, data: bytes, most: int) -> bytes:
            given.append(len(data))
            return self._frame.decompress(data, most)

    file = DecompressedFile(io.BytesIO(frame * 40_000 + zstandard.compress(b"a")), Counted)  # type: ignore[arg-type]
    assert file.read() == b"a"
    assert len(given) > 40_000
    assert sum(given) < len(given) * 10_000


@pytest.mark.parametrize(("mebibytes", "fits"), [(64, True), (128, True), (192, False)])
def test_an_lzma_file_may_have_a_dictionary_of_the_limit(mebibytes: int, fits: bool) -> None:
    packed = bytearray(lzma.compress(b"a\n", format=lzma.FORMAT_ALONE))
    packed[1:5] = (mebibytes << 20).to_bytes(4, "little")
    file = DecompressedFile(io.BytesIO(packed), DECOMPRESSORS[".lzma"])
    if fits:
        assert file.read() == b"a\n"
    else:
        with pytest.raises(lzma.LZMAError):
            file.read()


@pytest.mark.parametrize("ending", [".zst", ".xz"])
def test_all_frames_are_read_in_pieces_of_any_size(ending: str) -> None:
    data = [b"a" * 100_000, b"", b"xyz" * 1000]
    packed = b"".join(_PACK[ending](d) for d in data)
    for size in (7, 1 << 16):
        file = DecompressedFile(io.BytesIO(packed), DECOMPRESSORS[ending])
        reader = io.BufferedReader(file, 1 << 10)
        assert b"".join(iter(lambda n=size, r=reader: r.read(n), b"")) == b"".join(data)
    with pytest.raises(EOFError):
        DecompressedFile(io.BytesIO(packed[:-3]), DECOMPRESSORS[ending]).read()


@pytest.mark.traced
@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_texts_that_rows_share_are_not_copied_to_all_of_them_at_once(tmp_path: Path, ending: str) -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 256, pa.int32()), pa.array(["x" * (2 << 20)]))
    path = tmp_path / f"in{ending}"
    if ending == ".parquet":
        pq.write_table(pa.table({"text": column}), path, compression="zstd", dictionary_pagesize_limit=1 << 30)
    else:
        options, schema = pa.ipc.IpcWriteOptions(compression="zstd"), pa.schema([("text", column.type)])
        with (
            pa.OSFile(str(path), "wb") as f,
            pa.ipc.new_file(f, schema, options=options) as w,
        ):
            w.write_batch(pa.record_batch([column], ["text"]))
    assert path.stat().st_size < 3000
    before = pa.total_allocated_bytes()
    trace_memory()
    taken = 0
    for row in read_rows(InputConfig(path=str(path), max_row_bytes="2MiB")):
        assert isinstance(row, Row)
        taken += 1
        assert pa.total_allocated_bytes() - before < 64 << 20
    assert tracemalloc.get_traced_memory()[1] < 96 << 20
    assert taken == 256


@pytest.mark.traced
def test_a_long_list_of_null_values_is_not_allocated(tmp_path: Path) -> None:
    n = 1 << 24
    column = pa.ListArray.from_arrays(pa.array([0, n], pa.int32()), pa.nulls(n))
    path = tmp_path / "in.arrow"
    with pa.OSFile(str(path), "wb") as f, pa.ipc.new_file(f, pa.schema([("token_ids", column.type)])) as w:
        w.write_batch(pa.record_batch([column], ["token_ids"]))
    assert path.stat().st_size < 3000
    (fate,), held = _rows(path)
    assert isinstance(fate, RowFate)
    assert "input.max_row_bytes" in fate.reason
    assert held < 8 << 20


def _with_overlaps(kind: str, n: int) -> Any:
    """A column of eight rows. Each row has the same ``n`` nulls, which are stored in no bytes."""
    nulls = pa.Array.from_buffers(pa.null(), n, [None])
    at, sizes = pa.array([0] * 8, pa.int64()), pa.array([n] * 8, pa.int64())
    if kind == "large list view":
        return pa.LargeListViewArray.from_arrays(at, sizes, nulls)
    if kind == "list view":
        return pa.ListViewArray.from_arrays(at.cast(pa.int32()), sizes.cast(pa.int32()), nulls)
    lists = pa.LargeListArray.from_arrays(pa.array([0, n], pa.int64()), nulls)
    if kind == "runs":
        return pa.RunEndEncodedArray.from_arrays(pa.array([8], pa.int32()), lists)
    if kind == "dictionary":
        return pa.DictionaryArray.from_arrays(pa.array([0] * 8, pa.int8()), lists)
    if kind == "dense union":
        return pa.UnionArray.from_dense(at.cast(pa.int8()), at.cast(pa.int32()), [lists])
    return pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [lists])


@pytest.mark.traced
@pytest.mark.parametrize("kind", ["list view", "large list view", "runs", "dictionary", "dense union", "sparse union"])
@pytest.mark.parametrize("place", ["column", "list", "structure", "map"])
def test_types_whose_values_overlap_are_refused(tmp_path: Path, kind: str, place: str) -> None:
    """A sum of the lengths of such values may overflow."""
    column = _with_overlaps(kind, 1 << (61 if kind in ("large list view", "runs", "dictionary") else 24))
    shown = str(column.type)[:10]
    if place == "structure":
        column = pa.StructArray.from_arrays([column], ["a"])
    elif place != "column":
        offsets, keys = pa.array([0, len(column)], pa.int32()), pa.array([str(i) for i in range(len(column))])
        column = (
            pa.ListArray.from_arrays(offsets, column)
            if place == "list"
            else pa.MapArray.from_arrays(offsets, keys, column)
        )
    path = tmp_path / "in.arrow"
    options = pa.ipc.IpcWriteOptions(allow_64bit=True)
    with (
        pa.OSFile(str(path), "wb") as f,
        pa.ipc.new_file(f, pa.schema([("messages", column.type)]), options=options) as w,
    ):
        w.write_batch(pa.record_batch([column], ["messages"]))
    with pytest.raises(FormatError, match=f"column messages: expected text, .*got the type {shown}.* Cast the column"):
        _rows(path)


@pytest.mark.parametrize(
    ("name", "cost"), [("a" * 16, 0), ("a" * 1016, 2000), ("é" * 1016, 12_000), ("\n" * 1016, 12_000)]
)
def test_the_names_of_structures_are_counted_for_each_value(name: str, cost: int) -> None:
    """They are stored once, and are in each JSON text of a structure."""
    short, long = (
        cost_of_columns(
            pa.record_batch([pa.array([[{n: 1}] * 5], pa.list_(pa.struct([(n, pa.int8())])))], ["a"]), 1 << 40
        )
        for n in ("a", name)
    )
    assert long - short == 5 * cost
    assert len(json.dumps({name: 1})) - 32 <= cost
    rows = pa.array([[{name: 1}] * 200_000], pa.list_(pa.struct([(name, pa.int8())])))
    assert cost == 0 or cost_of_columns(pa.record_batch([rows], ["a"]), 1 << 20) > 1 << 20


@pytest.mark.parametrize("kind", ["view", "dictionary"])
def test_each_row_of_a_batch_is_counted_with_its_own_bytes(kind: str) -> None:
    """A short row is not counted with the size of its batch's longest row."""
    texts = pa.array(["a", "b" * 1_000_000, "c"])
    columns = {
        "view": pa.array(texts.to_pylist(), pa.string_view()),
        "dictionary": pa.DictionaryArray.from_arrays(pa.array(range(3), pa.int32()), texts),
    }
    batch = pa.record_batch([columns[kind]], ["a"])
    short, long, last = (cost_of_columns(batch.slice(i, 1), 1 << 40) for i in range(3))
    assert short == last < 1000
    assert 12_000_000 < long < 12_001_000


@pytest.mark.traced
def test_a_table_with_the_documented_bytes_in_a_row_is_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a" * (2 << 20), "a" * (3 << 20)]}), tmp_path / "in.parquet")
    (first, second), _ = _rows(tmp_path / "in.parquet", max_row_bytes="2MiB")
    assert isinstance(first, Row)
    assert isinstance(second, RowFate)
    assert "input.max_row_bytes" in second.reason


@pytest.mark.traced
@pytest.mark.parametrize("column", ["messages", "tools"])
@pytest.mark.parametrize("unit", ["[]", '{"a":0}'])
def test_a_json_text_of_many_values_refuses_its_row_before_it_is_parsed(tmp_path: Path, column: str, unit: str) -> None:
    chat = json.dumps([{"role": "user", "content": "hi"}])
    text = "[" + ",".join([unit] * ((2 << 20) // (len(unit) + 1))) + "]"
    rows = [{"messages": chat, "tools": "[]", column: text}, {"messages": chat, "tools": "[]"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet", compression="zstd")
    (first, second), held = _rows(tmp_path / "in.parquet", max_row_bytes="2MiB")
    assert isinstance(first, RowFate)
    assert f"{column}: expected a JSON text of at most" in first.reason
    assert isinstance(second, Row)
    assert held < 24 << 20
    record = {"messages": json.loads(chat), column: " " * (3 << 20) + chat}
    (longer,) = rows_from([record], InputConfig(max_row_bytes="2MiB"))
    assert isinstance(longer, RowFate)


@pytest.mark.traced
def test_an_arrow_file_with_wrong_offsets_is_refused(tmp_path: Path) -> None:
    text = pa.array(["hello", "world"])
    path = tmp_path / "in.arrow"
    with pa.OSFile(str(path), "wb") as f, pa.ipc.new_file(f, pa.schema([("text", text.type)])) as w:
        w.write_batch(pa.record_batch([text], ["text"]))
    data = path.read_bytes()
    offsets = b"".join(i.to_bytes(4, "little") for i in (0, 5, 10))
    assert data.count(offsets) == 1
    lies = b"".join(i.to_bytes(4, "little") for i in (0, 5, 1 << 30))
    path.write_bytes(data.replace(offsets, lies))
    with pytest.raises(FormatError, match="to be a whole arrow file"):
        _rows(path)


def test_a_saved_data_sets_list_is_not_read_whole(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_bytes(b"[" * (5 << 20))
    with pytest.raises(ConfigError, match="more than"):
        read_rows(InputConfig(path=str(tmp_path)))
    (tmp_path / "state.json").write_bytes(b"[" * 100_000)
    with pytest.raises(ConfigError, match=r"state\.json"):
        read_rows(InputConfig(path=str(tmp_path)))


def test_rows_without_bytes_are_refused(tmp_path: Path) -> None:
    """A column of Arrow's null type has no bytes, and claims any number of rows."""
    nothing = pa.Array.from_buffers(pa.null(), 2**31 - 1, [None])
    path = tmp_path / "a.arrow"
    batch = pa.RecordBatch.from_arrays([nothing], ["text"])
    with pa.ipc.new_file(path, batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(FormatError, match="expected bytes for each of 2147483647 rows"):
        list(read_rows(InputConfig(path=str(path))))


@pytest.mark.parametrize("ending", ["arrow", "parquet"])
def test_rows_that_are_stored_once_and_named_often_are_an_error(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row costs the driver the same, even if it takes few bytes in the file."""
    monkeypatch.setattr(allowance, "FREE_ROWS", 1000)

    def write(path: Path, texts: list[str]) -> None:
        table = pa.table({"text": pa.array(texts).dictionary_encode()})
        if ending == "parquet":
            pq.write_table(table, path, compression="zstd")
            return
        with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(table)

    path = tmp_path / f"a.{ending}"
    write(path, ["a"] * 100_000)
    with pytest.raises(FormatError, match="at most 2 rows for each stored byte"):
        for _ in read_rows(InputConfig(path=str(path))):
            pass
    write(path, [f"line {i * 7919 % 5003}" for i in range(5000)])
    assert len(list(read_rows(InputConfig(path=str(path))))) == 5000


@pytest.mark.parametrize("ending", ["xz", "zst", "bz2"])
def test_an_expansion_without_end_is_an_error(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowance, "FREE_BYTES", 1 << 20)
    pack = {"xz": lzma.compress, "zst": zstandard.ZstdCompressor().compress, "bz2": bz2.compress}[ending]
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(pack(b'{"text":"%s"}\n' % (b"a" * 1000) * 10_000))
    with pytest.raises(FormatError, match="for each stored byte"):
        for _ in read_rows(InputConfig(path=str(path))):
            pass


@pytest.mark.parametrize("ending", ["lzma", "bz2"])
def test_every_frame_of_a_compressed_file_is_read(tmp_path: Path, ending: str) -> None:
    lines = [b'{"text":"%d"}\n' % i for i in range(4)]
    data = lzma.compress(b"".join(lines), lzma.FORMAT_ALONE) if ending == "lzma" else b"".join(map(bz2.compress, lines))
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(data)
    assert [row.text for row in read_rows(InputConfig(path=str(path))) if isinstance(row, Row)] == ["0", "1", "2", "3"]
    path.write_bytes(data[:-3])
    with pytest.raises(FormatError, match="broken compressed data"):
        list(read_rows(InputConfig(path=str(path))))


def test_null_bytes_between_xz_streams_are_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The format calls them stream padding. Tools that write whole blocks add them."""
    monkeypatch.setattr(decompress, "_READ", 7)
    first, second = (lzma.compress(b'{"text":"%d"}\n' % i) for i in range(2))
    path = tmp_path / "a.jsonl.xz"
    path.write_bytes(first + bytes(32) + second + bytes(4))
    assert [row.text for row in read_rows(InputConfig(path=str(path))) if isinstance(row, Row)] == ["0", "1"]
    for damaged in (first + bytes(4) + second[:-3], bytes(4) + first, first + bytes(4) + b"x"):
        path.write_bytes(damaged)
        with pytest.raises(FormatError, match="broken compressed data"):
            list(read_rows(InputConfig(path=str(path))))


@pytest.mark.parametrize("ending", ["xz", "zst", "bz2"])
def test_short_lines_without_end_are_an_error(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowance, "FREE_ROWS", 1000)
    pack = {"xz": lzma.compress, "zst": zstandard.ZstdCompressor().compress, "bz2": bz2.compress}[ending]
    path = tmp_path / f"a.txt.{ending}"
    path.write_bytes(pack(b"x\n" * 1_000_000))
    with pytest.raises(FormatError, match="for each stored byte"):
        for _ in read_rows(InputConfig(path=str(path))):
            pass
    path.write_bytes(pack("".join(f"line {i * 7919 % 5003}\n" for i in range(5000)).encode()))
    assert len(list(read_rows(InputConfig(path=str(path))))) == 5000


def _archived(folder: Path, kind: str, data: bytes) -> str:
    """The URL of ``data`` in a file of this kind."""
    name = "a.jsonl.gz" if "gz" in kind else "a.jsonl"
    data = gzip.compress(data) if "gz" in kind else data
    if "zip" not in kind:
        (folder / name).write_bytes(data)
        return str(folder / name)
    with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(name, data)
    return f"zip://{name}::{folder}/a.zip"


@pytest.mark.parametrize("kind", ["gz", "zip", "gz in zip"])
def test_lines_and_bytes_of_deflated_files_have_the_same_limits(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allowance, "FREE_ROWS", 1000)
    config = InputConfig(path=_archived(tmp_path, kind, b"7\n" * 1_000_000))
    with pytest.raises(FormatError, match=r"rows for each stored byte"):
        for _ in read_rows(config):
            pass
    monkeypatch.setattr(allowance, "FREE_BYTES", 1 << 20)
    monkeypatch.setattr(allowance, "MAX_EXPANSION", 100)
    config = InputConfig(path=_archived(tmp_path, kind, b"x" * (4 << 20)), max_row_bytes="1MiB")
    with pytest.raises(FormatError, match="bytes for each stored byte"):
        list(read_rows(config))
    rows_of_text = "".join(f'{{"text": "{i * 7919 % 5003}"}}\n' for i in range(5000)).encode()
    assert len(list(read_rows(InputConfig(path=_archived(tmp_path, kind, rows_of_text))))) == 5000


def test_a_zip_file_that_claims_a_large_member_gets_no_higher_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allowance, "FREE_ROWS", 1000)
    config = InputConfig(path=_archived(tmp_path, "zip", b"7\n" * 1_000_000))
    data = (tmp_path / "a.zip").read_bytes()
    at = data.index(b"PK\x01\x02") + 20  # the compressed size in the directory
    (tmp_path / "a.zip").write_bytes(data[:at] + (1 << 31).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(FormatError, match=r"rows for each stored byte"):
        for _ in read_rows(config):
            pass


@pytest.mark.parametrize(
    "unit", [b"x\n", b"{}\n", b"7\n", b'{"text":"a","id":1}\n', b'{"text":""}\n'], ids=lambda unit: unit.decode()
)
def test_refused_rows_without_end_end_the_input(tmp_path: Path, unit: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is an entry in the driver's ledger, and costs the file's author nothing."""
    monkeypatch.setattr(refused, "FREE_ROWS", 100)
    path = tmp_path / "a.jsonl"
    path.write_bytes(unit * 1000)
    found: list[Row | RowFate] = []
    with pytest.raises(FormatError, match="expected rows that can be used") as error:
        found.extend(read_rows(InputConfig(path=str(path))))
    assert "The last: " in str(error.value)
    path.write_bytes((unit * 10 + b'{"text":"fine"}\n') * 50)
    assert len(list(read_rows(InputConfig(path=str(path))))) == 550


def test_refused_rows_with_long_keys_end_the_input_earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key begins with the file's path, which a zip file of 16 KB gives to each row."""
    monkeypatch.setattr(refused, "FREE_ROWS", 100)
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{'a' * 200}/" * 15 + "a.jsonl", b"{}\n" * 99)
    found: list[Row | RowFate] = []
    with pytest.raises(FormatError, match=r"got \d\d refused rows \(\d+ bytes"):
        found.extend(read_rows(InputConfig(path=f"zip://**/*.jsonl::{path}")))
    path = tmp_path / "a.jsonl"
    for letter, accepted in (("a", True), ("😀", False)):  # four bytes of memory for each character
        path.write_text("".join(f'{{"id": "{letter}{"a" * 60}{i}"}}\n' for i in range(99)))
        if accepted:
            assert len(list(read_rows(InputConfig(path=str(path))))) == 99
            continue
        with pytest.raises(FormatError, match=r"got \d\d refused rows \(\d+ bytes"):
            list(read_rows(InputConfig(path=str(path))))
    path.write_bytes(b"{}\n" * 99)
    assert len(list(read_rows(InputConfig(path=str(path))))) == 99


@pytest.mark.parametrize("kind", ["dictionary", "list of a dictionary"])
def test_values_that_no_row_has_cost_no_time(kind: str) -> None:
    """A few KiB of a compressed file hold a dictionary of many empty texts."""
    n = 50_000_000
    texts = pa.StringArray.from_buffers(n, pa.py_buffer(np.zeros(n + 1, np.int32)), pa.py_buffer(b""))
    places = pa.array([0, n - 1] * 128, pa.int32())
    column = pa.DictionaryArray.from_arrays(places, texts)
    if kind == "list of a dictionary":
        column = pa.ListArray.from_arrays(pa.array(range(257), pa.int32()), column)
    batch = pa.record_batch([column], ["text"])
    begin = time.process_time()
    for _ in range(50):
        assert cost_of_columns(batch, 1 << 20) < 1 << 20
    assert time.process_time() - begin < 1


@pytest.mark.parametrize("ending", ["arrow", "parquet"])
def test_texts_that_are_stored_once_and_named_often_are_an_error(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allowance, "FREE_BYTES", 1 << 20)
    table = pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * 10_000), pa.array(["x" * 10_000]))})
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        pq.write_table(table, path, compression="zstd")
    else:
        with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(table)
    with pytest.raises(FormatError, match="at most 1000 bytes for each stored byte"):
        for _ in read_rows(InputConfig(path=str(path))):
            pass


@pytest.mark.traced
def test_nulls_are_removed_from_messages_and_tools_without_another_copy() -> None:
    more = [{"a": i, "none": None, "b": [{"none": None}]} for i in range(5000)]
    for read in (partial(as_messages, most=1 << 24), as_tools):
        given = [{"role": "user", "content": None, "more": more}]
        trace_memory()
        found = read(given, "field")
        kept, peak = tracemalloc.get_traced_memory()
        assert peak < 1.2 * kept
        assert found[0]["more"] == [{"a": i, "b": [{}]} for i in range(5000)]
        assert more[0]["none"] is None, "expected the caller's row unchanged"


@pytest.mark.traced
@pytest.mark.parametrize(
    "fields",
    [
        {"text": "a" * 100_000},
        {"text": "\u4e2d" * 50_000},
        {"text": "\U0001f600" + "a" * 50_000},
        {"token_ids": [*range(1000, 50_000)]},
        {"messages": [{"role": "user", "content": f"{i}" * 50} for i in range(2000)]},
        {"messages": [{"role": "user", "content": "a", "more": {str(i): [i] for i in range(5000)}}]},
        {"text": "a", "metadata": {"m": [{"a": 1000 + i} for i in range(5000)]}},
    ],
)
def test_the_memory_of_a_row_is_that_of_its_objects(fields: dict[str, Any]) -> None:
    line = pickle.dumps(Row("key", 0, **fields))
    trace_memory()
    row = pickle.loads(line)
    pickle.dumps(row)
    taken = tracemalloc.get_traced_memory()[0]
    assert taken < 1.3 * row.memory < 2.8 * taken


def test_a_row_of_a_table_that_takes_too_much_counts_with_all_that_it_may_take(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """One large value of a dictionary may be the value of very many rows."""
    monkeypatch.setattr(allowance, "FREE_BYTES", 4 << 20)
    large = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int8()), pa.array(["x" * (1 << 20)]))
    with pa.OSFile(str(tmp_path / "in.arrow"), "wb") as file:
        table = pa.table({"text": large})
        with pa.ipc.new_file(file, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(table)
    with pytest.raises(FormatError, match="at most 1000 bytes for each stored byte"):
        list(read_rows(InputConfig(path=str(tmp_path / "in.arrow"), max_row_bytes=1 << 16)))


_COSTLY = "key//'key':'key':=https://%252525253D %2540%27" * 40


@pytest.mark.parametrize(
    "record",
    [
        {"token_ids": [_COSTLY]},
        {"text": [_COSTLY]},
        {"id": _COSTLY[:1000], "text": "x"},
        {"text": "x", "loss_mask": [_COSTLY]},
        {"messages": [{"role": _COSTLY, "content": {_COSTLY: 1}}]},
        {
            "messages": [
                {"role": "user", "content": "x", "tool_calls": [{"function": {"name": _COSTLY, "arguments": 1}}]}
            ]
        },
    ],
)
def test_the_reason_of_a_refused_row_takes_no_long_redaction(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's text may be long and encoded many times. 100 KB of compressed lines may have 500,000 such rows."""
    took: list[str] = []
    real = text.redacted
    for module in (text, row_values):
        monkeypatch.setattr(module, "redacted", lambda shown: took.append(shown) or real(shown))
    *_, fate = rows_from([record] * (2 if "id" in record else 1), InputConfig())
    assert isinstance(fate, RowFate)
    assert took
    assert all(len(shown) < 400 and "%25" not in shown for shown in took)


def test_a_member_that_a_line_has_twice_takes_no_long_redaction() -> None:
    with pytest.raises(InputError, match=f"got a string of {len(_COSTLY)} characters twice"):
        row_values.row_json(f'{{"{_COSTLY}": 1, "{_COSTLY}": 2}}')
