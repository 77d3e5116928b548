"""Pages of Parquet files that contradict the footer, or their checksums."""

from __future__ import annotations

from pathlib import Path

import pytest

from hsx_dist.config import InputConfig
from hsx_dist.errors import FormatError
from hsx_dist.inputs.rows import Row, read_rows
from tests.harness.parquet_bytes import Chunk, data_page, write_parquet

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
        with pytest.raises(FormatError, match=r"expected 3 rows in row group 0 of .*, got 2"):
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
