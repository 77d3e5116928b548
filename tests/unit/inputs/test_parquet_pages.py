"""Pages of Parquet files that contradict the footer, or their checksums."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hsx_dist.config import InputConfig
from hsx_dist.errors import FormatError
from hsx_dist.inputs import allowance, arrow_files, parquet_pages, tables
from hsx_dist.inputs.parquet_pages import _Header, stored_values
from hsx_dist.inputs.rows import Row, read_rows
from tests.harness.parquet_bytes import (
    BINARY,
    I32,
    I64,
    LIST,
    STRUCT,
    Chunk,
    data_page,
    dictionary_page,
    list_of,
    struct_of,
    text,
    varint,
    write_parquet,
    zigzag,
)

pytestmark = pytest.mark.usefixtures("in_process")


def _texts(path: Path) -> list[str | None]:
    rows = list(read_rows(InputConfig(path=str(path), id=None)))
    assert all(isinstance(row, Row) for row in rows)
    return [row.text for row in rows if isinstance(row, Row)]


def _chunk(pages: list[bytes], values: int, left_out: int = 0) -> Chunk:
    return Chunk(pages, values, 1 << 20, left_out)


def test_a_column_chunk_without_its_last_page_loses_no_row_unnoticed(tmp_path: Path) -> None:
    """Arrow takes the end of the pages for the end of the rows."""
    path = tmp_path / "a.parquet"
    pages = [data_page(["a", "b"]), data_page(["c"])]
    after = {"text": _chunk([data_page(["d"])], 1)}
    write_parquet(path, [{"text": _chunk(pages, 3)}, after])
    assert _texts(path) == ["a", "b", "c", "d"]
    for groups in ([], [after]):
        write_parquet(path, [{"text": _chunk(pages, 3, left_out=len(pages[1]))}, *groups])
        with pytest.raises(FormatError, match=r"expected row group 0 of .*, got 2 rows of 3"):
            _texts(path)


@pytest.mark.parametrize("first", ["text", "id"])
def test_columns_of_different_lengths_lose_no_row_unnoticed(tmp_path: Path, first: str) -> None:
    path = tmp_path / "a.parquet"
    pages = [data_page(["a", "b"]), data_page(["c"])]
    chunks = {first: _chunk(pages, 3), "other": _chunk(pages, 3, left_out=len(pages[1]))}
    chunks["id" if first == "text" else "text"] = chunks.pop("other")
    write_parquet(path, [chunks])
    with pytest.raises(FormatError):
        list(read_rows(InputConfig(path=str(path))))


@pytest.mark.parametrize("v2", [False, True])
def test_checksums_of_pages_are_checked(tmp_path: Path, v2: bool) -> None:
    path = tmp_path / "a.parquet"
    for crc in (0, 1):
        write_parquet(path, [{"text": _chunk([data_page(["a"], v2=v2, crc=crc)], 1)}])
        if not crc:
            assert _texts(path) == ["a"]
            continue
        with pytest.raises(FormatError, match="CRC"):
            _texts(path)


@pytest.mark.parametrize("codec", ["brotli", "gzip", "zstd", "snappy"])
@pytest.mark.parametrize("kind", ["first", "second", "dictionary"])
def test_pages_that_decode_to_more_than_the_footer_says_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, kind: str
) -> None:
    monkeypatch.setattr(allowance, "FREE_BYTES", 1 << 20)
    monkeypatch.setattr(allowance, "MAX_EXPANSION", 1)
    path = tmp_path / "a.parquet"
    for more in (10, 400_000):
        dictionary = dictionary_page(["a"], codec, more=3 * more) if kind == "dictionary" else b""
        other = 0 if kind == "dictionary" else more
        pages = [data_page(["a"], codec, more=other, v2=kind == "second") for _ in range(3)]
        write_parquet(path, [{"text": Chunk(pages, 3, decoded=9, dictionary=dictionary)}], codec)
        if more == 10:
            assert _texts(path) == ["a"] * 3
            continue
        with pytest.raises(FormatError, match="at most 1 bytes for each stored byte"):
            _texts(path)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_many_small_pages_count_no_more_than_the_footer_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    path, texts = tmp_path / "a.parquet", [f"{i:040}" for i in range(3000)]
    pq.write_table(
        pa.table({"text": texts}), path, use_dictionary=False, data_page_size=1, write_batch_size=10,
        data_page_version=version, compression="none",
    )  # fmt: skip
    monkeypatch.setattr(allowance, "FREE_BYTES", path.stat().st_size)
    monkeypatch.setattr(allowance, "MAX_EXPANSION", 1)
    with monkeypatch.context() as patch:
        patch.setattr(allowance, "PART_BYTES", 0)
        assert _texts(path) == texts
    with pytest.raises(FormatError, match="at most 1 bytes for each stored byte"):
        _texts(path)
    monkeypatch.setattr(allowance, "MAX_EXPANSION", 100)
    assert _texts(path) == texts


@pytest.mark.parametrize("pages", [[["a", "b", "c"]], [["a", "b"], ["c"]], [["a", "b"], [], ["c"]]])
@pytest.mark.parametrize("v2", [False, True])
def test_a_footer_with_fewer_rows_than_its_pages_is_refused(tmp_path: Path, pages: list[list[str]], v2: bool) -> None:
    path = tmp_path / "a.parquet"
    written = [data_page(texts, v2=v2) for texts in pages]
    write_parquet(path, [{"text": _chunk(written, 3)}])
    assert _texts(path) == ["a", "b", "c"]
    write_parquet(path, [{"text": _chunk(written, 2)}])
    with pytest.raises(FormatError, match="pages with 1 values more than the footer says"):
        _texts(path)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_pages_after_the_last_value_may_be_empty(tmp_path: Path, lengths: list[int]) -> None:
    path, empty = tmp_path / "a.parquet", data_page([], lengths=lengths, more=200_000)
    write_parquet(path, [{"text": _chunk([data_page(["a"]), empty], 1)}, {"text": _chunk([empty], 0)}])
    assert _texts(path) == ["a"]


@pytest.mark.parametrize("codec", ["none", "lz4_raw", "zstd"])
@pytest.mark.parametrize("kind", ["first", "second", "not compressed"])
@pytest.mark.parametrize("lengths", [[200], [200, 200]])
def test_pages_with_more_lengths_than_values_are_refused(
    tmp_path: Path, codec: str, kind: str, lengths: list[int]
) -> None:
    """Arrow decodes as many lengths as the page says: 2 ** 31 in 10 bytes."""
    path = tmp_path / "a.parquet"
    for i in range(len(lengths)):
        for more in (0, 1, 1 << 28):
            changed = [*lengths[:i], lengths[i] + more, *lengths[i + 1 :]]
            page = data_page([""] * 200, codec, lengths=changed, v2=kind != "first", compressed=kind[0] != "n")
            write_parquet(path, [{"text": _chunk([page], 200)}], codec)
            if not more:
                assert len(list(read_rows(InputConfig(path=str(path))))) == 200
                continue
            with pytest.raises(FormatError, match=f"a page of 200 values with {200 + more} lengths"):
                _texts(path)


@pytest.mark.parametrize("writer", ["", "parquet-cpp-arrow version 26.0.1", "parquet-mr version 1.14", "parquet-cpp"])
def test_a_page_that_is_not_compressed_is_decompressed_only_for_an_old_writer(tmp_path: Path, writer: str) -> None:
    """Its bytes may be LZ4, too, which has no mark of its beginning. Arrow decompresses such pages of parquet-cpp 1."""
    path = tmp_path / "a.parquet"
    more = b"\0\0\1\0\xd0" + bytes(13)  # with the list before it, LZ4 of as many other bytes
    page = data_page([""] * 3, "lz4_raw", lengths=[3], more=more, v2=True, compressed=False)
    write_parquet(path, [{"text": _chunk([page], 3)}], "lz4_raw", writer=writer)
    if writer != "parquet-cpp":
        assert len(list(read_rows(InputConfig(path=str(path))))) == 3
        return
    with pytest.raises(FormatError, match="in blocks of 1"):
        _texts(path)


@pytest.mark.parametrize("codec", ["lz4", "lz4_raw"])
def test_a_short_page_of_lz4_that_is_not_compressed_is_read(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "a.parquet"
    encoding = {"text": "DELTA_LENGTH_BYTE_ARRAY"}
    pq.write_table(
        pa.table({"text": ["abcd"]}), path, use_dictionary=False, column_encoding=encoding, compression=codec,
        data_page_version="2.0",
    )  # fmt: skip
    assert _texts(path) == ["abcd"]


@pytest.mark.parametrize("codec", ["brotli", "gzip", "lz4_raw", "snappy", "zstd"])
@pytest.mark.parametrize("v2", [False, True])
def test_no_lengths_are_read_of_bytes_that_were_not_written(tmp_path: Path, codec: str, v2: bool) -> None:
    """A codec may write fewer bytes than the header says. The buffer's others are any memory."""
    path = tmp_path / "a.parquet"
    page = data_page([""] * 3, codec, lengths=[3], v2=v2)
    longer = page.replace(b"\5\4" + zigzag(7), b"\5\4" + zigzag(47), 1)
    assert longer != page
    write_parquet(path, [{"text": _chunk([longer], 3)}], codec)
    with pytest.raises(FormatError, match=r"fewer decompressed bytes|Corrupt ZSTD"):
        _texts(path)


