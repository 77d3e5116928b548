"""Maps of tables are objects, also nested ones."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from hsx_dist.config import InputConfig
from hsx_dist.format.manifest import RowFate
from hsx_dist.inputs import maps
from hsx_dist.inputs.row_cost import cost_of_columns
from hsx_dist.inputs.rows import Row, read_rows
from hsx_dist.inputs.tables import _Reading, _records
from tests.harness.traced_memory import trace_memory

pytestmark = pytest.mark.usefixtures("in_process")

TEXTS = pa.map_(pa.string(), pa.string())
FUNCTION = pa.struct([("name", pa.string()), ("arguments", TEXTS)])
MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(FUNCTION))])


def _read(path: Path, table: Any, write: Callable[..., object] = pq.write_table) -> list[Row | RowFate]:
    write(table, path)
    form = "parquet" if write is pq.write_table else "arrow"
    return list(read_rows(InputConfig(path=str(path), format=form, id=None, metadata=["tags"])))


@pytest.mark.parametrize("write", [pq.write_table, feather.write_feather])
def test_maps_are_objects_in_order(tmp_path: Path, write: Callable[..., object]) -> None:
    call = {"name": "get", "arguments": [("to", "Rome"), ("from", "Bari")]}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    tags = [("outer", [{"inner": [("b", [1]), ("a", [])]}])]
    inner = pa.struct([("inner", pa.map_(pa.string(), pa.list_(pa.int64())))])
    table = pa.table(
        {
            "messages": pa.array([messages], pa.list_(MESSAGE)),
            "tags": pa.array([tags], pa.map_(pa.string(), pa.list_(inner))),
        }
    )
    (row,) = _read(tmp_path / "in", table, write)
    assert isinstance(row, Row)
    assert row.messages is not None
    assert list(row.messages[0]["tool_calls"][0]["arguments"].items()) == call["arguments"]
    assert row.metadata == {"tags": {"outer": [{"inner": {"b": [1], "a": []}}]}}
    assert list(row.metadata["tags"]["outer"][0]["inner"]) == ["b", "a"]


def _read_batch(batch: Any) -> list[Any]:
    return _records(batch, _Reading.of(batch.schema))


@pytest.mark.parametrize(
    ("keys", "kind", "reason"),
    [
        (["a", "a"], pa.string(), "a map has a key twice"),
        ([True], pa.bool_(), "expected names of members to be strings, got a boolean"),
        ([1.5], pa.float64(), "expected names of members to be strings, got a number"),
        ([b"a"], pa.binary(), "expected names of members to be strings, got bytes"),
        ([[1]], pa.list_(pa.int8()), "TypeError"),
    ],
)
def test_a_row_without_usable_keys_is_refused(tmp_path: Path, keys: list[Any], kind: Any, reason: str) -> None:
    tags = pa.array([[(key, 1) for key in keys], []], pa.map_(kind, pa.int8()))
    refused, row = _read(tmp_path / "in", pa.table({"text": ["a", "b"], "tags": tags}))
    assert isinstance(refused, RowFate)
    assert reason in refused.reason
    assert isinstance(row, Row)
    assert row.metadata == {"tags": {}}


def test_integer_keys_become_text(tmp_path: Path) -> None:
    tags = pa.array([[(7, 1)]], pa.map_(pa.int32(), pa.int8()))
    (row,) = _read(tmp_path / "in", pa.table({"text": ["a"], "tags": tags}))
    assert isinstance(row, Row)
    assert row.metadata == {"tags": {"7": 1}}


def test_no_object_has_integers_as_keys() -> None:
    """Python hashes integers without a seed, so a mapping of chosen integers would take quadratic time."""
    kind, numbers = pa.map_(pa.int64(), pa.map_(pa.uint8(), pa.int8())), [(-7, [(1, 2)]), (3, None), (-1, [])]
    found = {"-7": {"1": 2}, "3": None, "-1": {}}
    plain = pa.array([numbers, None], kind)
    columns = {
        "map": plain,
        "list": pa.array([[numbers], None], pa.list_(kind)),
        "large": pa.array([[numbers], None], pa.large_list(kind)),
        "fixed": pa.array([[numbers], None], pa.list_(kind, 1)),
        "structure": pa.array([{"a": numbers, "b": 1}, None], pa.struct([("a", kind), ("b", pa.int8())])),
    }
    first, second = _read_batch(pa.record_batch(columns))
    lists = {name: [found] for name in ("list", "large", "fixed")}
    assert first == {"map": found, **lists, "structure": {"a": found, "b": 1}}
    assert list(first["map"]) == list(found)
    assert second == dict.fromkeys(columns)


def test_types_are_converted_once_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch with a row that cannot be read is read row by row. Each row visited all types of each column."""
    visited, real = [], maps._with_objects

    def count(kind: Any) -> Any:
        visited.append(kind)
        return real(kind)

    monkeypatch.setattr(maps, "_with_objects", count)
    texts = pa.array([b"\xff" if i % 256 == 0 else b"a" for i in range(1000)]).view(pa.string())
    table = pa.table({"text": texts, "tags": pa.array([[("a", "b")]] * 1000, TEXTS)})
    rows = _read(tmp_path / "in", table, feather.write_feather)
    assert [isinstance(row, Row) for row in rows] == [i % 256 != 0 for i in range(1000)]
    assert visited == [pa.string(), TEXTS, pa.string()]


@pytest.mark.traced
@pytest.mark.parametrize("items", [0, 1, 3, 6, 11, 44])
def test_a_map_takes_no_more_than_its_cost(items: int) -> None:
    least, kind, value = -(1 << 63), pa.int64(), 1 << 40
    for _ in range(8):
        kind, value = pa.map_(pa.int64(), kind), [(least, value)]
    deep = pa.array([value] * 500, kind)
    flat = pa.array([[(least + i, least + i) for i in range(items)]] * 1000, pa.map_(pa.int64(), pa.int64()))
    for column in (deep, flat):
        batch = pa.record_batch({"tags": column})
        trace_memory()
        found = _read_batch(batch)
        used = tracemalloc.get_traced_memory()[0]
        assert len(found) == len(column)
        assert used < cost_of_columns(batch, 1 << 40)
