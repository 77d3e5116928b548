"""Tables whose columns name extension types: nothing in the file is unpickled, and rows have the storage types."""

from __future__ import annotations

import base64
import json
import pickle
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from io import BytesIO
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from hsx_dist.config import InputConfig
from hsx_dist.errors import FormatError
from hsx_dist.format.manifest import RowFate
from hsx_dist.inputs.allowance import Allowance
from hsx_dist.inputs.arrow_files import check_fields, open_arrow
from hsx_dist.inputs.rows import Row, read_rows
from hsx_dist.inputs.store_file import StoreFile
from hsx_dist.inputs.tables import read_columns
from tests.unit.growth import check_linear

OWN = "hsx.test.unpickles"
#: Ray Data's types whose metadata Ray unpickles if an environment variable is set, and its type whose values are
#: pickles.
RAY_METADATA = ("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2", "ray.data.arrow_variable_shaped_tensor")
RAY_VALUES = "ray.data.arrow_pickled_object"
MESSAGES = [{"role": "user", "content": "hi"}]


class Unpickles(pa.ExtensionType):
    """A type that a library may register: its metadata is a pickle, like that of PyArrow's former PyExtensionType."""

    def __init__(self, storage: pa.DataType = pa.string()) -> None:  # noqa: B008
        super().__init__(storage, OWN)

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, serialized: bytes) -> Unpickles:
        pickle.loads(serialized)
        return cls(storage)


class _Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


class Trap:
    """Loading ``pickle`` makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.pickle = pickle.dumps(_Touch(path))

    def sprung(self) -> bool:
        found = self._path.exists()
        self._path.unlink(missing_ok=True)
        return found


@pytest.fixture
def trap(tmp_path: Path) -> Trap:
    return Trap(tmp_path / "made-by-a-pickle")


@pytest.fixture
def registered() -> Iterator[None]:
    pa.register_extension_type(Unpickles())
    yield
    pa.unregister_extension_type(OWN)


@pytest.fixture
def ray_types(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.data  # noqa: F401  (registers its types)
    from ray.data._internal.tensor_extensions import arrow

    monkeypatch.setattr(arrow, "_AUTOLOAD_CLOUDPICKLE_TENSOR_METADATA", True)


def write_parquet(path: Path, table: pa.Table) -> Path:
    pq.write_table(table, path / "in.parquet")
    return path / "in.parquet"


def write_file(path: Path, table: pa.Table, **options: Any) -> Path:
    with pa.ipc.new_file(path / "in.arrow", table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return path / "in.arrow"


def write_stream(path: Path, table: pa.Table, **options: Any) -> Path:
    with pa.ipc.new_stream(path / "in.arrow", table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return path / "in.arrow"


def write_feather(path: Path, table: pa.Table) -> Path:
    feather.write_feather(table, str(path / "in.feather"), compression="zstd")
    return path / "in.feather"


def write_data_set(path: Path, table: pa.Table) -> Path:
    (path / "set").mkdir()
    write_stream(path / "set", table)
    (path / "set" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "in.arrow"}]}))
    return path / "set"


Write = Callable[[Path, pa.Table], Path]
WRITERS: dict[str, Write] = {
    "parquet": write_parquet,
    "file": write_file,
    "stream": write_stream,
    "old file": lambda path, table: write_file(path, table, use_legacy_format=True),
    "old stream": lambda path, table: write_stream(path, table, use_legacy_format=True),
    "feather": write_feather,
    "data set": write_data_set,
}


def marked(field: pa.Field, name: str, metadata: bytes) -> pa.Field:
    """``field`` as stored in a file whose column has the extension type ``name``."""
    return field.with_metadata({"ARROW:extension:name": name, "ARROW:extension:metadata": metadata})


def hostile(name: str, metadata: bytes, content: Any = "hi") -> dict[str, pa.Table]:
    """Tables with one row, by the place of the type in them."""
    kind = pa.binary() if isinstance(content, bytes) else pa.string()
    word = marked(pa.field("content", kind), name, metadata)
    chat = pa.list_(pa.field("item", pa.struct([pa.field("role", pa.string()), word])))
    ids = marked(pa.field("token_ids", pa.list_(pa.int64())), name, metadata)
    inner = pa.field("token_ids", pa.list_(marked(pa.field("item", pa.int64()), name, metadata)))
    other = marked(pa.field("other", pa.dictionary(pa.int8(), kind)), name, metadata)
    mapped = pa.field("other", pa.map_(pa.string(), word.with_name("value")))
    text = pa.field("text", pa.string())
    columns: dict[str, tuple[list[pa.Field], list[list[Any]]]] = {
        "column": ([ids], [[[1, 2]]]),
        "list's values": ([inner], [[[1, 2]]]),
        "struct in a list": ([pa.field("messages", chat)], [[[{"role": "user", "content": content}]]]),
        "column that is not read": ([text, other], [["hi"], [content]]),
        "map's values": ([text, mapped], [["hi"], [[("a", content)]]]),
    }
    return {
        where: pa.Table.from_arrays(
            [pa.array(v, f.type) for f, v in zip(fields, values, strict=True)], schema=pa.schema(fields)
        )
        for where, (fields, values) in columns.items()
    }


PLACES = tuple(hostile("x", b""))


def read(path: Path, **settings: Any) -> list[Any]:
    return list(read_rows(InputConfig(path=str(path), **settings)))


def read_all(folder: Path, tables: dict[str, pa.Table], **settings: Any) -> dict[str, list[Any]]:
    """Write each table in all forms, and read all files in one process. Returns each table's rows."""
    (folder / "in").mkdir()
    for form, write in WRITERS.items():
        for number, table in enumerate(tables.values()):
            made = folder / "made" / f"{number} {form}"
            made.mkdir(parents=True)
            path = write(made, table)
            path.rename(folder / "in" / f"{number} {form}{path.suffix}")
    rows = read(folder / "in" / "*", **settings)
    each = len(rows) // len(tables)
    return {where: rows[number * each : (number + 1) * each] for number, where in enumerate(tables)}