@pytest.mark.parametrize("codec", ["none", "brotli", "gzip", "lz4", "zstd", "snappy"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("encoding", ["DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"])
def test_pages_with_lengths_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, version: str, encoding: str
) -> None:
    monkeypatch.setattr(arrow_files, "_BUFFER", 1000)
    path, some = tmp_path / "a.parquet", random.Random(1)
    texts = ["".join(some.choices("abcdefgh", k=some.randint(1, 90))) for _ in range(1000)]
    columns = {
        "text": pa.array(texts),
        "required": pa.array(texts),
        "nulls": pa.array([None if i % 9 else text for i, text in enumerate(texts)], pa.string()),
        "none": pa.nulls(1000, pa.string()),
        "lists": pa.array([texts[i : i + i % 4] if i % 9 else None for i in range(1000)]),
    }
    schema = pa.schema([pa.field(name, array.type, name != "required") for name, array in columns.items()])
    encodings = dict.fromkeys(["text", "required", "nulls", "none", "lists.list.element"], encoding)
    for size in (1500, 1 << 20):
        pq.write_table(
            pa.table(columns, schema),
            path,
            compression=codec,
            use_dictionary=False,
            column_encoding=encodings,
            data_page_version=version,
            data_page_size=size,
            write_batch_size=100,
            row_group_size=700,
        )
        rows = list(read_rows(InputConfig(path=str(path), metadata=[*columns][1:])))
        found = [{"text": row.text, **(row.metadata or {})} for row in rows if isinstance(row, Row)]
        assert found == pa.table(columns).to_pylist()


def test_bytes_after_the_last_page_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    page = data_page(["a"])
    for more in (page[:5], page[:-1], bytes(100)):
        write_parquet(path, [{"text": _chunk([page, more], 1)}])
        with pytest.raises(FormatError, match="to be a whole parquet file"):
            _texts(path)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_headers_that_two_reads_divide_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Arrow's buffer is larger than most headers, so they rarely end in another read."""
    monkeypatch.setattr(arrow_files, "_BUFFER", 1000)
    some = random.Random(1)
    texts = ["".join(some.choices("abcdefgh", k=some.randint(1, 900))) for _ in range(4000)]
    columns = {"id": [f"{i}" for i in range(4000)], "text": texts, "tags": [[{"a": text[:9]}] * 2 for text in texts]}
    held, count = [], parquet_pages._ColumnChunk.count

    def counted(chunk: Any, begin: int, data: bytes) -> int:
        more = count(chunk, begin, data)
        held.append(len(chunk.held))
        return more

    monkeypatch.setattr(parquet_pages._ColumnChunk, "count", counted)
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table(columns), path, data_page_size=700, write_batch_size=3, data_page_version=version, row_group_size=2500
    )
    rows = list(read_rows(InputConfig(path=str(path), metadata=["tags"])))
    assert [row.text for row in rows if isinstance(row, Row)] == texts
    assert any(held)


