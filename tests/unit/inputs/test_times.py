"""A value of a table that its type forbids ends no input: its row is refused, or has this value."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from hsx_dist.config import InputConfig
from hsx_dist.errors import FormatError
from hsx_dist.format.manifest import RowFate
from hsx_dist.inputs import tables
from hsx_dist.inputs.rows import Row, read_rows
from hsx_dist.inputs.times import rows_of_changed_times, time_checks

pytestmark = pytest.mark.usefixtures("in_process")

DAY = 86_400
PLACES = pa.array([0, 1, 2], pa.int32())
OFFSETS = pa.array([0, 1, 2, 3], pa.int32())
KEYS = pa.array(["k", "k", "k"])


def _numbers(kind: Any, values: list[int], number: str) -> Any:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.array(values, number))])


NESTED: dict[str, Callable[[Any], Any]] = {
    "plain": lambda x: x,
    "list": lambda x: pa.ListArray.from_arrays(OFFSETS, x),
    "large_list": lambda x: pa.LargeListArray.from_arrays(OFFSETS.cast(pa.int64()), x),
    "fixed_size_list": lambda x: pa.FixedSizeListArray.from_arrays(x, 1),
    "struct": lambda x: pa.StructArray.from_arrays([KEYS, x], ["a", "b"]),
    "map": lambda x: pa.MapArray.from_arrays(OFFSETS, KEYS, x),
    "dictionary": lambda x: pa.DictionaryArray.from_arrays(PLACES, x),
    "list of structs": lambda x: pa.ListArray.from_arrays(OFFSETS, pa.StructArray.from_arrays([x], ["a"])),
    "list of dictionaries": lambda x: pa.ListArray.from_arrays(OFFSETS, pa.DictionaryArray.from_arrays(PLACES, x)),
}
PARQUET = ["plain", "list", "large_list", "fixed_size_list", "struct", "map", "dictionary", "list of structs"]
#: Each has one bad value, in the middle.
VALUES = {
    "time of 24:00": _numbers(pa.time64("us"), [0, DAY * 10**6, DAY * 10**6 - 1], "i8"),
    "time with nanoseconds": _numbers(pa.time64("ns"), [0, 1_001, (DAY * 10**6 - 1) * 1000], "i8"),
    "negative time": _numbers(pa.time32("s"), [0, -1, DAY - 1], "i4"),
    "date with a time": _numbers(pa.date64(), [0, 1, DAY * 1000], "i8"),
    "text": pa.Array.from_buffers(pa.string(), 3, [None, OFFSETS.buffers()[1], pa.py_buffer(b"a\xffc")]),
}


def _read(path: Path, column: Any) -> list[Row | RowFate]:
    table = pa.table({"text": ["a", "b", "c"], "extra": column})
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        feather.write_feather(table, path, "uncompressed")
    return list(read_rows(InputConfig(path=str(path), metadata=["extra"])))


@pytest.mark.parametrize(
    ("form", "nested", "value"),
    [
        *(("arrow", nested, value) for nested in NESTED for value in VALUES),
        # Parquet's dates are days
        *(("parquet", nested, value) for nested in PARQUET for value in VALUES if value != "date with a time"),
    ],
)
def test_only_the_row_of_a_bad_value_is_refused(tmp_path: Path, form: str, nested: str, value: str) -> None:
    first, second, third = _read(tmp_path / f"in.{form}", NESTED[nested](VALUES[value]))
    assert isinstance(first, Row)
    assert isinstance(third, Row)
    assert isinstance(second, RowFate)
    expected = "cannot be read (UnicodeDecodeError)" if value == "text" else "expected times from 00:00 to before 24:00"
    assert expected in second.reason


@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize("kind", [pa.decimal32(3), pa.decimal64(3), pa.decimal128(3), pa.decimal256(3)], ids=str)
def test_a_decimal_above_its_precision_is_kept(tmp_path: Path, nested: str, kind: Any) -> None:
    numbers = b"".join(n.to_bytes(kind.byte_width, "little") for n in (1, 12345, 2))
    column = NESTED[nested](pa.Array.from_buffers(kind, 3, [None, pa.py_buffer(numbers)]))
    rows = _read(tmp_path / "in.arrow", column)
    assert ["12345" in str(row.metadata) for row in rows if isinstance(row, Row)] == [False, True, False]


def test_null_times_are_no_bad_values(tmp_path: Path) -> None:
    kind = pa.struct([("a", pa.list_(pa.time64("us")))])
    rows = _read(tmp_path / "in.parquet", pa.array([None, {"a": None}, {"a": [None]}], kind))
    found = [row.metadata["extra"] for row in rows if isinstance(row, Row)]
    assert found == [None, {"a": None}, {"a": [None]}]


@pytest.mark.parametrize("value", VALUES)
def test_wrong_offsets_next_to_a_bad_value_end_the_input(tmp_path: Path, value: str) -> None:
    values = VALUES[value]
    wrong = pa.py_buffer(np.array([0, 9, 2, 3], "i4"))
    column = pa.Array.from_buffers(pa.list_(values.type), 3, [None, wrong], children=[values])
    with pytest.raises(FormatError, match="to be a whole arrow file"):
        _read(tmp_path / "in.arrow", column)


@pytest.mark.parametrize("value", VALUES)
def test_wrong_references_next_to_a_bad_value_end_the_input(tmp_path: Path, value: str) -> None:
    wrong = pa.array([0, 1, 9], pa.int32())
    column = pa.DictionaryArray.from_arrays(wrong, VALUES[value], safe=False)
    with pytest.raises(FormatError, match="to be a whole arrow file"):
        _read(tmp_path / "in.arrow", column)


@pytest.mark.parametrize("nested", NESTED)
def test_the_rows_of_a_slice_are_found(nested: str) -> None:
    """Rows are checked in slices of a file's batches, whose nested arrays have offsets."""
    bad = [3, 4, 11]
    values = _numbers(pa.time32("s"), [DAY if i in bad else 1 for i in range(12)], "i4")
    chunks = [NESTED[nested](values.slice(at, 3)) for at in range(0, 12, 3)]
    batch = pa.record_batch({"a": pa.concat_arrays(chunks)})
    checks = time_checks(batch.schema)
    for start in range(12):
        for stop in range(start, 12):
            part = batch.slice(start, stop - start)
            assert rows_of_changed_times(part, checks) == {i - start for i in bad if start <= i < stop}