def check(rows: list[Any], where: str, count: int = 1) -> None:
    expected = {"column": (None, None, [1, 2]), "list's values": (None, None, [1, 2])}
    expected["struct in a list"] = (None, MESSAGES, None)
    found = [(row.text, row.messages, row.token_ids) if isinstance(row, Row) else row for row in rows]
    assert found == [expected.get(where, ("hi", None, None))] * count


@pytest.mark.usefixtures("registered")
def test_a_registered_type_never_sees_the_files_metadata(tmp_path: Path, trap: Trap) -> None:
    for where, rows in read_all(tmp_path, hostile(OWN, trap.pickle)).items():
        check(rows, where, len(WRITERS))
    assert not trap.sprung()


@pytest.mark.usefixtures("registered")
def test_pyarrow_alone_would_unpickle_it(tmp_path: Path, trap: Trap) -> None:
    """The traps above work if the files are opened without the module, in these ways."""
    table = hostile(OWN, trap.pickle)["struct in a list"]
    for form in ("parquet", "file", "stream"):
        path = WRITERS[form](tmp_path, table)
        opened = {"parquet": pq.read_metadata, "file": pa.ipc.open_file, "stream": pa.ipc.open_stream}[form]
        opened(path.read_bytes() if form != "parquet" else path)
        assert trap.sprung()


@pytest.mark.slow  # imports Ray Data
@pytest.mark.usefixtures("ray_types")
def test_ray_datas_types_unpickle_neither_metadata_nor_values(tmp_path: Path, trap: Trap) -> None:
    first, *others = RAY_METADATA
    tables = {f"{where} of {first}": table for where, table in hostile(first, trap.pickle).items()}
    tables |= {f"{PLACES[0]} of {name}": hostile(name, trap.pickle)[PLACES[0]] for name in others}
    for name, rows in read_all(tmp_path, tables).items():
        check(rows, name.partition(" of ")[0], len(WRITERS))
    assert not trap.sprung()
    tables = hostile(RAY_VALUES, b"", trap.pickle)
    kind = marked(pa.field("text", pa.large_binary()), RAY_VALUES, b"")
    tables["text"] = pa.Table.from_arrays([pa.array([trap.pickle], kind.type)], schema=pa.schema([kind]))
    (tmp_path / "values").mkdir()
    assert all(len(rows) == len(WRITERS) for rows in read_all(tmp_path / "values", tables, metadata=["other"]).values())
    assert not trap.sprung()


