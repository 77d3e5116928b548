"""Tables that decode to more bytes than their rows use, or name the same bytes several times."""

from __future__ import annotations

import io
import pickle
import random
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hsx_dist.config import InputConfig
from hsx_dist.errors import ConfigError, FormatError
from hsx_dist.format.manifest import RowFate
from hsx_dist.inputs import allowance, tables
from hsx_dist.inputs.listing import find_input
from hsx_dist.inputs.records import read_batches
from hsx_dist.inputs.row_cost import cost_of_columns, referenced_bytes
from hsx_dist.inputs.rows import Row, read_rows
from tests.harness.traced_memory import trace_memory

pytestmark = pytest.mark.usefixtures("in_process")
_BLOCK = struct.Struct("<qi4xq")  # of an Arrow file's footer: offset, bytes of metadata, bytes of buffers
_WRITERS = {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}


@pytest.fixture
def mebibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file may decode to 1 MiB, also a small one."""
    monkeypatch.setattr(allowance, "FREE_BYTES", 1 << 20)


def _write(path: Path, batches: list[Any], form: str = "file", **options: Any) -> None:
    with _WRITERS[form](path, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _read(path: Path | str, **settings: Any) -> list[Row | RowFate]:
    return list(read_rows(InputConfig(path=str(path), id=None, **settings)))


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("form", _WRITERS)
@pytest.mark.usefixtures("mebibyte")
def test_bytes_that_no_row_uses_are_counted(tmp_path: Path, form: str, rows: int) -> None:
    path, written = tmp_path / "a.arrow", 77
    batch = pa.record_batch({"text": ["a" * (1 << 16)] * written})
    _write(path, [batch], form, compression="zstd")
    data = path.read_bytes()
    assert data.count(struct.pack("<q", written)) == 2  # the lengths of the batch and of its column
    path.write_bytes(data.replace(struct.pack("<q", written), struct.pack("<q", rows)))
    with pytest.raises(FormatError, match="at most 1000 bytes for each stored byte"):
        _read(path)


def test_a_footer_that_names_a_batch_many_times_is_refused(tmp_path: Path) -> None:
    path, count = tmp_path / "a.arrow", 21
    large = pa.record_batch({"text": ["".join(random.Random(1).choices("abcdefgh", k=100_000))]})
    _write(path, [large] + [pa.record_batch({"text": ["b"]})] * (count - 1))
    assert len(_read(path)) == count
    data = bytearray(path.read_bytes())
    footer = len(data) - 10 - struct.unpack("<i", data[-10:-6])[0]
    at = data.index(struct.pack("<I", count), footer) + 4
    first = data[at : at + _BLOCK.size]
    assert 0 < _BLOCK.unpack(first)[0] < 1000
    data[at : at + count * _BLOCK.size] = first * count
    path.write_bytes(data)
    with pytest.raises(FormatError, match="expected parts in order that do not overlap"):
        _read(path)


def _named(path: Path, times: int) -> None:
    """Let a Parquet file's footer name its row groups ``times`` times."""
    found, one, footer = pq.read_metadata(path), pq.read_metadata(path), io.BytesIO()
    for _ in range(times - 1):
        found.append_row_groups(one)
    found.write_metadata_file(footer)
    data = path.read_bytes()
    old = struct.unpack("<I", data[-8:-4])[0]
    path.write_bytes(data[: -8 - old] + footer.getvalue()[4:])


def test_a_footer_that_names_a_column_chunk_many_times_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["".join(random.Random(1).choices("abcdefgh", k=100_000))]}), path)
    _named(path, 1)
    assert len(_read(path)) == 1
    _named(path, 3)
    with pytest.raises(FormatError, match="they overlap"):
        _read(path)