def test_a_bad_time_below_a_null_is_no_value() -> None:
    values = _numbers(pa.time32("s"), [DAY, DAY, 1], "i4")
    mask = pa.array([True, False, False])
    below = pa.StructArray.from_arrays([values], ["a"], mask=mask)
    lists = pa.ListArray.from_arrays(OFFSETS, values, mask=mask)
    batch = pa.record_batch({"a": below, "b": lists})
    assert rows_of_changed_times(batch, time_checks(batch.schema)) == {1}


def test_types_without_values_take_no_time() -> None:
    """A file has few bytes for each null of such a type. Each took a millisecond."""
    kind = pa.list_(pa.struct([(f"f{i}", pa.time64("us")) for i in range(4000)]))
    rows = [None] * 255 + [[]]
    batch = pa.record_batch({"a": pa.array(rows, kind)})
    checks = time_checks(batch.schema)
    begin = time.process_time()
    for _ in range(100):
        assert not rows_of_changed_times(batch, checks)
    assert time.process_time() - begin < 1


def test_a_row_that_cannot_be_read_does_not_check_each_row_of_its_batch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(
        tables, "rows_of_changed_times", lambda *given: calls.append(1) or rows_of_changed_times(*given)
    )
    texts = pa.Array.from_buffers(
        pa.string(),
        200,
        [None, pa.py_buffer(np.arange(201, dtype="i4")), pa.py_buffer(b"a" * 99 + b"\xff" + b"a" * 100)],
    )
    times = _numbers(pa.time32("s"), [DAY if i == 7 else 1 for i in range(200)], "i4")
    feather.write_feather(pa.table({"text": texts, "extra": times}), tmp_path / "in.arrow", "uncompressed")
    rows = list(read_rows(InputConfig(path=str(tmp_path / "in.arrow"), metadata=["extra"])))
    assert [i for i, row in enumerate(rows) if isinstance(row, RowFate)] == [7, 99]
    assert len(calls) == 1


def test_the_time_of_pandas_that_is_none_is_null(tmp_path: Path) -> None:
    """pandas reads the least number of nanoseconds as NaT, whose text is no date."""
    times = pa.array([-(1 << 63), 0, 1], pa.int64()).view(pa.timestamp("ns"))
    rows = _read(tmp_path / "in.arrow", times)
    assert [str(row.metadata["extra"])[:10] for row in rows if isinstance(row, Row)] == ["None", *["1970-01-01"] * 2]
