"""Open Parquet and Arrow input without Arrow's extension types.

A column's extension type is named in the file. Arrow gives the file's bytes to the type of that name if the process has
registered one. So these files are read in a process that imports no library which registers types, and Arrow's own
types are removed from it. Each column then has its storage type.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from uuid import UUID

from hsx_dist.errors import FormatError
from hsx_dist.inputs.joined import ARROW_BEGIN, ARROW_END, ARROW_MAGIC, refuse_joined_arrow
from hsx_dist.inputs.store_file import StoreFile
from hsx_dist.text import head

_NAME = b"ARROW:extension:name"
#: Extension types that Arrow registers itself.
_CANONICAL = ("bool8", "fixed_shape_tensor", "json", "opaque", "parquet.variant", "uuid", "variable_shape_tensor")
#: Types of the requested columns of a file, also nested ones. Each batch, and each value of some types, takes time for
#: all of them, also if no value has them.
_MOST_TYPES = 4096
#: Characters of the names of all these types. Each JSON text of a structure has the names again.
_MOST_NAMES = 1 << 18
#: Characters of a time zone's name. Arrow reads the name again for each value.
_LONGEST_ZONE = 64
#: Bytes of a column that are read at once.
_BUFFER = 1 << 20


def unregister_extension_types() -> None:
    """Remove Arrow's own extension types from this process."""
    import pyarrow as pa

    for name in _CANONICAL:
        with suppress(KeyError):
            pa.unregister_extension_type(f"arrow.{name}")


def open_arrow(file: StoreFile) -> tuple[Any, Callable[[Sequence[str]], Iterator[Any]]]:
    """Return the schema of an Arrow file (also Feather version 2) or stream, and a function that reads record batches.

    The function takes the names of the columns to read.

    Raises:
        pyarrow.ArrowInvalid, OSError: the file has neither format.
        FormatError: several Arrow files were joined.
    """
    import pyarrow as pa

    is_file = file.read(len(ARROW_MAGIC)) == ARROW_MAGIC

    def reader(columns: list[int]) -> Any:
        file.seek(0)
        options = pa.ipc.IpcReadOptions(included_fields=columns)
        return pa.ipc.open_file(file, options=options) if is_file else pa.ipc.open_stream(file, options=options)

    schema = _file_schema(file) if is_file else reader([]).schema

    def batches(names: Sequence[str]) -> Iterator[Any]:
        opened = reader([i for i, name in enumerate(schema.names) if name in names])
        found = map(opened.get_batch, range(opened.num_record_batches)) if is_file else _whole_stream(file, opened)
        return (batch.select(list(names)) for batch in found)

    return schema, batches


def _file_schema(file: io.RawIOBase) -> Any:
    """Return the schema in an Arrow file's footer. Raises FormatError if the file follows another one in ``file``."""
    import pyarrow as pa

    size = file.seek(0, io.SEEK_END)
    file.seek(max(size - ARROW_END, 0))
    length = int.from_bytes(file.read(ARROW_END)[:4], "little")
    at = max(size - ARROW_END - length, 0)
    file.seek(at)
    footer = file.read(size - at) or b""
    # Arrow opens the footer alone as a file without messages, and verifies it.
    schema = pa.ipc.open_file(ARROW_BEGIN + footer).schema
    refuse_joined_arrow(file, at, footer)
    return schema


def _whole_stream(file: StoreFile, opened: Any) -> Iterator[Any]:
    """Yield the batches of a stream, which must end with its mark and the file.

    Arrow's reader accepts a stream that was cut between two batches, and ignores a second stream after the first. It
    reads until it gets the mark or no bytes. The file's last bytes do not show which: a batch may end like the mark.

    Raises:
        pyarrow.ArrowInvalid: rows are missing, or follow.
    """
    import pyarrow as pa

    yield from opened
    if not file.last_read or file.read(1):
        got = "more bytes after it" if file.last_read else "none: the stream was cut short"
        raise pa.ArrowInvalid(f"expected one stream that ends with its end-of-stream mark, got {got}")


