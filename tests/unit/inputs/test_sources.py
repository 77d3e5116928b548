"""Sources of rows: files, folders, globs and saved data sets, in every format."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import zipfile
from array import array
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import zstandard

from hsx_dist.config import InputConfig, load_config
from hsx_dist.errors import ConfigError, FormatError
from hsx_dist.format.manifest import RowFate
from hsx_dist.inputs import listing, rows, sources, tables
from hsx_dist.inputs.listing import find_input
from hsx_dist.inputs.rows import Row, read_rows, rows_from

pytestmark = pytest.mark.usefixtures("in_process")
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def read(path: Any, **settings: Any) -> list[Row | RowFate]:
    return list(read_rows(InputConfig(path=str(path), **settings)))


def keys(path: Any, **settings: Any) -> list[str]:
    return [row.key for row in read(path, **settings)]


def lines(path: Path, *texts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return path


def saved(folder: Path, *tables: Any) -> Path:
    """Write the files of ``Dataset.save_to_disk``: Arrow streams, and a state that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data-{i:05d}-of-{len(tables):05d}.arrow" for i in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names], "_split": "train"}))
    return folder


def table(*texts: str) -> Any:
    return pa.table({"text": list(texts), "unused": [b"x" * 100] * len(texts)})


def test_a_folder_is_read_by_name_and_keys_say_the_file(tmp_path: Path) -> None:
    lines(tmp_path / "b.jsonl", "b0", "b1")
    lines(tmp_path / "a" / "x.jsonl", "a0")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "c0"}\n'))
    (tmp_path / "d.txt.zst").write_bytes(zstandard.compress(b"first line\n\nsecond\n"))
    for name in ("README.md", "_SUCCESS", ".hidden.jsonl"):
        (tmp_path / name).write_text("not a row\n")
    rows = read(tmp_path)
    # In a text file each line that is not empty is a row.
    of_text = ["d:00000000", "d:00000002"]
    assert [r.key for r in rows] == ["a/x:00000000", "b:00000000", "b:00000001", "c:00000000", *of_text]
    assert [r.row for r in rows] == list(range(6))
    assert rows[-1] == Row("d:00000002", 5, text="second")


def test_a_glob(tmp_path: Path) -> None:
    for name in ("train-0", "train-1", "test-0"):
        lines(tmp_path / "deep" / f"{name}.jsonl", name)
    assert keys(tmp_path / "deep" / "train-*.jsonl") == ["train-0:00000000", "train-1:00000000"]
    assert keys(tmp_path / "**" / "*-0.jsonl") == ["deep/test-0:00000000", "deep/train-0:00000000"]
    with pytest.raises(ConfigError, match="got none"):
        read(tmp_path / "*.parquet")


def test_a_folder_of_another_store() -> None:
    for name in ("one", "two"):
        with fsspec.open(f"memory://hsx-sources/x/{name}.jsonl", "wb") as f:
            f.write(b'{"text": "a"}\n')
    assert keys("memory://hsx-sources/x") == keys("memory://hsx-sources/x/*.jsonl") == ["one:00000000", "two:00000000"]


