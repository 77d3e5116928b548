"""What stands in a source, record by record: numbered lines, or the columns that are asked for.

Held at once: a line and a read buffer; of Parquet, the pages and dictionaries of a row group's asked columns that are
being decoded, and 256 rows of them; of Arrow, one record batch as its writer made it (in a saved data set usually a
thousand rows).
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from typing import IO, Any

from hsx_dist.config import public_url
from hsx_dist.errors import ConfigError, FormatError, Unavailable
from hsx_dist.inputs.arrow_files import open_arrow, open_parquet, with_uuids_as_text
from hsx_dist.inputs.decompress import BROKEN, FREE_BYTES, FREE_ROWS, MAX_EXPANSION, MOST_ROWS, check_expansion
from hsx_dist.inputs.row_cost import cost_of_columns, most_cost
from hsx_dist.inputs.sources import Input, InputSource

BATCH_ROWS = 256
_VALUES_AT_ONCE = 1 << 24
#: A line longer than so many times the longest that is taken ends the input; so do more empty lines in a row.
_SKIPPED, _MOST_EMPTY = 64, 100_000
_BUFFER = 1 << 20
#: Rows that a batch may have without bytes; beyond, each takes a bit of at least one asked column.
_FREE_ROWS = 1024
_BROKEN: tuple[type[Exception], ...] = (*BROKEN, zlib.error, gzip.BadGzipFile)
_READ_ERRORS: tuple[type[Exception], ...] = (*_BROKEN, FormatError, OSError)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Takes the place of a row that cannot be read; the others of its file can."""

    reason: str


def read_records(
    found: Input, source: InputSource, columns: Sequence[str], needed: Sequence[str], opened: IO[bytes] | None = None
) -> Iterator[tuple[int, Any]]:
    """(number from 0, line as bytes or a mapping of columns) of everything in ``source``; None for a line or row that
    is longer than ``input.max_row_bytes``, ``Unreadable`` for a row of a table that has no Python values.

    Args:
        columns: what is read of a columnar file, as far as it has them.
        needed: of which it must have one.
        opened: the source's first file, if it is open already.

    Raises:
        FormatError: a file is broken; Unavailable: the store failed; both with the number of the last row read.
        ConfigError: a file has none of the needed columns; pyarrow is missing.
    """
    number, at, stored = -1, 0, 0
    lines = source.format in ("jsonl", "text")
    for path in source.files:
        shown = public_url(path)
        try:
            with ExitStack() as stack:
                file = stack.enter_context(opened or found.open(path, compressed=lines))
                opened = None
                if not lines:
                    stored += file.seek(0, io.SEEK_END)
                    file.seek(0)
                left = max(FREE_ROWS, MOST_ROWS * stored) - at
                items: Iterator[tuple[int, Any]] = (
                    _lines(file, found.max_row_bytes, found.stored_bytes(path))
                    if lines
                    else enumerate(
                        _columnar(file, source.format, columns, needed, shown, most_cost(found.max_row_bytes), left),
                        start=at,
                    )
                )
                for number, item in items:
                    if source.format != "text" or item is None or item.strip():
                        yield number, item
            at = number + 1
        except ConfigError:  # some are OSErrors
            raise
        except _READ_ERRORS as e:
            raise _error_of(e, shown, number) from e


def _error_of(e: Exception, shown: str, number: int) -> Exception:
    """The error of reading a file, with its name and the last row that was read."""
    if isinstance(e, _BROKEN):
        return FormatError(
            f"expected {shown} to be whole, came broken compressed data after row {number} ({type(e).__name__}); "
            "write or copy the file again"
        )
    if isinstance(e, FormatError):
        return FormatError(f"{shown}, after row {number}: {e}")
    return Unavailable(
        f"expected to read {shown} to its end, came {type(e).__name__} after row {number}; try again when the store "
        "answers (rows already stored are skipped)"
    )