def check_fields(schema: Any, columns: Iterable[str]) -> None:
    """Raise FormatError if requested columns have too many types, a type without support, an unknown time zone, or
    ``arrow.json``.

    Unions, list views and run-end encoded values have no support, because few bytes of them may stand for very many
    values, in ranges that overlap. Hugging Face's datasets call ``arrow.json`` ``Json``. Its storage is JSON text: the
    text ``plain`` would become the prompt ``"plain"``, with quotes.
    """
    todo = [(schema.field(name), name) for name in columns]
    types, names, zones = len(todo), 0, set[str]()
    while todo and types <= _MOST_TYPES and names <= _MOST_NAMES:
        field, name = todo.pop()
        if (field.metadata or {}).get(_NAME) == b"arrow.json":
            raise _unsupported(name, "Arrow's type arrow.json")
        if not _is_supported(field.type):
            raise _unsupported(name, f"the type {head(str(field.type), 80)}")
        if (zone := _zone(field.type)) and zone not in zones:
            _check_zone(zone, name)
            zones.add(zone)
        inner = _fields(field.type)
        types += len(inner)
        names += sum(len(f.name) for f in inner)
        todo += [(f, name) for f in inner]  # the column's name alone: joined names of many fields may take GiB
    if types > _MOST_TYPES or names > _MOST_NAMES:
        raise FormatError(
            f"expected requested columns of at most {_MOST_TYPES} types with names of {_MOST_NAMES} characters in all, "
            "with those in structures, lists and maps, got more. Request fewer columns, or store wide structures as "
            "JSON text"
        )


def _is_supported(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    if types.is_timestamp(kind):
        return kind.tz is None or len(kind.tz) <= _LONGEST_ZONE
    if types.is_dictionary(kind):
        flat = not (types.is_nested(kind.value_type) or types.is_dictionary(kind.value_type))
        return flat and _is_supported(kind.value_type)
    views = types.is_list_view(kind) or types.is_large_list_view(kind)
    return not (views or types.is_union(kind) or types.is_run_end_encoded(kind))


def _zone(kind: Any) -> str | None:
    """Return the time zone of an Arrow type of timestamps, or of a dictionary of them. Else None."""
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return kind.tz if pa.types.is_timestamp(kind) else None


def _check_zone(zone: str, name: str) -> None:
    """Raise FormatError for a time zone that Arrow does not find. It would search the machine again for each value."""
    import pyarrow as pa

    try:
        pa.scalar(0, pa.timestamp("us", zone)).as_py()
    except (pa.ArrowException, LookupError, OSError, ValueError):
        raise FormatError(
            f"column {name}: expected a time zone of this machine or an offset such as +02:00, got {zone!r}. Cast the "
            "column, for example to UTC, or install the Python package tzdata"
        ) from None


def _fields(kind: Any) -> list[Any]:
    """Return the fields in an Arrow type, without those in their types."""
    import pyarrow as pa

    if pa.types.is_map(kind):
        return [kind.key_field, kind.item_field]
    return [kind.field(i) for i in range(kind.num_fields)]


def refuse_parquet_json(leaves: Iterable[Any]) -> None:
    """Raise FormatError if a Parquet column has the logical type JSON or BSON.

    Without Arrow's schema in the file, Arrow reads such a column as text or bytes.
    """
    for leaf in leaves:
        if leaf.logical_type.type in ("JSON", "BSON"):
            raise _unsupported(leaf.path, f"Parquet's type {leaf.logical_type.type}")


def _unsupported(name: str, got: str) -> FormatError:
    return FormatError(
        f"column {name}: expected text, numbers, lists and structures, got {got}. Cast the column, or write the rows "
        "as JSONL"
    )


def uuid_columns(schema: Any) -> list[str]:
    """Return the names of the columns of Arrow's type ``arrow.uuid``, stored as 16 bytes."""
    import pyarrow as pa

    kind = pa.binary(16)
    return [f.name for f in schema if f.type == kind and (f.metadata or {}).get(_NAME) == b"arrow.uuid"]


def with_uuids_as_text(batch: Any, names: Iterable[str]) -> Any:
    """Return a record batch whose columns ``names``, which are UUIDs, are text."""
    import pyarrow as pa

    for name in names:
        i = batch.schema.get_field_index(name)
        texts = [None if value is None else str(UUID(bytes=value)) for value in batch.column(i).to_pylist()]
        batch = batch.set_column(i, name, pa.array(texts, pa.string()))
    return batch


def open_parquet(file: io.RawIOBase) -> Any:
    """Return the ``pyarrow.parquet.ParquetFile`` of ``file``.

    Raises:
        pyarrow.ArrowInvalid, OSError: the file is not Parquet, or its footer is encrypted.
    """
    import pyarrow.parquet as pq

    # Without pre_buffer, which would fetch whole row groups ahead; with a buffer, pages are fetched one after another.
    # Parquet's own logical types become no extension types. As nanoseconds, old times (INT96) after the year 2262 would
    # become dates before 1970. Checksums of pages are optional in the format. pyarrow checks them only if asked.
    return pq.ParquetFile(
        file,
        pre_buffer=False,
        buffer_size=_BUFFER,
        arrow_extensions_enabled=False,
        coerce_int96_timestamp_unit="us",
        page_checksum_verification=True,
    )