def _varint(value: int) -> bytes:
    """Return an integer of 0 or more as in a Parquet footer."""
    value *= 2
    most = max(0, (value.bit_length() - 1) // 7)
    return bytes([*(value >> 7 * i & 127 | 128 for i in range(most)), value >> 7 * most])


def test_only_the_sizes_of_requested_columns_make_small_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of one row takes about as long as one of 256. The size of a whole row group has no limit."""
    monkeypatch.setattr(tables, "_DECODED_BYTES", 1 << 16)
    path, schema = tmp_path / "a.parquet", pa.schema({"text": pa.string(), "large": pa.string()})
    with pq.ParquetWriter(path, schema, use_dictionary=False, store_schema=False) as writer:
        for rows, text, large in ((512, "a", "b" * 1000), (16, "a" * (1 << 14), "b")):
            writer.write_table(pa.table({"text": [text] * rows, "large": [large] * rows}))
    group, data = pq.read_metadata(path).row_group(0), path.read_bytes()
    end = len(data) - 8
    footer = data[end - struct.unpack("<I", data[end:-4])[0] : end]
    honest, false = (
        b"\x16" + _varint(size) + b"\x16" + _varint(512) for size in (group.total_byte_size, (1 << 16) * 512)
    )
    assert footer.count(honest) == 1
    for found in (footer, footer.replace(honest, false)):
        path.write_bytes(data[: end - len(footer)] + found + struct.pack("<I", len(found)) + b"PAR1")
        batches = read_batches(find_input(InputConfig(path=str(path))), ["text"], ["text"])
        assert [len(batch.records) for batch in batches if batch.records] == [256, 256, 3, 3, 3, 3, 3, 1]


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.usefixtures("mebibyte")
def test_bytes_of_refused_rows_are_counted(tmp_path: Path, ending: str) -> None:
    path, text = tmp_path / f"a.{ending}", ["a" * (3 << 20)]
    if ending == "parquet":
        pq.write_table(pa.table({"text": text}), path, compression="zstd", use_dictionary=False)
    else:
        _write(path, [pa.record_batch({"text": text})], compression="zstd")
    with pytest.raises(FormatError, match="at most 1000 bytes for each stored byte"):
        _read(path, max_row_bytes="1MiB")


@pytest.mark.usefixtures("mebibyte")
def test_a_table_in_a_zip_file_is_compared_with_its_bytes_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allowance, "MAX_EXPANSION", 100)
    _write(tmp_path / "a.arrow", [pa.record_batch({"text": ["a" * (3 << 20)]})])
    assert len(_read(tmp_path / "a.arrow")) == 1
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.write(tmp_path / "a.arrow", "a.arrow")
    with pytest.raises(FormatError, match="at most 100 bytes for each stored byte"):
        _read(f"zip://a.arrow::{tmp_path}/a.zip")


@pytest.mark.usefixtures("mebibyte")
def test_a_column_whose_name_begins_with_another_name_and_a_dot_is_another_column(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    note = pa.array([{"a": {"b": [1]}, "m": [("k", 2)]}], pa.struct([
        ("a", pa.struct([("b", pa.list_(pa.int8()))])), ("m", pa.map_(pa.string(), pa.int8()))
    ]))  # fmt: skip
    large = pa.array(["a" * (3 << 20)])
    table = {"text.meta": pa.array(["{}"], pa.json_()), "note": note, "text": ["b"], "text.x": large, "note.a": [[3]]}
    pq.write_table(pa.table(table), path, compression="zstd", use_dictionary=False, store_schema=False)
    for names, values in (
        (["note"], {"note": {"a": {"b": [1]}, "m": {"k": 2}}}),
        (["note.a"], {"note.a": [3]}),
        (["note.a", "note"], {"note.a": [3], "note": {"a": {"b": [1]}, "m": {"k": 2}}}),
    ):
        (row,) = _read(path, metadata=names)
        assert isinstance(row, Row)
        assert (row.text, row.metadata) == ("b", values)
    with pytest.raises(FormatError, match=r"column text\.meta: .*JSON"):
        _read(path, metadata=["text.meta"])
    with pytest.raises(FormatError, match="at most 1000 bytes for each stored byte"):
        _read(path, metadata=["text.x"])


def _encoded(places: list[int], texts: list[str]) -> Any:
    return pa.record_batch({"text": pa.DictionaryArray.from_arrays(pa.array(places), pa.array(texts), safe=False)})


@pytest.mark.parametrize("form", _WRITERS)
@pytest.mark.usefixtures("mebibyte")
def test_a_dictionary_of_many_batches_is_counted_once(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allowance, "MAX_EXPANSION", 1)
    texts = [chr(97 + i % 26) * 10_000 for i in range(60)]
    _write(tmp_path / "a.arrow", [_encoded([i], texts) for i in range(10)], form, compression="zstd")
    rows = _read(tmp_path / "a.arrow")
    assert [row.text for row in rows if isinstance(row, Row)] == texts[:10]


@pytest.mark.parametrize("form", _WRITERS)
@pytest.mark.usefixtures("mebibyte")
def test_a_16th_of_a_dictionary_in_a_list_is_counted_for_each_batch(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each check of the list reads the dictionary, which is much cheaper than reading its bytes as rows."""
    monkeypatch.setattr(allowance, "MAX_EXPANSION", 1)
    texts = [chr(97 + i % 26) * 10_000 for i in range(60)]
    for batches, accepted in ((20, True), (40, False)):
        lists = [_in_lists(_encoded([i], texts).column(0)) for i in range(batches)]
        _write(
            tmp_path / "a.arrow",
            [pa.record_batch({"text": ["a"], "lists": one}) for one in lists],
            form,
            compression="zstd",
        )
        if accepted:
            found = [row.metadata["lists"] for row in _read(tmp_path / "a.arrow", metadata=["lists"])]  # type: ignore[union-attr]
            assert found == [[text] for text in texts[:batches]]
            continue
        with pytest.raises(FormatError, match="for each stored byte"):
            _read(tmp_path / "a.arrow", metadata=["lists"])


@pytest.mark.usefixtures("mebibyte")
def test_every_dictionary_that_replaces_another_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowance, "MAX_EXPANSION", 1)
    batches = [_encoded([0], [chr(97 + i) * 10_000] * 60) for i in range(10)]
    _write(tmp_path / "a.arrow", batches, "stream", compression="zstd")
    with pytest.raises(FormatError, match="for each stored byte"):
        _read(tmp_path / "a.arrow")


