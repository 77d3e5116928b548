from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import zstandard

from hsx_dist.config import InputConfig
from hsx_dist.errors import ConfigError, FormatError
from hsx_dist.format.manifest import RowFate
from hsx_dist.inputs.rows import Row, read_rows, rows_from


def write(path: Path, *lines: Any) -> str:
    data = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(data) + b"\n")
    return str(path)


def read(path: str, **settings: Any) -> list[Row | RowFate]:
    return list(read_rows(InputConfig(path=path, **settings)))


def one(tmp_path: Path, line: Any, **settings: Any) -> Row | RowFate:
    (row,) = read(write(tmp_path / "in.jsonl", line), **settings)
    return row


def test_the_three_kinds(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    path = write(
        tmp_path / "in.jsonl",
        {"id": "a", "text": "one", "source": "x", "n": 3},
        {"id": 7, "messages": messages},
        {"token_ids": [0, 5]},
        {"id": None, "text": "four", "messages": None},
    )
    assert read(path, metadata=["source", "n"]) == [
        Row("a", 0, text="one", metadata={"source": "x", "n": 3}),
        Row("7", 1, messages=messages),
        Row("in:00000002", 2, token_ids=[0, 5]),
        Row("in:00000003", 3, text="four"),
    ]


def test_other_field_names(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", {"uid": "a", "prompt": "p", "text": "kept", "id": 3})
    kept = Row("a", 0, text="p", metadata={"text": "kept", "id": 3})
    assert read(path, id="uid", text="prompt", metadata=["text", "id"]) == [kept]
    assert [r.key for r in read(path, id=None, text="prompt")] == ["in:00000000"]


def test_a_named_field_that_no_row_has_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"text": "a"}, {"text": "b", "source": "x", "assistant_mask": None}, {"text": "c"}]
    path = write(tmp_path / "in.jsonl", *rows)
    read(path, metadata=["source"], loss_mask="assistant_mask")
    read_rows(InputConfig(path=path, id="uid"))  # opens the file only
    assert not caplog.messages
    config = InputConfig(path=path, metadata=["source", "sorce"], id="uid")
    assert len([*read_rows(config), *rows_from(rows, config)]) == 6
    told = [
        f"{name}: expected rows with the field {field}, got none in 3 rows. Correct the name or remove it"
        for name, field in (("input.metadata", "sorce"), ("input.id", "uid"))
    ]
    assert caplog.messages == told * 2
    caplog.clear()
    rows = [{"text": str(i)} for i in range(1500)]
    found = rows_from(rows, InputConfig(path=path, metadata=["source"]))
    for _ in range(1000):
        next(found)
    assert len(caplog.messages) == 1
    assert len(list(found)) == 500
    assert len(caplog.messages) == 1
    caplog.clear()
    read(path, metadata=["source"], limit=1)
    assert caplog.messages == [
        "input.metadata: expected rows with the field source, got none in 1 rows. Correct the name or remove it"
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "expected one JSON object, got a line that is not JSON (Expecting property name"),
        (b'{"id": 1, "text": "a"', "JSON (Expecting ',' delimiter at column 22). Correct the line"),
        (b"nope", "not JSON"),
        (b"", "expected one JSON object, got an empty line. Remove it"),
        (b'{"text": "\xff"}', "expected a line in UTF-8, got other bytes. Write it as UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b"9" * 10_000, "not JSON"),
        (b"3", "expected a JSON object, got an integer"),
        (b'["a"]', "expected a JSON object, got a list"),
        (b"null", "expected a JSON object, got null"),
        ({"id": "a"}, "expected exactly one of the fields text, messages, token_ids, got none of them"),
        ({"text": "a", "token_ids": [1]}, "got text and token_ids"),
        ({"text": ""}, "text: expected text, got an empty string"),
        ({"text": " \n"}, "text: expected text, got an empty string"),
        ({"text": 3}, "text: expected a string, got an integer"),
        (b'{"text": "\\ud800"}', "text: expected valid Unicode"),
        ({"messages": []}, "messages: expected a list of messages, got an empty list"),
        ({"messages": "hi"}, "messages: expected a list of messages, got a string"),
        ({"messages": [{"content": "x"}]}, "messages: expected message 0 to be an object with a role"),
        ({"messages": ["x"]}, "messages: expected message 0 to be an object with a role"),
        ({"messages": [{}] * 65_537}, "messages: expected at most 65536 messages, got 65537"),
        ({"messages": [{"role": "user", "content": 3}]}, "content of message 0"),
        ({"token_ids": []}, "token_ids: expected a list of token ids, got an empty list"),
        ({"token_ids": [1, -1]}, "got '-1' at position 1"),
        ({"token_ids": [1, True]}, "got 'True' at position 1"),
        ({"token_ids": [1.5]}, "got '1.5' at position 0"),
        ({"token_ids": [2**40]}, "at position 0"),
        ({"token_ids": "1 2"}, "token_ids: expected a list of token ids, got a string"),
        ({"id": "", "text": "a"}, "id: expected 1 to 1024 characters"),
        ({"id": "x" * 2000, "text": "a"}, "id: expected 1 to 1024 characters, got 2000"),
        ({"id": True, "text": "a"}, "id: expected a string or an integer, got a boolean"),
        ({"id": 1.5, "text": "a"}, "id: expected a string or an integer, got a number"),
        ({"id": ["a"], "text": "a"}, "id: expected a string or an integer, got a list"),
        (b'{"id": "\\ud800", "text": "a"}', "id: expected valid Unicode"),
    ],
)
def test_a_bad_row_is_refused_and_the_next_one_read(tmp_path: Path, line: Any, reason: str) -> None:
    fate, good = read(write(tmp_path / "in.jsonl", line, {"text": "good"}))
    assert isinstance(fate, RowFate)
    assert (fate.fate, fate.row, fate.tries) == ("refused", 0, 0)
    assert reason in fate.reason
    assert good == Row("in:00000001", 1, text="good")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["in.txt", "in.jsonl"])