@pytest.mark.slow  # imports Ray Data
@pytest.mark.usefixtures("ray_types")
def test_the_traps_for_ray_datas_types_work(tmp_path: Path, trap: Trap) -> None:
    for name in RAY_METADATA[:2]:
        with pytest.raises(Exception):  # noqa: B017 (Ray goes on with what the pickle gave)
            pq.read_table(write_parquet(tmp_path, hostile(name, trap.pickle)["column"]))
        assert trap.sprung()
    kind = marked(pa.field("text", pa.large_binary()), RAY_VALUES, b"")
    table = pa.Table.from_arrays([pa.array([trap.pickle], kind.type)], schema=pa.schema([kind]))
    pq.read_table(write_parquet(tmp_path, table)).to_pylist()
    assert trap.sprung()


@pytest.mark.slow  # imports Ray Data
@pytest.mark.usefixtures("ray_types")
def test_token_ids_that_ray_data_wrote_are_read(tmp_path: Path) -> None:
    import numpy as np
    from ray.data.extensions import ArrowTensorArray

    table = pa.table({"token_ids": ArrowTensorArray.from_numpy(np.array([[1, 2, 3], [4, 5, 6]]))})
    for write in (write_parquet, write_stream):
        assert [row.token_ids for row in read(write(tmp_path, table))] == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("extension", [False, True])
@pytest.mark.usefixtures("registered")
def test_the_other_types_of_arrows_schema_stay(tmp_path: Path, trap: Trap, extension: bool) -> None:
    """Parquet has neither durations nor time zones: they are in Arrow's schema in the footer."""
    when = datetime(2026, 1, 2, 3, tzinfo=timezone(timedelta(hours=2)))
    fields = [
        pa.field("text", pa.string()),
        pa.field("span", pa.duration("ms")),
        pa.field("when", pa.timestamp("us", tz="+02:00")),
    ]
    if extension:
        fields[0] = marked(fields[0], OWN, trap.pickle)
    values = [["hi"], [timedelta(seconds=90)], [when]]
    table = pa.Table.from_arrays(
        [pa.array(v, f.type) for f, v in zip(fields, values, strict=True)], schema=pa.schema(fields)
    )
    (row,) = read(write_parquet(tmp_path, table), metadata=["span", "when"])
    assert (row.text, row.metadata) == ("hi", {"span": 90.0, "when": "2026-01-02T03:00:00+02:00"})
    assert not trap.sprung()


@pytest.mark.parametrize(
    ("stored", "damage"),
    [
        *((False, "none"), (True, "newline"), (False, "no padding"), (True, "twice")),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in ((True, "none"), (False, "newline"), (True, "no padding"), (False, "twice"))
        ),
    ],
)
@pytest.mark.usefixtures("registered")
def test_an_arrow_schema_in_an_odd_form(tmp_path: Path, trap: Trap, stored: bool, damage: str) -> None:
    """A footer with Arrow's schema as the writer's own metadata, also twice, and not in plain base64."""
    schema = hostile(OWN, trap.pickle)["struct in a list"].schema
    text = base64.b64encode(schema.serialize().to_pybytes())
    text = {"newline": text[:40] + b"\n" + text[40:], "no padding": text.rstrip(b"=")[:-1]}.get(damage, text)
    table = hostile("x", b"")["struct in a list"]
    path = tmp_path / "in.parquet"
    with pq.ParquetWriter(path, table.schema, store_schema=stored) as writer:
        writer.write_table(table)
        # Under another key: the writer drops this one.
        writer.add_key_value_metadata({"ARROW-schema": text, "more": b"ARROW-schema" if damage == "twice" else b""})
    path.write_bytes(path.read_bytes().replace(b"ARROW-schema", b"ARROW:schema"))
    if damage in ("newline", "no padding"):
        with pytest.raises(FormatError, match="base64"):
            read(path)
    else:
        check(read(path), "struct in a list")
    assert not trap.sprung()


@pytest.mark.parametrize("form", ["parquet", "file", "stream"])
@pytest.mark.usefixtures("in_process")
def test_a_cut_table_is_a_typed_error(tmp_path: Path, form: str) -> None:
    path = WRITERS[form](tmp_path, hostile("x", b"")["column"])
    whole = path.read_bytes()
    for at in (3, 8, *([] if form == "stream" else [len(whole) - 1])):
        path.write_bytes(whole[:at])
        with pytest.raises(FormatError):
            read(path)


