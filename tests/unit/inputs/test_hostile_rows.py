"""No row ends a job: each becomes a row that every later step accepts, or a refusal."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hsx_dist.config import InputConfig
from hsx_dist.connector.request_params import read_request_params
from hsx_dist.errors import InputError
from hsx_dist.format.manifest import Receipt, RowFate
from hsx_dist.inputs.content import json_metadata
from hsx_dist.inputs.loss_mask import _agreement
from hsx_dist.inputs.rendered import require_rendered
from hsx_dist.inputs.rows import Row, read_rows, rows_from
from tests.harness.traced_memory import trace_memory

CONFIG = InputConfig(metadata=["extra", "more"])
CHAT = [{"role": "user", "content": "hi"}]
CALL = {"function": {"name": "f", "arguments": {}}}


def deep(levels: int, box: str = "list") -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value] if box == "list" else {"a": value}
    return value


def itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def rows_of(record: Any) -> list[Row | RowFate]:
    return list(rows_from([record, {"text": "good"}], CONFIG))


def check(item: Row | RowFate) -> None:
    """Use a row like a driver, Ray, a manifest and the connector do."""
    assert isinstance(item, (Row, RowFate))
    assert pickle.loads(pickle.dumps(item)) == item
    item.key.encode()
    if isinstance(item, RowFate):
        assert item.fate == "refused"
        assert len(item.reason) < 500
        receipt = Receipt(1, "w", 1, None, 0, "00000000", 0, 0, (), (item,), "2026-01-01")
        assert Receipt.from_json(receipt.to_json()).rows == (item,)
        return
    assert len(item.content) == 16
    json.dumps([item.messages, item.tools, item.token_ids, item.loss_mask])
    json.dumps(item.metadata, allow_nan=False, ensure_ascii=False).encode()
    asked = {"hidden_states_key": item.key, "hidden_states_row": item.row}
    if item.metadata:
        asked["hidden_states_metadata"] = item.metadata  # type: ignore[assignment]
    options = read_request_params(
        "r",
        asked,
        prompt_tokens=8,
        captured={"hidden_states": (1,)},
        output="/o",
        allow_custom_path=False,
        include_output_tokens=False,
    )
    assert not options.refused
    assert options.key == item.key


@pytest.mark.parametrize("field", ["extra", "messages", "tools", "token_ids", "loss_mask", "id", "text", "content"])
@pytest.mark.parametrize("levels", [60, 600, 5000])
@pytest.mark.parametrize("box", ["list", "object"])
def test_a_deep_value_refuses_its_row_alone(field: str, levels: int, box: str) -> None:
    value = deep(levels, box)
    record: dict[str, Any] = {"id": "deep", "messages": CHAT, field: value}
    if field == "content":
        record = {"id": "deep", "messages": [{"role": "user", "content": [value]}]}
    if field in ("text", "token_ids"):
        del record["messages"]
    if field == "tools":
        record["tools"] = [{"type": "function", "function": value}]
    first, second = rows_of(record)
    check(first)
    check(second)
    assert isinstance(second, Row)
    if levels > 64:
        assert isinstance(first, RowFate)


@pytest.mark.parametrize("field", ["extra", "messages", "tools"])
def test_a_deep_value_in_a_line_and_in_a_json_text(tmp_path: Path, field: str) -> None:
    value = '{"a":' * 600 + "1" + "}" * 600
    chat = '[{"role": "user", "content": "hi"}]'
    listed = f'[{{"role": "user", "content": "x", "b": {value}}}]' if field == "messages" else f"[{value}]"
    lines = [
        f'{{"id": "line", "{field}": {listed}' + (f', "messages": {chat}}}' if field != "messages" else "}"),
        json.dumps({"id": "text", "messages": json.loads(chat), field: listed}),
        '{"id": "good", "text": "good"}',
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    line, text, good = read_rows(InputConfig(path=str(tmp_path / "in.jsonl"), metadata=["extra"]))
    assert isinstance(line, RowFate)
    assert "nested at most 64 deep" in line.reason
    assert isinstance(good, Row)
    assert isinstance(text, Row if field == "extra" else RowFate)  # in metadata a text stays a text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"extra": itself()}, "nested at most 64 deep"),
        ({"extra": [0] * 70_000}, "more"),
        ({"messages": [*CHAT, *({} for _ in range(1 << 20))]}, "at most 65536 messages"),
        ({"extra": 10**5000}, "an integer of 16610 bits"),
        ({"extra": {"\ud800": 1}}, "Unicode"),
        ({"extra": {1: "a", "1": "b"}}, "'1' twice"),
        ({"extra": {(1, 2): "a"}}, "to be strings"),
        ({"extra": {None: "a"}}, "to be strings"),
        ({"extra": b"bytes"}, "JSON can hold, got bytes"),
        ({"extra": object()}, "JSON can hold, got object"),
        ({"messages": [{"role": "\ud800", "content": "x"}]}, "Unicode"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}]}, "Unicode"),
        ({"messages": [{"role": "user", "content": [{"bytes": b"x"}]}]}, "got bytes"),
        ({"messages": [{"role": "user", "content": "x", 10**5000: 1}]}, "bits"),
        ({"messages": [{"role": "user", "content": "x", "n": 10**5000}]}, "bits"),
        ({"tools": [{"name": "\ud800"}]}, "Unicode"),
        ({"tools": [{True: 1}]}, "to be strings"),
        ({"id": 10**5000}, "id: expected an integer of at most 1024 bits"),
        ({"id": "x" * (1 << 20)}, "1 to 1024 characters"),
        ({"messages": None, "token_ids": [10**5000]}, "an integer of 16610 bits at position 0"),
        ({"messages": None, "token_ids": [1, deep(900)]}, "got a list at position 1"),
        ({"messages": None, "token_ids": [float("nan")]}, "got 'nan' at position 0"),
        ({"loss_mask": [10**5000]}, "an integer of 16610 bits at position 0"),
        ({"loss_mask": [1, deep(900)]}, "got a list at position 1"),
    ],
)
def test_refused_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    first, second = rows_of({"id": "x", "messages": CHAT, **changes})
    check(first)
    assert isinstance(first, RowFate)
    assert reason in first.reason
    assert isinstance(second, Row)


def test_bytes_are_no_token_ids() -> None:
    first, _ = rows_of(b"abc")
    assert isinstance(first, RowFate)
    assert "got bytes" in first.reason


def test_what_a_template_and_a_hash_made_of_a_chat_stays() -> None:
    """Stored runs contain these hashes of their first rows."""
    when = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    chat = [{"role": "user", "content": "x", "at": when, "n": 1.5, "none": None, "d": Decimal("1.0")}]
    tools = [{"name": "f", "strict": None, "args": {"b": [1, None], "a": 2.5}}]
    (row,) = rows_from([{"messages": chat, "tools": tools}], InputConfig())
    assert isinstance(row, Row)
    assert row.messages == [{"role": "user", "content": "x", "at": str(when), "n": 1.5, "d": "1.0"}]
    assert (row.content, row.old_content) == ("1557590fbe6557b9", "9948b76c5d9a7f8a")
    (bare,) = rows_from([{"messages": CHAT}], InputConfig())
    assert isinstance(bare, Row)
    assert (bare.content, bare.old_content) == ("6ba306c1640ca2d9", "10ac6e275c1f795f")


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_json_lacks_refuse_a_chat(tmp_path: Path, number: str) -> None:
    arguments = f'{{"x": [{number}]}}'
    call = '{"role": "assistant", "tool_calls": [{"name": "f", "arguments": %s}]}'
    user = '{"role": "user", "content": "hi"}'
    tools = f'[{{"name": "f", "parameters": {arguments}}}]'
    members = [
        f'"messages": [{user}, {call % arguments}]',
        f'"messages": [{user}, {call % json.dumps(arguments)}]',
        f'"messages": {json.dumps(f"[{user}, {call % arguments}]")}',
        f'"messages": [{user}], "tools": {tools}',
        f'"messages": [{user}], "tools": {json.dumps(tools)}',
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f"{{{member}}}\n" for member in members))
    found = list(read_rows(InputConfig(path=str(path))))
    assert len(found) == len(members)
    for fate in found:
        assert isinstance(fate, RowFate)
        assert "expected finite numbers, got " in fate.reason


def test_metadata_in_other_types() -> None:
    record = {"text": "x", "extra": {"n": 1 << 70, "t": time(1, 2), "p": timedelta(minutes=1), "f": float("inf")}}
    (row,) = rows_from([record], CONFIG)
    assert isinstance(row, Row)
    assert row.metadata == {"extra": {"n": str(1 << 70), "t": "01:02:00", "p": 60.0, "f": None}}


def test_rows_of_a_table_that_python_cannot_hold(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffc")]
    )
    table = pa.table(
        {
            "text": text,
            "extra": pa.array([0, 0, 2**62], pa.int64()).cast(pa.timestamp("us")),
            "more": pa.array([{"b": b"x"}, None, None], pa.struct([("b", pa.binary())])),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    config = InputConfig(path=str(tmp_path / "in.parquet"), metadata=["extra"])
    first, second, third = read_rows(config)
    assert isinstance(first, Row)
    assert first.metadata == {"extra": "1970-01-01T00:00:00"}
    for fate in (second, third):
        check(fate)
        assert isinstance(fate, RowFate)
        assert "cannot be read" in fate.reason
    (binary, *_) = read_rows(config.model_copy(update={"metadata": ["more"]}))
    assert isinstance(binary, RowFate)
    assert "got bytes" in binary.reason


def test_a_file_whose_name_is_no_unicode(tmp_path: Path) -> None:
    path = tmp_path / "a\udcff.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"id": "named", "text": "b"}\n')
    for name in ("id", None):
        without, named = read_rows(InputConfig(path=str(path), id=name))
        check(without)
        assert isinstance(without, RowFate)
        assert "key of a row without an id: expected valid Unicode" in without.reason
        assert isinstance(named, RowFate if name is None else Row)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=0, max_value=400),
    st.integers(4000, 5000).map(lambda n: 10**n),
    st.floats(),
    st.text(alphabet=st.characters(), max_size=8),  # also surrogates and control characters
    st.binary(max_size=4),
    st.dates(),
    st.datetimes(),
    st.timedeltas(),
    st.decimals(),
    st.uuids(),
    st.builds(object),
)
KEYS = st.one_of(
    st.text(alphabet=st.characters(), max_size=4), st.integers(-3, 3), st.none(), st.booleans(), st.dates()
)
VALUES = st.recursive(
    SCALARS,
    lambda v: st.one_of(st.lists(v, max_size=3), st.tuples(v, v), st.dictionaries(KEYS, v, max_size=3)),
    max_leaves=8,
)
DEEP = st.builds(deep, st.integers(1, 1200), st.sampled_from(["list", "object"]))
MESSAGE = st.one_of(
    st.fixed_dictionaries(
        {"role": st.one_of(st.just("user"), VALUES), "content": st.one_of(st.just("x"), VALUES)},
        optional={"from": VALUES, "value": VALUES, "tool_calls": st.one_of(VALUES, DEEP)},
    ),
    VALUES,
)
ANY = st.one_of(VALUES, DEEP)
TEXTS = ('[{"role": "user", "content": "x"}]', "[" * 900 + "]" * 900, "[1]", "{")
RECORDS = st.fixed_dictionaries(
    {},
    optional={
        "id": st.one_of(st.text(max_size=4), ANY),
        "text": st.one_of(st.text(max_size=4), ANY),
        "messages": st.one_of(st.lists(MESSAGE, max_size=3), st.sampled_from(TEXTS), ANY),
        "token_ids": st.one_of(st.lists(SCALARS, max_size=3), st.lists(st.integers(0, 9), max_size=3), ANY),
        "loss_mask": st.one_of(st.lists(st.integers(0, 1), max_size=3), st.lists(VALUES, max_size=3), ANY),
        "tools": st.one_of(st.lists(st.dictionaries(KEYS, ANY, max_size=2), max_size=2), ANY),
        "extra": ANY,
        "more": ANY,
    },
)


@settings(max_examples=150, deadline=None)
@given(st.one_of(RECORDS, ANY))
@example({"id": date(2026, 1, 1), "text": "x"})
def test_any_record_is_a_row_or_a_refusal(record: Any) -> None:
    first, *rest = rows_from([record], CONFIG)
    assert not rest
    check(first)


@settings(max_examples=150, deadline=None)
@given(st.text("ab", max_size=12), st.text("ab", max_size=12), st.integers(0, 12))
def test_agreement_is_the_longest_one(through: str, whole: str, start: int) -> None:
    start = min(start, len(whole))
    if whole.startswith(through):
        return
    longest = max(n for n in range(len(whole) - start + 1) if through.endswith(whole[start : start + n]))
    assert _agreement(through, whole, start) == longest


def test_agreement_of_a_long_row_takes_linear_time() -> None:
    whole = "a" * 300_000
    assert _agreement("b" + "a" * 200_000 + "b", whole, 0) == 0
    assert _agreement("b" + "a" * 200_000, whole, 100) == 200_000


def test_numbers_and_texts_of_other_libraries_become_pythons_own() -> None:
    """An engine in another process receives rows as msgpack, which has no subclasses."""
    import numpy as np

    from hsx_dist.inputs.row_values import metadata_value

    found = metadata_value({"a": [np.float64(0.5), np.str_("x"), True, 3]}, "metadata", 100)
    assert [type(v) for v in found["a"]] == [float, str, bool, int]


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([{"role": "user", "content": ["a"] * 65_537}], None),
        ([{"role": "user", "content": "a"}] * 65_537, None),
        ([{"role": "user", "content": "a", "tool_calls": [CALL] * 65_536}], None),
        ([{"role": "user", "content": "a"}], [{"name": "f"}] * 65_536),
    ],
)
def test_a_chat_of_very_many_texts_is_refused_before_it_is_rendered(messages: Any, tools: Any) -> None:
    def never(*_: Any) -> str:
        raise AssertionError

    with pytest.raises(InputError, match="expected at most 65536 texts, calls and tools in a chat, got 65537"):
        require_rendered(messages, tools, never)


@pytest.mark.traced
def test_metadata_of_one_long_name_is_refused_before_it_is_encoded() -> None:
    """The name is one object, and each structure has it."""
    name = "n" * 400_000
    rows = [{name: 1} for _ in range(30_000)]
    trace_memory()
    with pytest.raises(InputError, match="metadata: expected at most 65536 bytes as JSON"):
        json_metadata({"m": rows})
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