@pytest.mark.parametrize("column", ["text", "other"])
@pytest.mark.usefixtures("mebibyte")
def test_dictionaries_that_no_row_uses_are_counted(tmp_path: Path, column: str) -> None:
    """A stream may replace a dictionary many times before a record batch, also one of a column that is not needed."""

    def batch(places: list[int], text: str) -> Any:
        values = pa.DictionaryArray.from_arrays(pa.array(places, pa.int8()), pa.array([text]))
        return pa.record_batch({"text": pa.array([text] * len(places), pa.string()), column: values})

    written = io.BytesIO()
    batches = [batch([], "a" * (1 << 19)), batch([0], "b")]
    with pa.ipc.new_stream(written, batches[0].schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        for one in batches:
            writer.write_batch(one)
    messages = list(pa.ipc.MessageReader.open_stream(written.getvalue()))
    assert [m.type for m in messages] == ["schema", *["dictionary", "record batch"] * 2]
    schema, large, _, small, last = (bytes(message.serialize()) for message in messages)
    for times, accepted in ((1, True), (5, False)):
        path = tmp_path / f"{times}.arrow"
        path.write_bytes(b"".join([schema, *[large] * times, small, last, b"\xff\xff\xff\xff\0\0\0\0"]))
        if accepted:
            assert [row.text for row in _read(path) if isinstance(row, Row)] == ["b"]
            continue
        with pytest.raises(FormatError, match="at most 1000 bytes for each stored byte"):
            _read(path)


def _views(kind: Any, n: int, text: bytes) -> Any:
    """Return ``n`` views of one text, as an Arrow array."""
    view = len(text).to_bytes(4, "little") + text[:4] + bytes(8)
    return pa.Array.from_buffers(kind, n, [None, pa.py_buffer(view * n), pa.py_buffer(text)])


def _in_lists(values: Any) -> Any:
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)


@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()], ids=str)
@pytest.mark.parametrize("place", ["column", "list", "structure", "map", "dictionary"])
@pytest.mark.usefixtures("mebibyte")
def test_the_text_of_views_is_counted_for_each_view_before_it_is_checked(
    tmp_path: Path, kind: Any, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 4096
    views = _views(kind, n, b"a" * 65_536)
    column = {
        "column": views,
        "list": _in_lists(views),
        "structure": pa.StructArray.from_arrays([views], ["a"]),
        "map": pa.MapArray.from_arrays(pa.array([0, n], pa.int32()), pa.array(list(map(str, range(n)))), views),
        "dictionary": pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), views),
    }[place]
    _write(tmp_path / "a.arrow", [pa.record_batch({"text": column})])
    monkeypatch.setattr(tables, "_check", None)
    with pytest.raises(FormatError, match="at most 1000 bytes for each stored byte"):
        _read(tmp_path / "a.arrow")


