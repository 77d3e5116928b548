"""Reads rows of Parquet and Arrow files: the requested columns, as batches of Python values.

Arrow does not check sizes, counts and offsets in such a file. A wrong value may end the process, so these files are
read in a child process (``reader``) with limited memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hsx_dist.errors import ConfigError, FormatError, HsxError, install_extra
from hsx_dist.inputs.allowance import Allowance
from hsx_dist.inputs.arrow_files import (
    check_fields,
    open_arrow,
    open_parquet,
    refuse_parquet_json,
    uuid_columns,
    with_uuids_as_text,
)
from hsx_dist.inputs.joined import refuse_joined_parquet
from hsx_dist.inputs.maps import Converters, converters
from hsx_dist.inputs.parquet_pages import ParquetPages, has_old_writer, stored_values
from hsx_dist.inputs.row_cost import cost_of_columns, referenced_bytes
from hsx_dist.inputs.store_file import StoreFailed, StoreFile
from hsx_dist.inputs.times import CHANGED_TIME, TimeChecks, rows_of_changed_times, time_checks
from hsx_dist.text import bounded, head

#: The first version of pyarrow with ``arrow_extensions_enabled``. Its memory pool returns the sum of all allocations.
_PYARROW = 21
#: Rows of a batch. Its bytes have other limits.
BATCH_ROWS = 256
#: Decoded bytes of a Parquet file's batch, estimated from the sizes of the requested columns in its row group.
_DECODED_BYTES = 64 << 20
#: Least bytes of a decoded value of Parquet: its two levels.
_LEAST_VALUE = 4
#: Parts of the allowance as which a row group of Parquet counts: it takes a third of a millisecond.
_GROUP_PARTS = 8
#: Rows that a batch may have without bytes. Each further row must take at least a bit of one requested column.
_FREE_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Replaces a row that cannot be read, in a file whose other rows can be read."""

    reason: str


def require_pyarrow() -> None:
    """Raise ConfigError unless pyarrow is installed, in a version that has what the reader uses."""
    try:
        import pyarrow as pa
    except ImportError:
        found = "no such package"
    else:
        if int(pa.__version__.split(".")[0]) >= _PYARROW:
            return
        found = f"version {pa.__version__}"
    raise ConfigError(
        f"input.format: expected the package pyarrow of version {_PYARROW} or later, which reads Parquet and Arrow, "
        f"got {found}. " + install_extra("parquet")
    )


def read_columns(
    file: StoreFile,
    form: str,
    columns: Sequence[str],
    needed: Sequence[str],
    shown: str,
    most: int,
    allowance: Allowance,
    at: int,
) -> Iterator[list[tuple[int, Any]]]:
    """Yield batches of the rows, numbered from ``at``. ``most``: limit of a row's cost."""
    require_pyarrow()
    import pyarrow as pa

    reading: _Reading | None = None
    file.expands = lambda size: allowance.expand(size, parts=1)
    try:
        batches = _parquet if form == "parquet" else _arrow
        for batch in batches(file, columns, needed, shown, allowance):
            reading = reading or _Reading.of(batch.schema)  # all batches have one schema
            if batch.num_rows > _FREE_ROWS + 8 * batch.nbytes:
                raise FormatError(
                    f"expected bytes for each of {batch.num_rows} rows, got {batch.nbytes} bytes in all. Write the "
                    "file again"
                )
            allowance.take(rows=batch.num_rows)
            for start in range(0, batch.num_rows, BATCH_ROWS):
                part = with_uuids_as_text(batch.slice(start, BATCH_ROWS), reading.uuids)
                for rows, cost in _rows(part, most, reading):
                    allowance.take(cost=cost)
                    yield list(enumerate(rows, at))
                    at += len(rows)
    except StoreFailed as e:
        raise e.error from None
    except (pa.ArrowException, ValueError, LookupError, OSError) as e:
        if isinstance(e, (HsxError, MemoryError)):
            raise
        raise FormatError(
            f"expected {shown} to be a whole {form} file, got: {_first_line(e)}. Write or copy the file "
            "again, or set input.format"
        ) from e