def test_lines_in_another_encoding_are_refused(tmp_path: Path, name: str, encoding: str) -> None:
    path = tmp_path / name
    path.write_bytes("".join(f'{{"text": "{i}"}}\n' for i in range(3)).encode(encoding))
    found = read(str(path))
    assert len(found) >= 3
    for fate in found:
        assert isinstance(fate, RowFate)
        assert "expected a line in UTF-8, got " in fate.reason


@pytest.mark.parametrize("name", ["in.txt", "in.jsonl"])
def test_a_line_with_a_hole_is_refused_and_an_escaped_nul_is_text(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\0" * 4096 + b'{"text": "a"}\n{"text": "b\\u0000"}\n')
    hole, good = read(str(path))
    assert isinstance(hole, RowFate)
    assert hole.reason == "expected a line in UTF-8, got NULs: it may be UTF-16 or damaged. Write it as UTF-8"
    assert isinstance(good, Row)
    assert good.text == ("b\0" if name == "in.jsonl" else '{"text": "b\\u0000"}')


@pytest.mark.parametrize("end", ["", "\r"])
def test_a_text_file_whose_lines_end_with_cr_alone_is_not_one_row(tmp_path: Path, end: str) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(f"one\rtwo\rthree{end}".encode())
    (fate,) = read(str(path))
    assert isinstance(fate, RowFate)
    assert "expected lines that end with LF or CR LF, got a file whose lines end with CR" in fate.reason
    for rest, texts in (("", ["one"]), ("\n", ["one"]), ("\r\ntwo", ["one", "two"]), ("\rin\ntwo", ["one\rin", "two"])):
        path.write_bytes(f"one{rest}".encode())
        assert [row.text for row in read(str(path)) if isinstance(row, Row)] == texts


@pytest.mark.parametrize("nothing", ["", " ", "null", "[]", "[ ]", " {\n}\n", '""', '" \\n"', [], {}, None])
@pytest.mark.parametrize("content", [{"messages": [{"role": "user", "content": "hi"}]}, {"text": "hi"}])
def test_no_tools_in_any_form(nothing: Any, content: dict[str, Any]) -> None:
    (row,) = rows_from([content | {"tools": nothing}], InputConfig())
    assert isinstance(row, Row)
    assert row.tools is None


def test_a_refused_row_keeps_the_id_it_has(tmp_path: Path) -> None:
    assert one(tmp_path, {"id": "a", "text": ""}).key == "a"
    assert one(tmp_path, {"id": "a" * 2000, "text": "x"}).key == "in#00000000"


def test_a_duplicate_id_is_refused_under_its_row_number(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", {"id": "7", "text": "a"}, {"id": 7, "text": "b"}, {"id": "c", "text": "c"})
    first, second, third = read(path)
    assert (first.key, third.key) == ("7", "c")
    assert isinstance(second, RowFate)
    assert second.key == "in#00000001"
    assert "got '7' again" in second.reason
    _, second = rows_from([{"id": f"admin:{'Passw0rd' * 5}@host", "text": "x"}] * 2, InputConfig())
    assert "got a string of 51 characters again" in second.reason
    _, second = rows_from([{"id": f"hf_{'aB3' * 10}", "text": "x"}] * 2, InputConfig())
    assert "aB3aB3" not in second.reason


@pytest.mark.parametrize(
    "line",
    [
        '{"text": "a", "text": "b"}',
        '{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
        json.dumps({"messages": '[{"role": "user", "content": "a", "content": "b"}]'}),
    ],
)
def test_a_row_with_a_member_twice_is_refused(tmp_path: Path, line: str) -> None:
    """Another program may take the other one of the two."""
    (tmp_path / "in.jsonl").write_text(f'{line}\n{{"text": "good"}}\n')
    fate, good = read(str(tmp_path / "in.jsonl"))
    assert isinstance(fate, RowFate)
    assert re.search("expected each member of a JSON object once, got '(text|content)' twice", fate.reason)
    assert good == Row("in:00000001", 1, text="good")


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_table_with_a_column_twice_is_refused(tmp_path: Path, form: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / f"in.{form}"

    def rows(names: list[str]) -> list[Row | RowFate]:
        table = pa.Table.from_arrays([pa.array([name]) for name in "abc"], names=names)
        if form == "parquet":
            pq.write_table(table, path)
        else:
            with pa.OSFile(str(path), "wb") as f, pa.ipc.new_file(f, table.schema) as writer:
                writer.write_table(table)
        return read(str(path))

    assert rows(["text", "other", "other"]) == [Row("in:00000000", 0, text="a")]
    with pytest.raises(ConfigError, match=r"expected one column text in .*, got several"):
        rows(["text", "text", "id"])


def test_the_id_of_a_refused_row_is_taken_too(tmp_path: Path) -> None:
    # Otherwise a resumed run, which finds rows by key, would confuse the second row with the refused one.
    first, second = read(write(tmp_path / "in.jsonl", {"id": "a", "text": ""}, {"id": "a", "text": "x"}))
    assert isinstance(first, RowFate)
    assert isinstance(second, RowFate)
    assert (first.key, second.key) == ("a", "in#00000001")


def test_an_id_never_names_the_place_of_a_row(tmp_path: Path) -> None:
    # The refusal of row 1 has the key in#00000001: a sample with that key would hide it.
    taken = {"id": "in#00000001", "text": "fine"}
    other = {"id": "out#00000001", "text": "fine"}
    first, second, third = read(write(tmp_path / "in.jsonl", taken, b"nope", other))
    assert isinstance(first, RowFate)
    assert "expected a key that no refused row can have, got 'in#00000001'. Use another id" in first.reason
    assert (first.key, second.key, third.key) == ("in#00000000", "in#00000001", "out#00000001")

    write(tmp_path / "a.jsonl", {"id": "b#00000000", "text": "fine"})
    write(tmp_path / "b.jsonl", b"nope")
    assert [r.key for r in read(str(tmp_path / "[ab].jsonl"))] == ["a#00000000", "b#00000000"]

    (row,) = rows_from([{"id": "#00000007", "text": "fine"}], InputConfig())
    assert (row.key, type(row)) == ("#00000000", RowFate)


def test_empty_lines(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "in.jsonl", {"text": "a"}, b"", b"  ", {"text": "b"}, b"", b""))
    assert [(r.row, type(r)) for r in rows] == [(0, Row), (1, RowFate), (2, RowFate), (3, Row)]


def test_a_line_that_is_too_long_is_not_held(tmp_path: Path) -> None:
    fate, good, exact = read(
        write(tmp_path / "in.jsonl", {"text": "x" * 1000}, {"text": "y"}, {"text": "z" * (99 - len('{"text": ""}'))}),
        max_row_bytes=100,
    )
    assert isinstance(fate, RowFate)
    assert "input.max_row_bytes" in fate.reason
    assert (good.row, exact.row) == (1, 2)
    assert isinstance(exact, Row)


def test_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n')
    assert [r.text for r in read(str(tmp_path / "in.jsonl")) if isinstance(r, Row)] == ["a", "b"]


def test_no_newline_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "a"}')
    assert len(read(str(tmp_path / "in.jsonl"))) == 1


@pytest.mark.parametrize(("limit", "rows"), [(0, 0), (2, 2), (9, 4)])
def test_limit_counts_refused_rows_too(tmp_path: Path, limit: int, rows: int) -> None:
    path = write(tmp_path / "in.jsonl", {"text": "a"}, b"{", {"text": "b"}, {"text": "c"})
    assert len(read(path, limit=limit)) == rows


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed(tmp_path: Path, suffix: str) -> None:
    data = b"".join(b'{"text": "row %d"}\n' % i for i in range(1000))
    compressed = gzip.compress(data) if suffix == ".gz" else zstandard.compress(data)
    path = tmp_path / f"train.v2.jsonl{suffix}"
    path.write_bytes(compressed)
    rows = read(str(path))
    assert len(rows) == 1000
    assert rows[-1].key == "train.v2:00000999"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "not compressed"])