_STATISTICS = struct_of((1, BINARY, text("max")), (3, I64, zigzag(-5)), (7, 1, b""), (8, 7, bytes(8)))
_LISTS = struct_of((1, LIST, list_of(STRUCT, [struct_of((3, 2, b""))] * 20)), (2, LIST, b"\x21\1\2"))


def _header(*fields: tuple[int, int, bytes], values: int = 7) -> bytes:
    inner = struct_of((1, I32, zigzag(values)), (2, I32, zigzag(0)), (5, STRUCT, _STATISTICS))
    return struct_of((1, I32, zigzag(0)), (2, I32, zigzag(300)), (3, I32, zigzag(70)), (5, STRUCT, inner), *fields)


def test_a_header_is_read_with_fields_that_are_not_known() -> None:
    header = _header((4, I32, zigzag(-1)), (9, STRUCT, _LISTS), (30, 4, zigzag(-3)), (31, 3, b"\xff"))
    found = _Header(header + b"page", 0)
    assert (found.sizes(), found.at) == ((300, 70, 7), len(header))
    for size in range(len(header)):
        with pytest.raises(IndexError):
            _Header(header[:size], 0).sizes()


@pytest.mark.parametrize(
    "header",
    [
        _header((2, I32, zigzag(1))),
        _header((1 << 16 | 2, I32, zigzag(1))),
        _header((0, I32, zigzag(1))),
        _header((9, I32, varint(1 << 32))),
        _header((9, I64, b"\xff" * 11)),
        _header((9, 11, b"\0")),
        _header(values=-1),
        _header((9, LIST, b"\x19" * 100)),
        _header((9, LIST, b"\xf2" + varint(5000) + b"\1" * 5000)),
        _header((9, LIST, b"\xf9" + varint(70) + (b"\xf5" + varint(70) + b"\2" * 70) * 70)),
        _header((9, LIST, b"\xfc" + varint(70) + (b"\x11" * 70 + b"\0") * 70)),
        struct_of(),
        struct_of((1, I32, zigzag(0)), (2, I64, zigzag(300)), (3, I32, zigzag(70))),
        struct_of((1, I32, zigzag(0)), (2, I32, zigzag(300)), (3, I32, zigzag(70))),
        struct_of((1, I32, zigzag(2)), (2, I32, zigzag(300)), (3, I32, zigzag(-70))),
    ],
)
def test_a_header_that_thrift_may_read_otherwise_is_refused(header: bytes) -> None:
    with pytest.raises(ValueError, match="a page's header"):
        _Header(header, 0).sizes()