@dataclass(frozen=True, slots=True)
class _Reading:
    """What the types of a file's columns demand. Made once for a file, because a column may have thousands of types."""

    uuids: Sequence[str]
    convert: Converters
    times: TimeChecks

    @classmethod
    def of(cls, schema: Any) -> _Reading:
        return cls(uuid_columns(schema), converters(schema), time_checks(schema))


def _rows(batch: Any, most: int, reading: _Reading) -> Iterator[tuple[list[Any], int]]:
    """Yield rows of Arrow's RecordBatch, as many at once as take ``most`` bytes, and their cost.

    Yields None for a row that takes more. It costs ``most``: few bytes may back very many such rows, and each takes
    time.
    """
    cost = cost_of_columns(batch, most)
    if cost <= most:
        yield _records(batch, reading), cost
    elif batch.num_rows == 1:
        yield [None], most
    else:
        half = batch.num_rows // 2
        yield from _rows(batch.slice(0, half), most, reading)
        yield from _rows(batch.slice(half), most, reading)


def _first_line(error: BaseException) -> str:
    return bounded((str(error).splitlines() or [type(error).__name__])[0], 200)


def _check(column: Any) -> None:
    """Check a column's offsets and lengths, which Arrow does not check when it reads a file.

    Accepts values that their type forbids, such as text that is not UTF-8: only their rows are refused, later. Accepts
    any index of a dictionary in a structure that is null: Arrow writes 0 there, also for an empty dictionary.
    """
    import pyarrow as pa

    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        _check_used(column.view(_with_any_value(column.type)))


def _check_used(column: Any) -> None:
    """Check the offsets and lengths of a column, but not of values in structures that are null."""
    import pyarrow as pa

    types, kind = pa.types, column.type
    if types.is_struct(kind):
        for values in column.flatten():  # null where the structure is
            _check_used(values)
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        children = [column.keys, column.items] if types.is_map(kind) else [column.values]
        offsets = pa.large_list(pa.null()) if types.is_large_list(kind) else pa.list_(pa.null())
        pa.Array.from_buffers(
            *(offsets, len(column), column.buffers()[:2]), offset=column.offset, children=[pa.nulls(len(children[0]))]
        ).validate(full=True)
        for values in children:
            _check_used(values)
    else:
        column.validate(full=True)


def _new_part(column: Any, known: dict[str, Any], name: str) -> Any:
    """Return a column of an Arrow batch to check and count: without its dictionary if that is the one in ``known``.

    All batches of a file share a dictionary, and each check reads the whole dictionary.
    """
    import pyarrow as pa

    if not pa.types.is_dictionary(column.type):
        return column
    before, known[name] = known.get(name), column.dictionary
    if before is None or _memory(before) != _memory(known[name]):
        return column
    return pa.DictionaryArray.from_arrays(column.indices, pa.nulls(len(before)), safe=False)


def _memory(values: Any) -> tuple[int, list[tuple[int, int] | None]]:
    """Return an array's length, and where its buffers are: equal for two arrays only if they are the same."""
    return len(values), [None if buffer is None else (buffer.address, buffer.size) for buffer in values.buffers()]