@pytest.mark.parametrize("form", ["parquet", "file", "stream"])
@pytest.mark.usefixtures("registered")
def test_a_changed_table_is_a_typed_error_and_runs_nothing(tmp_path: Path, trap: Trap, form: str) -> None:
    path = WRITERS[form](tmp_path, hostile(OWN, trap.pickle)["column"])
    whole = path.read_bytes()
    for at in range(len(whole) - 12, len(whole), 4):
        data = bytearray(whole)
        data[at] = 0x7F
        path.write_bytes(data)
        with suppress(FormatError):
            read(path)
        assert not trap.sprung()


# -- claims of compressed buffers ------------------------------------------------------------------------------------

#: A length whose bytes occur in no other place of a file. It is the length of each of 8 texts.
TEXT = 1_068_407


def bomb_table(*, dictionary: bool = False, column: str = "text") -> pa.Table:
    """A few compressed KiB that expand to ``8 * TEXT`` bytes in ``column``. As a dictionary: to ``TEXT``."""
    text = pa.array([f"row {i}" for i in range(8)])
    zeros = pa.array(["\0" * TEXT] * 8)
    large = zeros.dictionary_encode() if dictionary else zeros
    return pa.table({column: large} if column == "text" else {"text": text, column: large})


def claiming(path: Path, needle: int, claim: int) -> None:
    """Make every compressed buffer that claims ``needle`` bytes claim ``claim``."""
    data = path.read_bytes()
    assert needle.to_bytes(8, "little") in data
    path.write_bytes(data.replace(needle.to_bytes(8, "little"), claim.to_bytes(8, "little")))


@pytest.mark.parametrize(
    ("write", "dictionary"),
    [
        *((write_file, False), (write_stream, True)),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in ((write_file, True), (write_stream, False))),
    ],
)
@pytest.mark.parametrize("claim", [3 << 30, 1 << 62, -2])
def test_a_buffer_that_claims_too_much_takes_no_memory_of_this_process(
    tmp_path: Path, write: Callable[..., Path], dictionary: bool, claim: int
) -> None:
    table = bomb_table(dictionary=dictionary)
    path = write(tmp_path, table, compression="lz4" if claim == -2 else "zstd")
    claiming(path, TEXT if dictionary else 8 * TEXT, claim & ((1 << 64) - 1))
    with pytest.raises(
        FormatError, match=r"to be a whole arrow file|within 4.5 GiB of memory, got a reader process that ended"
    ):
        list(read_rows(InputConfig(path=str(path))))


@pytest.mark.parametrize("write", [write_file, write_stream, write_feather])
def test_columns_that_are_not_asked_for_are_neither_read_nor_expanded(tmp_path: Path, write: Write) -> None:
    path = write(tmp_path, bomb_table(column="more"), **({} if write is write_feather else {"compression": "zstd"}))
    claiming(path, 8 * TEXT, 1 << 62)
    rows = [row for row in read_rows(InputConfig(path=str(path))) if isinstance(row, Row)]
    assert [row.text for row in rows] == [f"row {i}" for i in range(8)]