def test_files_whose_rows_would_share_keys_are_refused(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", "x")
    (tmp_path / "a.txt").write_text("x\n")
    with pytest.raises(ConfigError, match="several 'a'"):
        read(tmp_path)
    assert keys(tmp_path / "*.txt") == ["a:00000000"]


def test_a_file_whose_name_is_too_long_for_a_key_is_refused(tmp_path: Path) -> None:
    """Names in a ZIP file have up to 65,535 bytes. A receipt with such a key could not be read."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as z:
        z.writestr("x" * 8193 + ".jsonl", "no JSON\n")
    with pytest.raises(
        ConfigError, match="255 folders and 4096 characters in a zip file, got 0 folders and 8199 characters"
    ):
        read(f"zip://*.jsonl::{tmp_path}/a.zip")


def test_files_whose_refused_rows_would_share_keys_are_refused(tmp_path: Path) -> None:
    """In keys, an invalid byte of a name is escaped. Another name may be equal to the escaped one."""
    (tmp_path / os.fsdecode(b"\xff.jsonl")).write_text("no JSON\n")
    assert [key.rpartition("#")[0] for key in keys(tmp_path)] == [r"\udcff"]
    (tmp_path / r"\udcff.jsonl").write_text("no JSON\n")
    with pytest.raises(ConfigError, match="expected files of different names"):
        keys(tmp_path)


@pytest.mark.parametrize("form", ["parquet", "arrow", "stream", "feather"])
def test_columnar_formats_give_the_rows_of_jsonl(tmp_path: Path, form: str) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "t", "text": "one", "source": "web", "score": 0.5},
        {
            "id": "m",
            "messages": [*MESSAGES, {"role": "tool", "content": None, "name": "f"}],
            "tools": '[{"name": "f"}]',
        },
        {"id": "i", "token_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
        {"id": "bad", "text": ""},
    ]
    columns = ("id", "text", "messages", "tools", "token_ids", "loss_mask", "source", "score")
    whole = pa.table({c: [r.get(c) for r in rows] for c in columns} | {"unused": [b"u"] * 4})
    path = tmp_path / f"in.{ {'parquet': 'parquet', 'feather': 'feather'}.get(form, 'arrow') }"
    if form == "parquet":
        import pyarrow.parquet as pq

        pq.write_table(whole, path, row_group_size=3)
    elif form == "feather":
        import pyarrow.feather as feather

        feather.write_feather(whole, str(path), compression="zstd")
    else:
        with (pa.ipc.new_file if form == "arrow" else pa.ipc.new_stream)(path, whole.schema) as writer:
            writer.write_table(whole, max_chunksize=3)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    expected = read(tmp_path / "in.jsonl", metadata=["source"])
    found = read(path, metadata=["source"])
    # In a table every row has every column.
    assert [getattr(r, "metadata", None) for r in found] == [
        {"source": "web"},
        {"source": None},
        {"source": None},
        None,
    ]
    for row in (*expected, *found):
        if isinstance(row, Row):
            row.metadata.clear()
    assert found == expected
    assert found[1].tools == [{"name": "f"}]
    assert found[1].messages == [*MESSAGES, {"role": "tool", "content": None, "name": "f"}]
    assert found[2].loss_mask == [0, 1, 1]
    assert "empty string" in found[3].reason


def test_a_saved_data_set_and_its_splits(tmp_path: Path) -> None:
    one = saved(tmp_path / "one", table("a", "b", "c"), table("d"))
    rows = read(one)
    assert [(r.key, r.text) for r in rows] == [(f"one:0000000{i}", t) for i, t in enumerate("abcd")]
    both = tmp_path / "both"
    for split, text in (("train", "x"), ("test", "y")):
        saved(both / split, table(text))
    (both / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert keys(both) == ["train:00000000", "test:00000000"]
    assert keys(both, split="test") == ["test:00000000"]
    with pytest.raises(ConfigError, match="expected one of train, test, got 'dev'"):
        read(both, split="dev")
    with pytest.raises(ConfigError, match="expected the folder of a saved data set"):
        read(tmp_path / "one" / "state.json", format="dataset")


def test_a_data_set_that_the_datasets_library_saved_is_read() -> None:
    """A DatasetDict of datasets 5.2.0, its train split selected ([2, 0, 1]) and in two files."""
    rows = read(Path(__file__).parents[2] / "golden" / "saved_dataset")
    assert [r.key for r in rows] == ["c", "a", "b", "test#00000000"]
    assert all(r.messages == MESSAGES for r in rows[:3])
    assert "got 'a' again" in rows[3].reason


def test_only_the_configured_columns_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    chosen = tables._chosen
    monkeypatch.setattr(tables, "_chosen", lambda *a: [seen.add(c) or c for c in chosen(*a)])
    read(saved(tmp_path / "d", table("a")))
    assert seen == {"text"}
    with pytest.raises(ConfigError, match=r"expected one of the columns text, chat, token_ids .* got body"):
        read(saved(tmp_path / "e", pa.table({"body": ["x"]})), messages="chat")


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_table_raises(tmp_path: Path, form: str, damage: str) -> None:
    path = tmp_path / f"x.{form}"
    whole = pa.table({"text": [str(i) * 50 for i in range(5000)]})
    if form == "parquet":
        import pyarrow.parquet as pq

        pq.write_table(whole, path)
    else:
        with pa.ipc.new_stream(path, whole.schema) as writer:
            writer.write_table(whole)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] if damage == "cut" else b"nonsense" * 100)
    with pytest.raises(FormatError, match=rf"whole {form} file"):
        read(path)


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "d", table("a"))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"\.\[parquet\]"):
        read(path)


@pytest.mark.slow
def test_only_a_batch_is_held(tmp_path: Path) -> None:
    """Twenty times the rows need no more of Arrow's memory."""
    import pyarrow.parquet as pq

    peaks = []
    for n in (1_000, 20_000):
        path = tmp_path / f"{n}.parquet"
        schema = pa.schema([("text", pa.string()), ("id", pa.string())])
        with pq.ParquetWriter(path, schema) as writer:
            for at in range(0, n, 5_000):
                part = range(at, min(at + 5_000, n))
                writer.write_table(pa.table({"text": [f"row {i} " * 90 for i in part], "id": [str(i) for i in part]}))
        most = 0
        for i, _ in enumerate(read_rows(InputConfig(path=str(path), id=None))):
            if i % 997 == 0:
                most = max(most, pa.total_allocated_bytes())
        peaks.append(most)
    assert peaks[1] < max(4 * peaks[0], 8 << 20)


def test_shards_cover_all_rows_without_overlap() -> None:
    prompts = [f"p{i}" for i in range(20)]
    shards = [
        [r.text for r in rows_from(prompts, InputConfig(num_shards=3, shard_index=i)) if isinstance(r, Row)]
        for i in range(3)
    ]
    assert sorted(text for shard in shards for text in shard) == sorted(prompts)
    assert [len(s) for s in shards] == [7, 7, 6]


def test_a_sample_is_stable_and_a_larger_one_holds_it(tmp_path: Path) -> None:
    path = lines(tmp_path / "in.jsonl", *(str(i) for i in range(2000)))
    small, again, large = keys(path, sample=0.1), keys(path, sample=0.1), keys(path, sample=0.3)
    assert small == again
    assert 150 < len(small) < 250
    assert set(small) < set(large)
    assert set(keys(path, sample=0.1, sample_seed=1)) != set(small)
    sharded = keys(path, sample=0.1, num_shards=2, shard_index=0) + keys(path, sample=0.1, num_shards=2, shard_index=1)
    assert sorted(sharded) == sorted(small)
    assert keys(path, sample=0.1, limit=5) == small[:5]


@pytest.mark.parametrize("ending", ["gz", "zst", "xz", "lzma", "bz2"])
def test_a_compressed_file_of_0_bytes_is_not_whole(tmp_path: Path, ending: str) -> None:
    lines(tmp_path / "a.jsonl", "x", "y")
    (tmp_path / f"b.jsonl.{ending}").write_bytes(b"")
    with pytest.raises(FormatError, match=rf"b\.jsonl\.{ending} to be whole"):
        read(tmp_path)


def test_the_limit_stops_reading_the_input(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", "x", "y")
    (tmp_path / "b.jsonl.gz").write_bytes(b"broken")
    assert len(read(tmp_path, limit=2)) == 2


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "x", "loss_mask": [0, 2]}, "loss_mask: expected 0 or 1, got '2' at position 1"),
        ({"text": "x", "loss_mask": [0, 1.0]}, "got '1.0' at position 1"),
        ({"text": "x", "loss_mask": "01"}, "expected a list of 0 and 1, got a string"),
        ({"messages": MESSAGES, "tools": "f"}, "tools: expected a list of tools"),
        ({"text": "x", "more": {"deep": b"bytes"}}, "more: expected a value that JSON can hold, got bytes"),
        ({"text": "x", "more": "y" * 70_000}, "metadata: expected at most 65536 bytes"),
        ({"text": "x", "more": "\ud800"}, "more: expected valid Unicode"),
    ],
)
def test_fields_that_cannot_be_used_are_refused(record: dict[str, Any], reason: str) -> None:
    (fate,) = rows_from([record], InputConfig(metadata=["more"]))
    assert isinstance(fate, RowFate)
    assert reason in fate.reason