def _with_any_value(kind: Any) -> Any:
    """Return the Arrow type of the same layout that permits each value: binary for text, integers for dates."""
    import pyarrow as pa

    def inside(field: Any) -> Any:
        return field.with_type(_with_any_value(field.type))

    types = pa.types
    if types.is_string(kind) or types.is_string_view(kind):
        return pa.binary() if types.is_string(kind) else pa.binary_view()
    if types.is_large_string(kind):
        return pa.large_binary()
    if types.is_time(kind) or types.is_date(kind):
        return pa.int32() if kind.bit_width == 32 else pa.int64()
    if types.is_decimal(kind):
        return pa.binary(kind.byte_width)
    if types.is_struct(kind):
        return pa.struct([inside(field) for field in kind])
    if types.is_map(kind):
        return pa.map_(inside(kind.key_field), inside(kind.item_field), kind.keys_sorted)
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _with_any_value(kind.value_type), kind.ordered)
    if types.is_fixed_size_list(kind):
        return pa.list_(inside(kind.value_field), kind.list_size)
    if types.is_list(kind):
        return pa.list_(inside(kind.value_field))
    return pa.large_list(inside(kind.value_field)) if types.is_large_list(kind) else kind


def _parquet(
    file: StoreFile, columns: Sequence[str], needed: Sequence[str], shown: str, allowance: Allowance
) -> Iterator[Any]:
    parquet = open_parquet(file)
    refuse_joined_parquet(file, file.size, parquet.metadata)
    chosen = _chosen(parquet.schema_arrow.names, columns, needed, shown)
    check_fields(parquet.schema_arrow, chosen)
    # Once: pyarrow makes this list again for each access. The schema's paths join names by dots, which names may have.
    paths = parquet.reader.column_paths
    leaves = {i: parquet.metadata.schema.column(i) for i, (name, *_) in enumerate(paths) if name in chosen}
    refuse_parquet_json(leaves.values())
    first = {paths[leaf][0]: leaf for leaf in reversed(leaves)}
    groups = [parquet.metadata.row_group(i) for i in range(parquet.metadata.num_row_groups)]
    _require_counts(parquet.metadata, groups, leaves, shown)
    _require_sizes(groups, leaves, file.size)
    old_writer = has_old_writer(parquet.metadata)
    # One row group at a time: Arrow cannot join nested dictionaries of two groups in a batch.
    for i, group in enumerate(groups):
        if not group.num_rows:
            continue
        allowance.expand(parts=_GROUP_PARTS)
        # By the bytes that the allowance counts: a wrong size of a whole group could make batches of one row for free.
        row = sum(_decoded_bytes(group.column(leaf)) for leaf in leaves) // group.num_rows
        rows = max(1, min(BATCH_ROWS, _DECODED_BYTES // max(row, 1)))
        chunks = ((schema, group.column(leaf)) for leaf, schema in leaves.items())
        pages = ParquetPages(chunks, file, _decoded_bytes, allowance, old_writer=old_writer)
        file.after_read = pages.count
        missing = group.num_rows
        left = {name: group.column(leaf).num_values for name, leaf in first.items()}
        # Threads would fetch the columns in any order, and each step back in a file on a server fetches bytes again.
        for batch in parquet.reader.iter_batches(rows, [i], list(leaves), use_threads=False):
            # Also the dictionaries, which Arrow copies for each batch.
            allowance.take(allocated=sum(map(referenced_bytes, batch.columns)))
            missing -= batch.num_rows
            for name in first:
                left[name] -= stored_values(batch.column(name))
            yield batch
        # Arrow takes the end of a column chunk's pages for the end of its rows, and leaves out values of further rows.
        if missing or any(left.values()):
            raise FormatError(
                f"expected row group {i} of {shown} to have the rows and values that its footer counts, got "
                f"{group.num_rows - missing} rows of {group.num_rows} with other values. Write or copy the file again"
            )
        pages.finish()


def _require_counts(metadata: Any, groups: Sequence[Any], leaves: Mapping[int, Any], shown: str) -> None:
    """Raise FormatError unless a footer's counts agree: Arrow reads as many rows of a group as its count says."""
    repeated = {i for i, leaf in leaves.items() if leaf.max_repetition_level}
    agree = all(
        group.column(i).num_values == group.num_rows or (i in repeated and group.num_rows)
        for group in groups
        for i in leaves
    )
    if not agree or sum(group.num_rows for group in groups) != metadata.num_rows:
        raise FormatError(
            f"expected {shown} to be a whole parquet file, got a footer with contradicting numbers of rows. Write or "
            "copy the file again"
        )


def _require_sizes(groups: Sequence[Any], leaves: Iterable[int], size: int) -> None:
    """Raise FormatError if a footer's column chunks overlap. Arrow reads as many bytes of one as the footer says."""
    if sum(max(group.column(i).total_compressed_size, 0) for group in groups for i in leaves) > size:
        raise FormatError(
            f"expected column chunks of at most {size} bytes, the file's size, got more: they overlap. Write or copy "
            "the file again"
        )


def _decoded_bytes(chunk: Any) -> int:
    """Return the bytes to which a column chunk decodes, as its footer says.

    Run lengths of equal values take no bytes, so each value counts.
    """
    return max(int(chunk.total_uncompressed_size), _LEAST_VALUE * int(chunk.num_values), 0)


def _arrow(
    file: StoreFile, columns: Sequence[str], needed: Sequence[str], shown: str, allowance: Allowance
) -> Iterator[Any]:
    import pyarrow as pa

    pool = pa.default_memory_pool()
    allocated = pool.total_bytes_allocated()

    def count_allocated() -> None:
        nonlocal allocated
        before, allocated = allocated, pool.total_bytes_allocated()
        allowance.take(allocated=allocated - before)

    # A batch shows neither the dictionaries that others replaced before it, nor those of other columns. Arrow decodes
    # these too, each before the next read. Checked when bytes have arrived: Arrow allocates the memory of a read first.
    file.at_read = count_allocated
    schema, read = open_arrow(file)
    chosen = _chosen(schema.names, columns, needed, shown)
    check_fields(schema, chosen)
    known: dict[str, Any] = {}
    for batch in read(chosen):
        batch.validate()
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            part = _new_part(column, known, name)
            allowance.take(decoded=referenced_bytes(part))  # all that was decoded, also what no row uses
            _check(part)
        yield batch
    count_allocated()


def _chosen(there: list[str], columns: Sequence[str], needed: Sequence[str], shown: str) -> list[str]:
    """Return the requested columns of a file in its order: a step back in a file on a server fetches bytes again."""
    if not set(needed) & set(there):
        raise ConfigError(
            f"input: expected one of the columns {', '.join(needed)} in {shown}, got "
            f"{head(', '.join(there), 400)}. Name yours with input.text, input.messages or input.token_ids"
        )
    chosen = [name for name in dict.fromkeys(there) if name in columns]
    if twice := [name for name in chosen if there.count(name) > 1]:
        raise ConfigError(f"input: expected one column {twice[0]} in {shown}, got several. Rename or remove the others")
    return chosen


def _records(batch: Any, reading: _Reading) -> list[Any]:
    """Return the rows of a record batch as mappings, and maps as mappings.

    A row without Python values becomes ``Unreadable``. It has a date after the year 9999, text that is not UTF-8,
    nanoseconds, a changed time, a map with a key twice, or a deeply nested type.
    """
    changed = rows_of_changed_times(batch, reading.times)  # of all rows at once, which visits each type once
    found = _values(batch, reading.convert)
    for i in changed:
        found[i] = Unreadable(CHANGED_TIME)
    return found


def _values(batch: Any, convert: Converters) -> list[Any]:
    try:
        found: list[Any] = batch.to_pylist()
        for name, of_value in convert.items():
            for row in found:
                row[name] = of_value(row[name])
        return found
    except MemoryError:
        raise  # not the row's fault
    except Exception as e:  # noqa: BLE001 (each type of Arrow has its own)
        if batch.num_rows == 1:
            why = "a map has a key twice" if isinstance(e, KeyError) else type(e).__name__
            return [Unreadable(f"the row's values cannot be read ({why}). Correct or cast the column")]
        return [row for i in range(batch.num_rows) for row in _values(batch.slice(i, 1), convert)]