def test_the_last_of_many_types_is_found_among_the_buffers(tmp_path: Path) -> None:
    n = 5
    columns = {
        "null": pa.nulls(n),
        "bool": pa.array([True] * n),
        "fixed": pa.array([b"abc"] * n, pa.binary(3)),
        "view": pa.array(["a view that is longer than twelve bytes"] * n, pa.string_view()),
        "list": pa.array([[["a"], []]] * n),
        "large_list": pa.array([[1]] * n, pa.large_list(pa.int8())),
        "list_view": pa.array([[1]] * n, pa.list_view(pa.int8())),
        "fixed_list": pa.array([["a", "b"]] * n, pa.list_(pa.string(), 2)),
        "map": pa.array([[("a", 1)]] * n, pa.map_(pa.string(), pa.int64())),
        "struct": pa.array([{"a": 1, "b": {"c": "d"}}] * n),
        "dictionary": pa.array(["a"] * n).dictionary_encode(),
        "decimal": pa.array([1] * n, pa.decimal128(10)),
        "runs": pa.RunEndEncodedArray.from_arrays(pa.array([n], pa.int32()), pa.array(["a"])),
        "sparse": pa.UnionArray.from_sparse(pa.array([0] * n, pa.int8()), [pa.array(["a"] * n)]),
        "dense": pa.UnionArray.from_dense(
            pa.array([0] * n, pa.int8()), pa.array(range(n), pa.int32()), [pa.array(["a"] * n)]
        ),
        "large": pa.array(["a"] * n, pa.large_string()),
        "text": pa.array([f"row {i}" for i in range(n)]),
    }
    for write in (write_file, write_stream):
        for compression in (None, "zstd"):
            path = write(tmp_path, pa.table(columns), compression=compression)
            data = path.read_bytes()
            for name, column in columns.items():
                with path.open("rb") as opened:
                    schema, read = open_arrow(StoreFile(opened, "x", None, Allowance().expand))
                    assert schema.names == list(columns)
                    batches = list(read([name]))
                assert [b.column(0).to_pylist() for b in batches] == [column.to_pylist()], name
            asked = [b.nbytes for b in batches]
            assert sum(asked) < len(data) / 4


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("last", ["label", "final", "tokens", "dictionary"])
def test_a_stream_that_was_cut_after_any_message_is_refused(tmp_path: Path, last: str, legacy: bool) -> None:
    """The padding of a batch's last buffer may end like the stream's mark. Arrow's reader accepts the cut."""
    column = {
        "label": pa.array([-1] * 31, pa.int32()),
        "final": pa.array([True] * 31 + [True]),
        "tokens": pa.array([[1, 2, 3]] * 31),
        "dictionary": pa.array(["a"] * 31).dictionary_encode(),
    }[last]
    batch = pa.record_batch({"text": [f"row {i}" for i in range(len(column))], last: column})
    version = pa.ipc.MetadataVersion.V4 if legacy else pa.ipc.MetadataVersion.V5
    options = pa.ipc.IpcWriteOptions(use_legacy_format=legacy, metadata_version=version)
    written, ends = BytesIO(), []
    with pa.ipc.new_stream(written, batch.schema, options=options) as writer:
        for _ in range(3):
            ends.append(written.tell())
            writer.write_batch(batch)
    ends.append(written.tell() - (4 if legacy else 8))
    path = tmp_path / "in.arrow"
    path.write_bytes(data := written.getvalue())
    assert len(read(path)) == 3 * len(column)
    for end in ends:
        path.write_bytes(data[:end])
        assert end == 0 or sum(map(len, pa.ipc.open_stream(data[:end]))) == len(column) * ends.index(end)
        with pytest.raises(FormatError, match="to be a whole arrow file"):
            read(path)
    path.write_bytes(data + b"x")
    with pytest.raises(FormatError, match="got more bytes after it"):
        read(path)


@pytest.mark.usefixtures("in_process")
def test_dictionaries_that_grow_and_change_are_read(tmp_path: Path) -> None:
    texts = [["a", "b"], ["a", "b", "c"], ["x"]]
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True, compression="zstd")
    schema = pa.schema({"text": pa.dictionary(pa.int32(), pa.string())})
    with pa.ipc.new_stream(tmp_path / "in.arrow", schema, options=options) as writer:
        for words in texts:
            column = pa.DictionaryArray.from_arrays(pa.array(range(len(words)), pa.int32()), pa.array(words))
            writer.write_batch(pa.record_batch([column], schema=schema))
    found = [row.text for row in read_rows(InputConfig(path=str(tmp_path / "in.arrow"))) if isinstance(row, Row)]
    assert found == [word for words in texts for word in words]


def test_a_uuid_is_text(tmp_path: Path) -> None:
    values = [UUID(int=7), None]
    ids = pa.array([None if v is None else v.bytes for v in values], pa.binary(16))
    table = pa.table({"text": ["a", "b"], "u": pa.ExtensionArray.from_storage(pa.uuid(), ids)})
    rows = read_all(tmp_path, {"uuids": table}, metadata=["u"])
    assert [row.metadata for row in rows["uuids"]] == [{"u": str(values[0])}, {"u": None}] * len(WRITERS)