def test_broken_compression(tmp_path: Path, suffix: str, damage: str) -> None:
    data = b"".join(b'{"text": "row %d"}\n' % (i * i * 7919) for i in range(20_000))
    compressed = gzip.compress(data) if suffix == ".gz" else zstandard.compress(data)
    path = tmp_path / f"in.jsonl{suffix}"
    path.write_bytes(compressed[: len(compressed) // 2] if damage == "cut" else data)
    with pytest.raises(FormatError, match="broken compressed data after row"):
        read(str(path))


def test_zstandard_of_several_frames(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl.zst"
    path.write_bytes(zstandard.compress(b'{"text": "a"}\n{"text"') + zstandard.compress(b': "b"}\n{"text": "c"}\n'))
    assert [r.text for r in read(str(path)) if isinstance(r, Row)] == ["a", "b", "c"]


def test_any_url() -> None:
    with fsspec.open("memory://hsx-rows/in.jsonl", "wb") as f:
        f.write(b'{"text": "a"}\n')
    assert read("memory://hsx-rows/in.jsonl") == [Row("in:00000000", 0, text="a")]


def test_a_name_that_looks_like_a_pattern(tmp_path: Path) -> None:
    assert len(read(write(tmp_path / "in[1]*.jsonl", {"text": "a"}))) == 1


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "got nothing"),
        ("not/there.jsonl", "no such file"),
        ("memory://hsx-rows/not-there.jsonl", "no such file or bucket"),
        ("nonsense://x/y.jsonl", "nonsense://x/y.jsonl"),
        ("tests/golden/**/*.nothing", "expected files of rows"),
    ],
)
def test_a_missing_input_raises_before_the_first_row(path: str, words: str) -> None:
    with pytest.raises(ConfigError) as e:
        read_rows(InputConfig(path=path))
    assert words in str(e.value)