@pytest.mark.parametrize("form", [list, tuple, np.array, partial(array, "i")])
def test_arrays_and_tuples_in_a_mapping_are_lists(form: Callable[[list[int]], Any]) -> None:
    ids, mask = [5, 6], [0, 1]
    config = InputConfig(token_ids="ids", loss_mask="mask", tools="functions")
    first, second = rows_from([{"ids": form(ids), "mask": form(mask)}, form(ids)], config)
    assert isinstance(first, Row)
    assert isinstance(second, Row)
    assert (first.token_ids, first.loss_mask, second.token_ids) == (ids, mask, ids)
    assert {type(token) for token in [*first.token_ids, *second.token_ids]} == {int}


@pytest.mark.parametrize("form", [tuple, lambda items: np.array(items, object)])
def test_chats_in_a_mapping_may_be_tuples_and_arrays(form: Callable[[Any], Any]) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    row, other = rows_from([{"messages": form(MESSAGES), "tools": form(tools)}, form(MESSAGES)], InputConfig())
    assert isinstance(row, Row)
    assert isinstance(other, Row)
    assert (row.messages, row.tools, other.messages) == (MESSAGES, tools, MESSAGES)


@pytest.mark.parametrize("value", [np.array(5), np.array([1.5]), np.array([[1]]), b"ab", {1: 2}, "ab"])
def test_other_token_ids_in_a_mapping_are_refused(value: Any) -> None:
    (fate,) = rows_from([{"token_ids": value}], InputConfig())
    assert isinstance(fate, RowFate)
    assert fate.reason.startswith("token_ids: expected")