def test_the_metadata_of_fields_is_decoded_once(tmp_path: Path) -> None:
    """Each look decodes all pairs of a field, so many batches of a field with many pairs took quadratic time."""

    def make(n: int) -> Callable[[], object]:
        schema = pa.schema([pa.field("text", pa.string(), metadata={f"{i}": "" for i in range(n)})])
        path = tmp_path / "in.arrow"
        with pa.ipc.new_stream(path, schema) as writer:
            for _ in range(n):
                writer.write_batch(pa.record_batch([["a"]], schema=schema))
        data = path.read_bytes()

        def read() -> None:
            file = StoreFile(BytesIO(data), "x", None, Allowance().expand)
            found = read_columns(file, "arrow", ["text"], ["text"], "x", 1 << 20, Allowance(), 0)
            assert sum(map(len, found)) == n

        return read

    check_linear(make, 1000)


def _wide(fields: int) -> Any:
    return pa.StructArray.from_arrays([pa.nulls(1)] * fields, [f"f{i}" for i in range(fields)])


def _read_one(path: Path, columns: dict[str, Any]) -> list[Row | RowFate]:
    table = pa.table({"text": ["a"], **columns})
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    return list(read_rows(InputConfig(path=str(path), format="arrow", metadata=["m"])))


@pytest.mark.usefixtures("in_process")
def test_requested_columns_have_few_types(tmp_path: Path) -> None:
    """Some types take time for all types in them, for each batch, also if no value has them."""
    path, others = tmp_path / "in", {f"x{i}": pa.nulls(1) for i in range(5000)}
    (row,) = _read_one(path, {"m": _wide(4094), **others})
    assert isinstance(row, Row)
    for kind in (pa.list_(_wide(4094).type), pa.map_(pa.string(), _wide(4094).type)):
        with pytest.raises(FormatError, match="at most 4096 types"):
            _read_one(path, {"m": pa.nulls(1, kind)})


@pytest.mark.usefixtures("in_process")
def test_names_of_fields_are_short(tmp_path: Path) -> None:
    """Each JSON text of a structure has its names again."""
    for length, fields in ((1 << 18, 1), (1024, 256)):
        names = [f"{i:0{length}d}" for i in range(fields)]
        fits = pa.StructArray.from_arrays([pa.nulls(1)] * fields, names)
        (row,) = _read_one(tmp_path / "in", {"m": fits.slice(0, 0).take(pa.array([None], pa.int8()))})
        assert isinstance(row, Row)
        column = pa.nulls(1, pa.list_(fits.type))
        with pytest.raises(FormatError, match="names of 262144 characters in all"):
            _read_one(tmp_path / "in", {"m": column})


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("place", ["column", "list", "dictionary"])
def test_a_long_name_of_a_time_zone_is_refused(tmp_path: Path, place: str) -> None:
    """Arrow reads the name again for each value."""
    for zone, fits in (("America/Argentina/ComodRivadavia", True), ("n" * 65, False)):
        kind: Any = pa.timestamp("us", zone)
        if place != "column":
            kind = pa.list_(kind) if place == "list" else pa.dictionary(pa.int8(), kind)
        if fits:
            assert len(_read_one(tmp_path / "in", {"m": pa.nulls(1, kind)})) == 1
        else:
            with pytest.raises(FormatError, match=r"column m: expected text, .*got the type .*nnn"):
                _read_one(tmp_path / "in", {"m": pa.nulls(1, kind)})


@pytest.mark.parametrize("zone", ["+02:00", "-07:30", "UTC", "Etc/GMT+1", "Europe/Berlin", "No/Zone", "+25:00"])
def test_an_unknown_time_zone_is_refused_before_rows(zone: str) -> None:
    """Arrow would search the machine for the zone again for each value."""
    kind = pa.timestamp("ns", zone)
    schema = pa.schema({"m": pa.list_(kind), "n": pa.dictionary(pa.int8(), kind), "other": pa.timestamp("s", "No")})
    if zone not in ("No/Zone", "+25:00"):
        check_fields(schema, ["m", "n"])
        return
    for name in ("m", "n"):
        with pytest.raises(FormatError, match=rf"column {name}: expected a time zone .* got '{re.escape(zone)}'"):
            check_fields(schema, [name])