def _lines(file: IO[bytes], most: int, stored: int | None) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines; ``None`` for one that is too long. Empty lines at the end of the file are no rows.

    A line that is far too long, very many empty lines, and more lines and bytes than ``stored`` ones should hold, are
    errors: compressed, they cost their author nothing.
    """
    number, empty, made = -1, 0, 0
    most_lines, most_made = inf, inf
    if stored is not None:
        most_lines, most_made = max(FREE_ROWS, MOST_ROWS * stored), max(FREE_BYTES, MAX_EXPANSION * stored)
    while line := file.readline(most + 1):
        number += 1
        made += len(line)
        if number >= most_lines or made > most_made:
            raise FormatError(
                f"expected at most {MOST_ROWS} lines and {MAX_EXPANSION} bytes for each stored byte, got more beyond "
                f"{FREE_ROWS} lines or {FREE_BYTES} bytes. Give the file decompressed"
            )
        if len(line) <= most and not line.strip():
            empty += 1
            if empty > _MOST_EMPTY:
                raise FormatError(f"expected rows, got more than {_MOST_EMPTY} empty lines in a row. Remove them")
            continue
        for i in range(empty):
            yield number - empty + i, b""
        empty = 0
        if len(line) > most:
            skipped = len(line)
            while line and not line.endswith(b"\n"):
                line = file.readline(min(most, _BUFFER))
                skipped += len(line)
                if skipped > _SKIPPED * most:
                    raise FormatError(
                        f"expected lines of at most {most} bytes, got one of more than {skipped}. Split "
                        "the line, or raise input.max_row_bytes"
                    )
            made += skipped - most - 1
            yield number, None
        else:
            yield number, line


def require_pyarrow() -> None:
    """Raises ConfigError where pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise ConfigError(
            "input.format: expected pyarrow to be installed, which reads Parquet and Arrow, found nothing; install "
            "hsx-dist[parquet]"
        ) from None


def _columnar(
    file: IO[bytes], form: str, columns: Sequence[str], needed: Sequence[str], shown: str, most: int, left: int
) -> Iterator[Any]:
    """The rows; ``left``: how many the source may still have."""
    require_pyarrow()
    import pyarrow as pa

    try:
        if form == "parquet":
            batches = _parquet(file, columns, needed, shown, most)
        else:
            batches = _arrow(file, columns, needed, shown)
        for batch in batches:
            if batch.num_rows > _FREE_ROWS + 8 * batch.nbytes:
                raise FormatError(f"expected bytes for each of {batch.num_rows} rows, got {batch.nbytes} bytes in all")
            left -= batch.num_rows
            if left < 0:
                raise FormatError(
                    f"expected at most {MOST_ROWS} rows for each stored byte, got more beyond {FREE_ROWS}. Write the "
                    "rows without repetition"
                )
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield from _rows(with_uuids_as_text(batch.slice(start, BATCH_ROWS)), most)
    except (ConfigError, FormatError):
        raise
    except (pa.ArrowException, ValueError, LookupError, MemoryError, OSError) as e:
        if isinstance(e, OSError) and "Expected to be able to read" not in str(e):
            raise  # the store's; that one is Arrow's own word for a file that was cut off
        raise FormatError(
            f"expected {shown} to be a whole {form} file, got: {_first_line(e)}; write or copy the file "
            "again, or set input.format"
        ) from e


def _rows(batch: Any, most: int) -> Iterator[Any]:
    """Rows of a RecordBatch, as many at once as take ``most`` bytes; None for a row that takes more."""
    if cost_of_columns(batch) <= most:
        yield from _records(batch)
    elif batch.num_rows == 1:
        yield None
    else:
        half = batch.num_rows // 2
        yield from _rows(batch.slice(0, half), most)
        yield from _rows(batch.slice(half), most)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _checked(batch: Any) -> Any:
    """A record batch whose offsets and lengths are within its buffers: Arrow believes what a file says.

    Text that is not UTF-8 is left to the row that has it.
    """
    import pyarrow as pa

    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as e:
        if "Invalid UTF8" not in str(e):
            raise
        for column in batch.columns:
            column.view(_as_bytes(column.type)).validate(full=True)
    return batch


