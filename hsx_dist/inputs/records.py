"""Reads an input as batches of numbered records: lines, or the requested columns.

Memory in use: for lines, a batch and a read buffer. For Parquet, a batch of rows, and the pages and dictionaries of the
row group's requested columns. For Arrow, one record batch as it was written (in a saved data set usually a thousand
rows).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from zipfile import BadZipFile

from hsx_dist.config import public_url
from hsx_dist.errors import FormatError, HsxError, Unavailable
from hsx_dist.inputs.allowance import Allowance
from hsx_dist.inputs.decompress import BROKEN
from hsx_dist.inputs.lines import read_lines
from hsx_dist.inputs.row_cost import most_cost
from hsx_dist.inputs.sources import Input
from hsx_dist.inputs.store_file import StoreFile
from hsx_dist.inputs.tables import BATCH_ROWS, read_columns

#: Bytes of rows that end a batch before it has `BATCH_ROWS`.
_BATCH_BYTES = 1 << 20
_BROKEN: tuple[type[Exception], ...] = (*BROKEN, BadZipFile)


class RecordBatch(NamedTuple):
    """Consecutive records of a source: (number from 0, line as bytes or a mapping of columns). None for a line or row
    that is longer than ``input.max_row_bytes``, ``Unreadable`` for a row of a table that has no Python values.

    ``label`` and ``format`` are the source's; ``shown`` is the file, for messages. Each file begins with a batch
    without records, when the file is open.
    """

    label: str
    format: str
    shown: str
    records: list[tuple[int, Any]]
    #: Labels of all sources, only in the first batch of the first file.
    labels: tuple[str, ...] = ()


def read_batches(found: Input, columns: Sequence[str], needed: Sequence[str]) -> Iterator[RecordBatch]:
    """Yield all records of the input's sources, in order.

    Args:
        columns: the columns to read from a columnar file, if it has them.
        needed: the file must have one of these.

    Raises:
        FormatError: a file is broken; it names the last row read.
        Unavailable: the store failed.
        ConfigError: a file cannot be opened or has none of the needed columns; pyarrow is missing.
    """
    labels = tuple(source.label for source in found.sources)
    allowance = Allowance(found.most_stored)
    for source in found.sources:
        number, at = -1, 0
        lines = source.format in ("jsonl", "text")
        for path in source.files:
            shown, table = public_url(path), None
            try:
                stored = found.stored_bytes(path)
                allowance.begin(stored)
                with ExitStack() as stack:
                    file = stack.enter_context(found.open(path, compressed=lines, allowance=allowance))
                    yield RecordBatch(source.label, source.format, shown, [], labels)
                    labels = ()
                    if lines:
                        items = read_lines(file, found.max_row_bytes, allowance)
                        text = source.format == "text"
                        batches = _grouped((n, x) for n, x in items if not text or x is None or x.strip())
                    else:
                        table = StoreFile(file, shown, stored, allowance.expand)
                        most = most_cost(found.max_row_bytes)
                        batches = read_columns(table, source.format, columns, needed, shown, most, allowance, at)
                    for batch in batches:
                        number = batch[-1][0]
                        yield RecordBatch(source.label, source.format, shown, batch)
                at = number + 1
            except FormatError as e:
                if table is not None and table.failed is not None:
                    raise _read_error(table.failed, shown, number) from None
                raise FormatError(f"{shown}, after row {number}: {e}") from e
            except (HsxError, MemoryError):
                raise
            except Exception as e:  # noqa: BLE001 (each file system has its own; their texts may hold signed URLs)
                raise _read_error(e, shown, number) from None


def _read_error(error: Exception, shown: str, number: int) -> HsxError:
    """Convert an error of a file system or a decompressor to an error without its text. Errors of this package stay."""
    kind = type(error).__name__
    if isinstance(error, HsxError):
        return error
    if isinstance(error, _BROKEN):
        return FormatError(
            f"expected {shown} to be whole, got broken compressed data after row {number} ({kind}). Write or copy the "
            "file again"
        )
    return Unavailable(
        f"expected to read {shown} to its end, got {kind} after row {number}. Try again when the store answers: stored "
        "rows are skipped"
    )


def _grouped(items: Iterable[tuple[int, bytes | None]]) -> Iterator[list[tuple[int, Any]]]:
    """Yield batches of lines. Lines before an error are yielded before the error is raised."""
    batch: list[tuple[int, Any]] = []
    size = 0
    try:
        for item in items:
            batch.append(item)
            size += len(item[1] or b"")
            if len(batch) == BATCH_ROWS or size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
    except Exception:
        if batch:
            yield batch
        raise
    if batch:
        yield batch