def test_metadata_becomes_json() -> None:
    when = datetime(2026, 1, 2, tzinfo=UTC)
    record = {"text": "x", "more": {"a": [1, Decimal("1.5"), float("nan"), when, True], "b": None}}
    (row,) = rows_from([record], InputConfig(metadata=["more", "absent"]))
    assert row.metadata == {"more": {"a": [1, "1.5", None, when.isoformat(), True], "b": None}}


def test_sharegpt_and_json_texts_are_chats() -> None:
    shared = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    a, b = rows_from([{"messages": shared}, {"messages": json.dumps(MESSAGES)}], InputConfig())
    assert a.messages == b.messages == MESSAGES


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_shards": 2, "shard_index": 2}, "shard_index: expected a number below num_shards"),
        ({"text": "x", "messages": "x"}, "got x for several"),
        ({"metadata": ["id"]}, "which is stored anyway"),
        ({"sample": 0}, "sample"),
        ({"too_long": "drop"}, "too_long"),
    ],
)
def test_an_input_that_contradicts_itself(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, output="o", model="m", input=settings)


def test_find_input_lists_the_files_without_reading_them(tmp_path: Path) -> None:
    found = find_input(InputConfig(path=str(saved(tmp_path / "d", table("a")))))
    assert [(s.label, s.format, len(s.files)) for s in found.sources] == [("d", "arrow", 1)]


def test_keys_hold_nothing_of_a_url_but_the_name() -> None:
    """A server's index page may sign each of its links."""
    found = {f"https://u:hunter2@h/dir/{name}.jsonl?sig=hunter2": "file" for name in ("a", "b/c")}
    sources = listing._of_many(InputConfig(), fsspec.filesystem("https"), found, "https://u:hunter2@h/dir")
    assert [s.label for s in sources] == ["a", "b/c"]