def test_an_error_of_a_type_in_others_names_only_the_column(tmp_path: Path) -> None:
    """The joined names of many fields would take GiB."""
    odd = pa.field("o" * 50_000, pa.string(), metadata={"ARROW:extension:name": "arrow.json"})
    kind = pa.struct([odd, *(pa.field(f"{'x' * 1000}{i}", pa.null()) for i in range(100))])
    for _ in range(2):
        kind = pa.struct([pa.field("y" * 50_000, kind)])
    with pytest.raises(FormatError, match=r"column m: expected text, .* arrow\.json") as error:
        _read_one(tmp_path / "in", {"m": pa.nulls(1, kind)})
    assert len(str(error.value)) < 1000


def shared_schema(levels: int, fan: int, name: bytes = b"x", *, text: bool = True) -> bytes:
    """An Arrow message: the schema of a text and a structure. Each level refers ``fan`` times to one field table."""
    data = bytearray(4)

    def vtable(fields: list[int], size: int) -> int:
        data.extend(bytes(-len(data) % 4))
        data.extend(struct.pack(f"<{2 + len(fields)}H", 4 + 2 * len(fields), size, *fields))
        return len(data) - 4 - 2 * len(fields)

    message, schema, field = vtable([4, 6, 8, 16], 24), vtable([0, 4], 8), vtable([4, 8, 9, 12, 0, 16], 20)
    kind = vtable([], 4)

    def begin(table: int) -> int:
        data.extend(bytes(-len(data) % 8))
        data.extend(struct.pack("<i", len(data) - table))
        return len(data) - 4

    def refer(place: int) -> None:
        struct.pack_into("<I", data, place, len(data) - place)

    def vector(place: int, count: int) -> list[int]:
        data.extend(bytes(-len(data) % 4))
        refer(place)
        data.extend(struct.pack("<I", count) + bytes(4 * count))
        return list(range(len(data) - 4 * count, len(data), 4))

    def column(places: list[int], word: bytes, type_: int, count: int) -> list[int]:
        at = begin(field)
        for place in places:
            struct.pack_into("<I", data, place, at - place)
        data.extend(struct.pack("<IBBxxII", 0, 1, type_, 0, 0))
        data.extend(bytes(-len(data) % 4))
        refer(at + 4)
        data.extend(struct.pack("<I", len(word)) + word + b"\0")
        data.extend(bytes(-(len(data)) % 8))
        struct.pack_into("<I", data, at + 12, begin(kind) - at - 12)
        return vector(at + 16, count)

    struct.pack_into("<I", data, 0, begin(message))
    data.extend(struct.pack("<hBxIIq", 4, 1, 0, 0, 0))
    header = len(data) - 16
    struct.pack_into("<I", data, header, begin(schema) - header)
    data.extend(bytes(4))
    first, *places = vector(len(data) - 4, 2)
    column([first], b"text" if text else b"a", 5, 0)
    for level in range(levels):
        last = level == levels - 1
        places = column(places, name, 1 if last else 13, 0 if last else fan)
    data.extend(bytes(64 * 1024))  # with it the schema passes Arrow's own limit of tables
    data.extend(bytes(-len(data) % 8))
    return b"\xff\xff\xff\xff" + struct.pack("<i", len(data)) + bytes(data)


SHARED = {"many": (5, 30), "deep": (70, 1), "names": (3, 90, b"n" * 1000)}


@pytest.mark.parametrize("case", SHARED)
def test_a_schema_whose_tables_are_shared_is_read_or_refused(tmp_path: Path, case: str) -> None:
    """Arrow makes new objects for each reference: 64 KiB of a file can be tens of millions of fields."""
    path = tmp_path / "in.arrow"
    path.write_bytes(shared_schema(*SHARED[case]) + b"\xff\xff\xff\xff" + bytes(4))
    with suppress(FormatError):
        assert read(path) == []
    path.write_bytes(shared_schema(3, 4) + b"\xff\xff\xff\xff" + bytes(4))
    assert read(path) == []


@pytest.mark.parametrize("case", SHARED)
def test_such_a_schema_in_parquet_is_read_or_refused(tmp_path: Path, case: str) -> None:
    schema = pa.schema([("text", pa.string())])
    with pq.ParquetWriter(tmp_path / "in.parquet", schema, store_schema=False) as writer:
        writer.write_table(pa.table({"text": ["hi"]}, schema=schema))
        writer.add_key_value_metadata({b"ARROW:schema": base64.b64encode(shared_schema(*SHARED[case]))})
    with suppress(FormatError):
        (row,) = read(tmp_path / "in.parquet")
        assert row.text == "hi"