def _as_bytes(kind: Any) -> Any:
    """The Arrow type with binary in the place of text."""
    import pyarrow as pa

    types = pa.types
    if types.is_string(kind) or types.is_string_view(kind):
        return pa.binary() if types.is_string(kind) else pa.binary_view()
    if types.is_large_string(kind):
        return pa.large_binary()
    if types.is_struct(kind):
        return pa.struct([kind.field(i).with_type(_as_bytes(kind.field(i).type)) for i in range(kind.num_fields)])
    if types.is_map(kind):
        return pa.map_(_as_bytes(kind.key_type), _as_bytes(kind.item_type))
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _as_bytes(kind.value_type), kind.ordered)
    for is_kind, make in ((types.is_list, pa.list_), (types.is_large_list, pa.large_list)):
        if is_kind(kind):
            return make(kind.value_field.with_type(_as_bytes(kind.value_type)))
    if types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_as_bytes(kind.value_type)), kind.list_size)
    return kind


def _parquet(file: IO[bytes], columns: Sequence[str], needed: Sequence[str], shown: str, most: int) -> Iterator[Any]:
    parquet = open_parquet(file)
    chosen = _chosen(parquet.schema_arrow.names, columns, needed, shown)
    packed, values = _claims(parquet.metadata, set(chosen), most, shown)
    if packed:
        # Otherwise Arrow copies a text to each row that refers to it: a KiB of a file can be 256 times 16 MiB.
        parquet = open_parquet(file, packed)
    rows = max(1, min(BATCH_ROWS, _VALUES_AT_ONCE // max(values, 1)))
    return parquet.iter_batches(batch_size=rows, columns=chosen)


def _claims(metadata: Any, chosen: set[str], most: int, shown: str) -> tuple[list[str], int]:
    """Columns of texts that are stored as references, and the most values of a row, on average over a row group."""
    packed: dict[str, None] = {}
    values = 0
    for g in range(metadata.num_row_groups):
        group = metadata.row_group(g)
        for c in range(group.num_columns):
            column = group.column(c)
            if column.path_in_schema.partition(".")[0] not in chosen:
                continue
            if column.has_dictionary_page and column.physical_type == "BYTE_ARRAY":
                packed[column.path_in_schema] = None
            each = -(-column.num_values // max(group.num_rows, 1))
            if each > most:
                raise FormatError(
                    f"expected rows of at most {most} bytes in {shown}, got {each} values a row in row group {g}, "
                    f"column {column.path_in_schema[:80]}. Split its rows, or raise input.max_row_bytes"
                )
            where = f"row group {g}, column {column.path_in_schema[:80]} of {shown}"
            check_expansion(column.total_uncompressed_size, column.total_compressed_size, where)
            values = max(values, each)
    return list(packed), values


def _arrow(file: IO[bytes], columns: Sequence[str], needed: Sequence[str], shown: str) -> Iterator[Any]:
    schema, read = open_arrow(file)
    return map(_checked, read(_chosen(schema.names, columns, needed, shown)))


def _chosen(there: Sequence[str], columns: Sequence[str], needed: Sequence[str], shown: str) -> list[str]:
    if not set(needed) & set(there):
        raise ConfigError(
            f"input: expected one of the columns {', '.join(needed)} in {shown}, came {', '.join(there)[:400]}; name "
            "yours with input.text, input.messages or input.token_ids"
        )
    return [name for name in dict.fromkeys(columns) if name in there]


def _records(batch: Any) -> list[Any]:
    """The rows of a record batch as mappings; ``Unreadable`` for a row that has no Python values (a date after the
    year 9999, a text that is not UTF-8, nanoseconds, a deeply nested type)."""
    try:
        found: list[Any] = batch.to_pylist()
        return found
    except Exception as e:  # noqa: BLE001 (each type of Arrow has its own)
        if batch.num_rows == 1:
            return [Unreadable(f"the row's values cannot be read ({type(e).__name__}); correct or cast the column")]
        return [row for i in range(batch.num_rows) for row in _records(batch.slice(i, 1))]