@pytest.mark.parametrize(
    "name", ["../secret/data.arrow", "/etc/x.arrow", "sub/data.arrow", "..", "", 3, "a\\b", "a::b", "%2e%2e%2fx"]
)
def test_a_saved_data_set_names_no_file_outside_its_folder(tmp_path: Path, name: Any) -> None:
    saved(tmp_path / "secret", table("mine")).joinpath("data-00000-of-00001.arrow").rename(
        tmp_path / "secret" / "data.arrow"
    )
    folder = saved(tmp_path / "theirs", table("a"))
    if name == "/etc/x.arrow":
        name = str(tmp_path / "secret" / "data.arrow")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(ConfigError, match="expected names of files in"):
        read(folder)
    both = tmp_path / "both"
    saved(both / "train", table("x"))
    (both / "dataset_dict.json").write_text(json.dumps({"splits": ["train", name]}))
    with pytest.raises(ConfigError, match="expected names of files in"):
        read(both)


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("state", '{"_data_files": [1]}', "expected names of files in .*, got null"),
        ("state", '{"_data_files": ["x"]}', "expected names of files in .*, got null"),
        ("state", '{"_data_files": [{}]}', "expected names of files in .*, got null"),
        ("state", '{"_data_files": [{"filename": {}}]}', "expected names of files in .*, got an object"),
        ("state", '{"splits": ["a"]}', "expected the list _data_files in .*state.json, got none"),
        ("state", '{"_data_files": {}, "splits": []}', "expected the list _data_files in .*state.json, got none"),
        ("state", "[]", "expected the list _data_files in .*state.json, got none"),
        ("dataset_dict", '{"_data_files": []}', "expected the list splits in .*dataset_dict.json, got none"),
        ("dataset_dict", '{"splits": [1, "b"]}', "expected names of files in .*, got an integer"),
        ("dataset_dict", '{"splits": ["' + "b" * 5000 + '"]}', "expected one of b{400}, got 'a'"),
    ],
)
def test_a_damaged_list_of_a_saved_data_set_is_named(tmp_path: Path, name: str, body: str, message: str) -> None:
    (tmp_path / f"{name}.json").write_text(body)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, split="a" if name == "dataset_dict" else None)


def test_a_saved_data_set_names_a_file(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(ConfigError, match=r"expected a saved data set that names its files, got an empty list"):
        read(tmp_path)


def test_the_folder_of_a_saved_data_set_is_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolution visits each folder above, and a small JSON text may have very many names."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    names = [f"{i}.arrow" for i in range(1000)]
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    resolved: list[Path] = []
    resolve = Path.resolve
    monkeypatch.setattr(Path, "resolve", lambda path: resolved.append(path) or resolve(path))
    (source,) = find_input(InputConfig(path=str(folder))).sources
    assert source.files == tuple(str(folder / name) for name in names)
    assert len(resolved) < 10


def test_an_input_without_files_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = InputConfig(path=str(lines(tmp_path / "a.jsonl", "a")))
    empty = replace(find_input(config), sources=())
    monkeypatch.setattr(rows, "find_input", lambda _: empty)
    with pytest.raises(ConfigError, match=r"expected files of rows at .*a\.jsonl, got none"):
        list(read_rows(config))


def test_a_saved_data_set_names_no_split_and_no_file_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "theirs", table("a"))
    monkeypatch.setattr(listing, "_within", lambda *_: pytest.fail("a path was made"))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}] * 2}))
    with pytest.raises(ConfigError, match=r"got 'a.arrow' 2 times"):
        read(folder)
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["theirs"] * 3}))
    with pytest.raises(ConfigError, match=r"got 'theirs' 3 times"):
        read(tmp_path)


def test_a_saved_data_set_of_another_store_names_no_file_outside_its_folder() -> None:
    for name, data in (("secret.arrow", b"x"), ("theirs/state.json", b'{"_data_files": [{"filename": "../secret"}]}')):
        with fsspec.open(f"memory://hsx-saved/{name}", "wb") as f:
            f.write(data)
    with pytest.raises(ConfigError, match="expected names of files in"):
        read("memory://hsx-saved/theirs")