def test_no_credential_in_the_message() -> None:
    with pytest.raises(ConfigError) as e:
        read_rows(
            InputConfig(path="http://u:hunter2@127.0.0.1:1/x.jsonl?sig=hunter3", storage_options={"x": "hunter4"})
        )
    assert "hunter" not in str(e.value)


def test_rows_from_python() -> None:
    messages = [{"role": "user", "content": "hi"}]
    prompts = ["a", [1, 2], np.array([3, 4]), messages, {"id": "k", "text": "t"}, "", 3, []]
    rows = list(rows_from(prompts, InputConfig()))
    assert rows[:5] == [
        Row("0", 0, text="a"),
        Row("1", 1, token_ids=[1, 2]),
        Row("2", 2, token_ids=[3, 4]),
        Row("3", 3, messages=messages),
        Row("k", 4, text="t"),
    ]
    assert all(isinstance(r, RowFate) for r in rows[5:])
    assert len(rows) == 8
    assert len(list(rows_from(iter(prompts), InputConfig(limit=2)))) == 2


def test_a_refused_rows_key_is_never_a_good_rows(tmp_path: Path) -> None:
    rows = list(
        rows_from([{"id": 1, "text": "x"}, {"text": "no id"}, {"text": ""}, {"id": "2", "text": "y"}], InputConfig())
    )
    assert [type(r) for r in rows] == [Row, RowFate, RowFate, RowFate]
    assert rows[0].key == "1"
    assert {r.key for r in rows[1:]}.isdisjoint({"1"})
    first, second = read(write(tmp_path / "in.jsonl", b"broken", {"id": "in:00000000", "text": "x"}))
    assert first.key != second.key


def test_the_content_hash_differs_for_other_rows_and_ignores_their_keys() -> None:
    contents = {row.content for row in rows_from(["a", "b", [1, 2], [{"role": "user", "content": "a"}]], InputConfig())}
    assert len(contents) == 4
    assert Row("k", 0, text="a").content == Row("other", 7, text="a").content


def test_parts_of_a_messages_content_have_no_null_members() -> None:
    """A table has every member in every row, and templates ask whether a part has the member ``image``."""
    parts = [{"type": "text", "text": "two", "image": None}]
    (row,) = rows_from([{"messages": [{"role": "user", "content": parts, "name": None}]}], InputConfig())
    assert isinstance(row, Row)
    assert row.messages == [{"role": "user", "content": [{"type": "text", "text": "two"}]}]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_mark_of_a_joined_text_file_does_not_become_text(tmp_path: Path, mark: str) -> None:
    """Each text file of some editors begins with U+FEFF. Their rows would differ by a letter that is not shown."""
    path = tmp_path / "in.txt"
    path.write_text(f"{mark}one\n\ufefftwo\nthr\ufeffee\n", encoding="utf-8")
    first, second, third = read_rows(InputConfig(path=str(path)))
    assert isinstance(first, Row)
    assert isinstance(third, Row)
    assert (first.text, third.text) == ("one", "thr\ufeffee")
    assert isinstance(second, RowFate)
    assert "expected U+FEFF only where the file begins" in str(second.reason)