@pytest.mark.usefixtures("in_process")
def test_a_schema_of_many_fields_with_metadata_is_read(tmp_path: Path) -> None:
    names = ["text", *(f"column {i}" for i in range(5000))]
    fields = [pa.field(name, pa.string(), metadata={"about": f"{name}: " + "a" * 50}) for name in names]
    zone = pa.field("at", pa.timestamp("us", "Europe/Berlin"))
    schema = pa.schema([*fields, zone], metadata={"huggingface": "x" * 100_000})
    table = pa.Table.from_pylist([{"text": "hi"}], schema=schema)
    for write in (write_file, write_stream, write_parquet):
        (row,) = read(write(tmp_path, table))
        assert row.text == "hi"


@pytest.mark.usefixtures("in_process")
def test_a_stream_ends_with_its_mark_and_the_file(tmp_path: Path) -> None:
    """Arrow's reader accepts a stream that was cut between batches, and ignores a second stream after the first."""
    path, ends = tmp_path / "rows.arrow", list[int]()
    with path.open("wb") as file, pa.ipc.new_stream(file, pa.schema([("text", pa.string())])) as writer:
        for i in range(3):
            writer.write_table(pa.table({"text": [f"row {i}"]}))
            ends.append(file.tell())
    whole = path.read_bytes()
    config = InputConfig(path=str(path))
    assert len(list(read_rows(config))) == 3
    for damaged in (whole[: ends[0]], whole[: ends[1]], whole + whole, whole + b"\0"):
        path.write_bytes(damaged)
        with pytest.raises(FormatError, match="expected one stream that ends with its end-of-stream mark"):
            list(read_rows(config))


@pytest.mark.parametrize("place", ["text", "messages"])
@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_columns_of_json_are_refused(tmp_path: Path, form: str, place: str) -> None:
    """``datasets`` stores columns of mixed values so. Their storage is JSON text, in which a text has quotes."""
    named = {b"ARROW:extension:name": b"arrow.json", b"ARROW:extension:metadata": b""}
    content = pa.field("content", pa.string(), metadata=named)
    kinds = {"text": content.with_name("text"), "messages": pa.field("messages", pa.list_(pa.struct([content])))}
    values = {"text": ['"plain"'], "messages": [[{"content": '"plain"'}]]}
    found = pa.table([values[place]], schema=pa.schema([kinds[place]]))
    path = tmp_path / f"rows.{form}"
    if form == "parquet":
        pq.write_table(found, path)
    else:
        feather.write_feather(found, path)
    with pytest.raises(FormatError, match=r"column .*: expected text, .* got Arrow's type arrow\.json"):
        list(read_rows(InputConfig(path=str(path))))


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("place", ["text", "messages"])
def test_parquet_columns_of_json_without_a_schema_of_arrow_are_refused(tmp_path: Path, place: str) -> None:
    content = pa.ExtensionArray.from_storage(pa.json_(), pa.array(['"plain"']))
    message = pa.StructArray.from_arrays([content], names=["content"])
    messages = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), message)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({place: {"text": content, "messages": messages}[place]}), path, store_schema=False)
    with pytest.raises(FormatError, match=rf"column {place}.*: expected text, .* got Parquet's type JSON"):
        list(read_rows(InputConfig(path=str(path))))
    other = pa.table({"text": ["hi"], "other": content})
    pq.write_table(other, path, store_schema=False)
    (row,) = read(path)
    assert row.text == "hi"


@pytest.mark.usefixtures("in_process")
def test_old_times_of_parquet_stay_after_the_year_2262(tmp_path: Path) -> None:
    """As nanoseconds, 9999 would become 1815. Spark writes the type INT96 by default."""
    times = pa.array([datetime(9999, 1, 1, 1), datetime(2020, 1, 1, 0, 0, 0, 5)], pa.timestamp("us"))
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": ["a", "b"], "at": times}), path, use_deprecated_int96_timestamps=True)
    found = [row.metadata["at"] for row in read(path, metadata=["at"])]
    assert found == ["9999-01-01T01:00:00", "2020-01-01T00:00:00.000005"]