def test_a_link_out_of_a_saved_data_set_is_refused(tmp_path: Path) -> None:
    mine = saved(tmp_path / "mine", table("secret"))
    folder = saved(tmp_path / "theirs", table("a"))
    data = folder / "data-00000-of-00001.arrow"
    data.rename(folder / "real.arrow")
    data.symlink_to("real.arrow")
    assert keys(folder) == ["theirs:00000000"]  # a link inside the folder
    data.unlink()
    data.symlink_to(mine / data.name)
    with pytest.raises(ConfigError, match="a link to another folder"):
        read(folder)
    both = tmp_path / "both"
    both.mkdir()
    (both / "train").symlink_to(mine)
    (both / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(ConfigError, match="a link to another folder"):
        read(both)
    (tmp_path / "link").symlink_to(mine)
    assert keys(tmp_path / "link") == ["link:00000000"]  # the user's folder may be a link


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_text_that_is_not_utf8_costs_its_row_alone(tmp_path: Path, form: str) -> None:
    import pyarrow.parquet as pq

    texts = pa.array([b"one", b"\xff", b"three", b"four"], pa.binary()).view(pa.string())
    roles = pa.array([b"user", b"user", b"\xff", b"user"], pa.binary()).view(pa.string())
    chats = pa.ListArray.from_arrays([0, 1, 2, 3, 4], pa.StructArray.from_arrays([roles, roles], ["role", "content"]))
    whole = pa.table({"text": texts, "other": chats})
    path = tmp_path / f"in.{form}"
    if form == "parquet":
        pq.write_table(whole, path)
    else:
        with pa.ipc.new_stream(path, whole.schema) as writer:
            writer.write_table(whole)
    rows = read(path, metadata=["other"])
    assert [r.text if isinstance(r, Row) else r.reason for r in rows] == [
        "one",
        "the row's values cannot be read (UnicodeDecodeError). Correct or cast the column",
        "the row's values cannot be read (UnicodeDecodeError). Correct or cast the column",
        "four",
    ]


@pytest.mark.parametrize("name", ["b.jsonl", "b.jsonl.gz", "b.parquet", "b.arrow", "state.json", "dataset_dict.json"])
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_fifo_or_a_device_is_no_input(name: str, kind: str, tmp_path: Path) -> None:
    """Reading a fifo or a device may never end."""
    lines(tmp_path / "a.jsonl", "a0")
    if kind == "fifo":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="expected a regular file, got a FIFO, socket or device"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="expected a regular file"):
        read(f"file://{tmp_path}")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.parametrize("chain", ["zip://a.jsonl::", "zip://a.jsonl::file://", "zip://a.jsonl::simplecache::"])
def test_a_fifo_or_a_device_is_no_zip_file(chain: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="expected a regular file, got a FIFO, socket or device"):
        read(f"{chain}{path}")


def test_the_error_of_a_folder_in_place_of_a_zip_file_does_not_say_to_remove_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got Is a directory"):
        read(f"zip://a.jsonl::{tmp_path}")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("chain", ["", "file://", "zip://a.jsonl::"])