_ITEM, _PAIRS = pa.struct([("a", pa.list_(pa.int8())), ("b", pa.int8())]), pa.map_(pa.string(), pa.list_(pa.int8()))
NESTED = {
    "list": pa.array([[1, 2], [], None, [3]], pa.list_(pa.int8())),
    "lists": pa.array([[[1, 2], [], None], [], None, [[3]]], pa.large_list(pa.list_(pa.int8()))),
    "map": pa.array([[("a", [1, 2]), ("b", None)], [], None, [("c", [])]], _PAIRS),
    "maps": pa.array([[[("a", [1])], []], None, [], [None]], pa.list_(_PAIRS)),
    "structures": pa.array([[{"a": [1, 2], "b": 1}, None], [], None, [{"a": [], "b": 2}]], pa.list_(_ITEM)),
    "structure": pa.array([{"a": [1, 2]}, None, {"a": None}, {"a": []}], _ITEM),
    "fixed": pa.array([[1, 2], [3, 4], None, [5, 6]], pa.list_(pa.int8(), 2)),
}


@pytest.mark.parametrize("name", NESTED)
def test_values_of_lists_are_counted_as_parquet_does(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({name: NESTED[name]}), path)
    with pq.ParquetFile(path) as file:
        values = file.metadata.row_group(0).column(0).num_values
        for rows in (1, 3, 4):
            assert sum(stored_values(batch.column(0)) for batch in file.iter_batches(rows)) == values


def test_a_footer_with_fewer_rows_of_lists_than_its_pages_is_refused(tmp_path: Path) -> None:
    """Only the lists show how many values a row has."""
    path, rows = tmp_path / "a.parquet", 100
    pq.write_table(pa.table({"messages": [[{"role": "user", "content": f"{i}"}] * 2 for i in range(rows)]}), path)
    data = path.read_bytes()
    end = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer, count = data[end:], b"\x16" + zigzag(rows)
    assert footer.count(count) == 2  # of the file, of the row group
    assert len(_read_chats(path)) == rows
    path.write_bytes(data[:end] + footer.replace(count, b"\x16" + zigzag(rows - 1)))
    with pytest.raises(FormatError, match="got 99 rows of 99 with other values"):
        _read_chats(path)


def _read_chats(path: Path) -> list[Any]:
    return [row.messages for row in read_rows(InputConfig(path=str(path))) if isinstance(row, Row)]


class _Counted:
    """An object of pyarrow. Counts how often the list of all columns is made."""

    lists = 0

    def __init__(self, found: Any) -> None:
        self._found = found

    def __getattr__(self, name: str) -> Any:
        _Counted.lists += name == "column_paths"
        found = getattr(self._found, name)
        return _Counted(found) if name == "reader" else found


def test_the_list_of_all_columns_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise 4,000 requested columns of 24,000 take a minute."""
    path, opened = tmp_path / "a.parquet", tables.open_parquet
    pq.write_table(pa.table({"text": ["a"], **{f"{i}": ["b"] for i in range(9)}}), path)
    monkeypatch.setattr(tables, "open_parquet", lambda file: _Counted(opened(file)))
    monkeypatch.setattr(_Counted, "lists", 0)
    (row,) = read_rows(InputConfig(path=str(path), metadata=[f"{i}" for i in range(9)]))
    assert isinstance(row, Row)
    assert _Counted.lists == 1