@pytest.mark.usefixtures("mebibyte")
def test_a_16th_of_a_dictionary_in_parquet_is_counted_for_each_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow copies the dictionary for each batch, which takes less time than reading its bytes as rows."""
    monkeypatch.setattr(allowance, "MAX_EXPANSION", 1)
    texts = ["a", *(f"{i:04}" + "a" * 8000 for i in range(100))]
    path = tmp_path / "a.parquet"
    for rows, accepted in ((2048, True), (6400, False)):
        places = pa.array([*range(101), *[0] * (rows - 101)], pa.int32())
        column = pa.DictionaryArray.from_arrays(places, pa.array(texts))
        pq.write_table(pa.table({"text": column}), path, compression="zstd")
        if accepted:
            assert len(_read(path)) == rows
            continue
        with pytest.raises(FormatError, match="for each stored byte"):
            _read(path)


def test_a_dictionary_is_counted_for_each_field_that_refers_to_it() -> None:
    encoded = pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), pa.array(["a"] * 1000))
    fields = pa.StructArray.from_arrays([encoded] * 50, [f"f{i}" for i in range(50)])
    for column in (fields, _in_lists(fields), pa.FixedSizeListArray.from_arrays(fields, 1)):
        assert 50 * 5000 <= 16 * referenced_bytes(column) < 50 * 8000


def test_views_that_are_null_have_no_length() -> None:
    views = pa.array(["a" * 20, None, "b" * 30], pa.string_view())
    lengths = bytes([0xFF, 0xFF, 0xFF, 0x7F])
    buffers = views.buffers()
    stored = buffers[1].to_pybytes()
    buffers[1] = pa.py_buffer(stored[:16] + lengths + stored[20:])
    changed = pa.Array.from_buffers(pa.string_view(), 3, buffers)
    changed.validate(full=True)
    assert referenced_bytes(changed) == referenced_bytes(views)


_TIMES = [pa.date32(), pa.date64(), pa.time32("ms"), pa.time64("us"), pa.time64("ns"), pa.duration("us")]
_TIMESTAMPS = [pa.timestamp(unit, zone) for unit in ("us", "ns") for zone in (None, "UTC", "Europe/Berlin", "+01:00")]
_DECIMALS = [pa.decimal128(38), pa.decimal256(76)]


def _values(n: int, kind: Any) -> Any:
    number = {pa.decimal256(76): 10**75, pa.date64(): 86_400_000}.get(kind, 10_000)
    one = number.to_bytes(kind.bit_width // 8, "little")
    return pa.Array.from_buffers(kind, n, [None, pa.py_buffer(one * n)])


@pytest.mark.traced
@pytest.mark.parametrize("kind", [*_TIMES, *_TIMESTAMPS, *_DECIMALS], ids=str)
def test_values_that_take_more_than_numbers_are_refused_before_they_are_made(tmp_path: Path, kind: Any) -> None:
    many, few = 100_000, 500
    lists = pa.ListArray.from_arrays(pa.array([0, many, many + few], pa.int32()), _values(many + few, kind))
    _write(tmp_path / "a.arrow", [pa.record_batch({"text": ["a", "b"], "more": lists})], compression="zstd")
    trace_memory()
    first, second = _read(tmp_path / "a.arrow", metadata=["more"], max_row_bytes="1MiB")
    held = tracemalloc.get_traced_memory()[1]
    assert isinstance(first, RowFate)
    assert "input.max_row_bytes" in first.reason
    assert isinstance(second, Row)
    assert len(second.metadata["more"]) == few
    assert held < 4 << 20


@pytest.mark.traced
@pytest.mark.parametrize(
    "kind", [pa.int64(), pa.uint64(), pa.float16(), pa.float64(), *_TIMES, *_TIMESTAMPS, *_DECIMALS], ids=str
)
def test_values_of_a_fixed_width_take_no_more_than_their_cost(kind: Any) -> None:
    """A driver holds the values, and what pickle remembers of them."""
    n = 5000
    column = pa.ListArray.from_arrays(pa.array([0, n], pa.int32()), _values(n, kind))
    sent = pickle.dumps(column.to_pylist())
    trace_memory()
    [received] = pickle.loads(sent)
    most = tracemalloc.get_traced_memory()[1]
    assert len(received) == n
    assert most < cost_of_columns(pa.record_batch([column], ["more"]), 1 << 40)


@pytest.mark.parametrize("place", [2, -1, 1 << 40])
def test_a_wrong_place_in_a_dictionary_is_refused_in_every_batch(tmp_path: Path, place: int) -> None:
    for before in (0, 2):
        _write(tmp_path / "a.arrow", [_encoded([0, 1], ["a", "b"])] * before + [_encoded([place], ["a", "b"])])
        with pytest.raises(FormatError, match="to be a whole arrow file"):
            _read(tmp_path / "a.arrow")


_INFO = pa.struct([("lang", pa.dictionary(pa.int32(), pa.string()))])


@pytest.mark.parametrize("form", _WRITERS)
@pytest.mark.parametrize(
    ("kind", "null", "value"),
    [
        (_INFO, None, {"lang": "en"}),
        (pa.list_(_INFO), [None, None], [{"lang": "en"}, None]),
        (pa.large_list(_INFO), [None], [None, {"lang": "en"}]),
        (pa.map_(pa.string(), _INFO), [("a", None)], {"a": {"lang": "en"}}),
        (pa.struct([("a", _INFO)]), {"a": None}, {"a": {"lang": "en"}}),
        (pa.struct([("a", pa.list_(_INFO))]), {"a": [None]}, {"a": [{"lang": "en"}]}),
    ],
    ids=["structure", "list", "large list", "map", "structures", "list in a structure"],
)
def test_a_dictionary_without_values_in_structures_that_are_null_is_read(
    tmp_path: Path, form: str, kind: Any, null: Any, value: Any
) -> None:
    """Arrow writes the index 0 in such a structure."""
    path, schema = tmp_path / "a.arrow", pa.schema([("text", pa.string()), ("more", kind)])
    values = [[null, None], [value]]
    batches = [pa.record_batch([pa.array(["a"] * len(v)), pa.array(v, kind)], schema) for v in values]
    with pytest.raises(pa.ArrowInvalid, match="out of bounds"):
        batches[0].validate(full=True)
    _write(path, batches if form == "stream" else batches[:1], form)
    rows = _read(path, metadata=["more"])
    assert [row.metadata["more"] for row in rows if isinstance(row, Row)][1:] == [None, value][: len(rows) - 1]
    assert all(isinstance(row, Row) for row in rows)


@pytest.mark.parametrize("nulls", [[False, False], [True, False]])
def test_a_wrong_place_in_a_structure_that_is_not_null_is_refused(tmp_path: Path, nulls: list[bool]) -> None:
    places = pa.DictionaryArray.from_arrays(pa.array([0, 0], pa.int32()), pa.array([], pa.string()), safe=False)
    for info in (
        pa.StructArray.from_arrays([places], ["lang"], mask=pa.array(nulls)),
        _in_lists(pa.StructArray.from_arrays([places], ["lang"], mask=pa.array(nulls))),
    ):
        _write(tmp_path / "a.arrow", [pa.record_batch({"text": ["a"] * len(info), "more": info})])
        with pytest.raises(FormatError, match="to be a whole arrow file"):
            _read(tmp_path / "a.arrow", metadata=["more"])


@pytest.mark.parametrize("rows", [100, 300])
def test_nested_dictionaries_of_several_row_groups_are_read(tmp_path: Path, rows: int) -> None:
    role = pa.dictionary(pa.int32(), pa.string())
    kind = pa.list_(pa.struct([("role", role), ("content", pa.string())]))
    messages = [[{"role": "user", "content": f"a{i}"}] for i in range(700)]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"messages": pa.array(messages, kind)}), path, row_group_size=rows)
    found = [row.messages for row in read_rows(InputConfig(path=str(path))) if isinstance(row, Row)]
    assert found == messages


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("a/" * 300 + "x.jsonl", "got 300 folders and 607 characters"),
        (f"{'a' * 199}/" * 21 + "x.jsonl", "got 21 folders and 4207 characters"),
        ("data" + "-of-" * 15_000, "got 0 folders and 60004 characters"),
    ],
)
def test_a_zip_file_with_very_long_names_is_refused(tmp_path: Path, name: str, got: str) -> None:
    """All beginnings of a path are kept: a path of 65 KB would take 1 GiB."""
    path = tmp_path / "rows.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(name, '{"text": "a"}')
    with pytest.raises(ConfigError, match=got):
        list(read_rows(InputConfig(path=f"zip://*-of-*-of-*.jsonl::{path}")))


def test_the_longest_names_of_file_systems_are_read_from_a_zip_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a" * 255 + "/" + "é" * 249 + ".jsonl", '{"text": "a"}')
    assert len(list(read_rows(InputConfig(path=f"zip://**/*.jsonl::{path}")))) == 1