def test_a_fifo_that_replaces_a_file_is_not_read(chain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user may replace the file after its check."""
    path = tmp_path / ("a.zip" if chain.startswith("zip") else "a.jsonl")
    os.mkfifo(path)
    monkeypatch.setattr(sources, "_check_regular", lambda _: None)
    with pytest.raises(ConfigError, match="got Invalid argument"):
        read(f"{chain}{path}")


@pytest.mark.parametrize("link", ["dir", "dask", "asyncwrapper", "generic", "simplecache::dask", "memory://x"])
def test_a_chain_has_only_links_that_are_needed(link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the link dask, workers of a cluster would read the file."""
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(ConfigError, match=r"expected zip://, simplecache, filecache or blockcache before ::, got "):
        read(f"{link}::memory://x.jsonl")


@pytest.mark.parametrize("path", ["filecache::https://h/x", "zip://a::blockcache::https://h/x", "cached://x.jsonl"])
def test_a_cache_whose_list_is_unpickled_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec before 2026.6 unpickles the file ``cache`` of the cache's folder, to which others may write."""
    monkeypatch.setattr("fsspec.implementations.cache_metadata.pickle", pickle, raising=False)  # as in the old version
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(ConfigError, match=r"expected fsspec from 2026\.6 on for this cache, got .*simplecache::"):
        read(path)


@pytest.mark.parametrize("cache", ["simplecache", "filecache", "blockcache", "simplecache::blockcache"])
def test_a_local_path_behind_a_cache_is_refused(cache: str, tmp_path: Path) -> None:
    """Checks of links and FIFOs would not see the local files."""
    (tmp_path / "x.jsonl").write_text('{"text": "t"}')
    for path in (tmp_path, tmp_path / "x.jsonl"):
        with pytest.raises(ConfigError, match="without a link such as simplecache:: before it"):
            read(f"{cache}::file://{path}")


def test_a_link_before_zip_is_refused(tmp_path: Path) -> None:
    """It would hide the zip file's members from the limits of their paths."""
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as file:
        file.writestr("rows.jsonl", '{"text": "t"}')
        file.writestr("a/" * 256 + "x.jsonl", '{"text": "t"}')
    for link in ("simplecache", "filecache", "blockcache", "dir", "simplecache::blockcache"):
        with pytest.raises(ConfigError, match="whose zip:// is the first link"):
            read(f"{link}::zip://rows.jsonl::file://{tmp_path}/x.zip")
    with pytest.raises(ConfigError, match="at most 255 folders"):
        read(f"zip://rows.jsonl::simplecache::file://{tmp_path}/x.zip")


@pytest.mark.parametrize("chain", ["zip://inner.zip::", "tar://inner.zip::", "libarchive::", "tar::", "reference::"])
def test_archives_that_are_read_without_a_bound_are_not_opened(
    chain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsspec's reading of a nested zip file's directory, or of a tar file's header, expands 3 KB to gigabytes."""
    (tmp_path / "x").write_bytes(b"")
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda *_, **__: pytest.fail("opened"))
    for first in ("zip://rows.jsonl::", "simplecache::zip://rows.jsonl::", "tar://rows.jsonl::"):
        with pytest.raises(ConfigError, match=r"expected a file of rows, or one in a zip file .* Extract it"):
            read(f"{first}{chain}file://{tmp_path}/x")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_files_members_expand_in_bounded_memory(method: int, tmp_path: Path) -> None:
    """Python expands a read of a bzip2 or LZMA member in one call: 1 KB can become GiB."""
    archive = tmp_path / "x.zip"
    with zipfile.ZipFile(archive, "w", method) as file:
        file.writestr("rows.jsonl", json.dumps({"text": "t"}))
    chain = f"zip://rows.jsonl::{archive}"
    if method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        assert [row.text for row in read(chain) if isinstance(row, Row)] == ["t"]
    else:
        with pytest.raises(ConfigError, match="stored or deflated"):
            read(chain)
    with pytest.raises(ConfigError, match=r"expected a file of rows, .* got \.zip"):
        read(archive)


@pytest.mark.parametrize(
    "name", ["a.txt.tar.gz", "a.jsonl.tar.bz2", "a.tar.xz", "a.TAR.zst", "a.tar.lzma", "a.txt.txz"]
)
def test_a_compressed_archive_is_not_read_as_lines(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / name).write_bytes(b"")
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as file:
        file.writestr(name, b"")
    paths = [folder / name, f"zip://{name}::{tmp_path}/x.zip", folder, f"{folder}/*"]
    for path, form in [*((path, "text") for path in paths), *((path, "auto") for path in paths[:2])]:
        with pytest.raises(ConfigError, match=r"expected a file of rows, .* got \.t(ar|xz)\. Extract it"):
            read(path, format=form)
