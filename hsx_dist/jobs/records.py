"""What stands in a source, record by record: numbered lines, or the columns that are asked for.

Held at once: a line and a read buffer; of Parquet, the pages and dictionaries of a row group's asked columns that are
being decoded, and 256 rows of them; of Arrow, one record batch as its writer made it (in a saved data set usually a
thousand rows).
"""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Any

import zstandard

from hsx_dist.config import public_url
from hsx_dist.errors import ConfigError, FormatError, Unavailable
from hsx_dist.jobs.arrow_files import open_arrow, open_parquet
from hsx_dist.jobs.sources import Input, Source

#: A longer line is refused without being held in memory.
MAX_LINE_BYTES = 64 << 20
BATCH_ROWS = 256
_BROKEN = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zstandard.ZstdError)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Takes the place of a row that cannot be read; the others of its file can."""

    reason: str


def read_records(
    found: Input, source: Source, columns: Sequence[str], needed: Sequence[str], opened: IO[bytes] | None = None
) -> Iterator[tuple[int, Any]]:
    """(number from 0, line as bytes or a mapping of columns) of everything in ``source``; None for a line too long,
    ``Unreadable`` for a row of a table that has no Python values.

    Args:
        columns: what is read of a columnar file, as far as it has them.
        needed: of which it must have one.
        opened: the source's first file, if it is open already.

    Raises:
        FormatError: a file is broken; Unavailable: the store failed; both with the number of the last row read.
        ConfigError: a file has none of the needed columns; pyarrow is missing.
    """
    number, at = -1, 0
    lines = source.format in ("jsonl", "text")
    for path in source.files:
        shown = public_url(path)
        try:
            with ExitStack() as stack:
                file = stack.enter_context(opened or found.open(path, compressed=lines))
                opened = None
                items: Iterator[tuple[int, Any]] = (
                    _lines(file)
                    if lines
                    else enumerate(_columnar(file, source.format, columns, needed, shown), start=at)
                )
                for number, item in items:
                    if source.format != "text" or item is None or item.strip():
                        yield number, item
            at = number + 1
        except _BROKEN as e:
            raise FormatError(
                f"expected {shown} to be whole, came broken compressed data after row {number} ({type(e).__name__}); "
                "write or copy the file again"
            ) from e
        except (ConfigError, FormatError):
            raise
        except OSError as e:
            raise Unavailable(
                f"expected to read {shown} to its end, came {type(e).__name__} after row {number}; try again when the "
                "store answers (rows already stored are skipped)"
            ) from e


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines; ``None`` for one that is too long. Empty lines at the end of the file are no rows."""
    number, empty = -1, 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if not line.strip() and len(line) <= MAX_LINE_BYTES:
            empty += 1
            continue
        for i in range(empty):
            yield number - empty + i, b""
        empty = 0
        if len(line) > MAX_LINE_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES)
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


def _columnar(file: IO[bytes], form: str, columns: Sequence[str], needed: Sequence[str], shown: str) -> Iterator[Any]:
    require_pyarrow()
    import pyarrow as pa

    try:
        batches = _parquet(file, columns, needed, shown) if form == "parquet" else _arrow(file, columns, needed, shown)
        for batch in batches:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield from _records(batch.slice(start, BATCH_ROWS))
    except (pa.ArrowException, UnicodeDecodeError, OSError) as e:
        if isinstance(e, OSError) and "Expected to be able to read" not in str(e):
            raise  # the store's; that one is Arrow's own word for a file that was cut off
        raise FormatError(
            f"expected {shown} to be a whole {form} file, came: {str(e).splitlines()[0][:200]}; write or copy the file "
            "again, or set input.format"
        ) from e


def _parquet(file: IO[bytes], columns: Sequence[str], needed: Sequence[str], shown: str) -> Iterator[Any]:
    parquet = open_parquet(file)
    chosen = _chosen(parquet.schema_arrow.names, columns, needed, shown)
    return parquet.iter_batches(batch_size=BATCH_ROWS, columns=chosen)


def _arrow(file: IO[bytes], columns: Sequence[str], needed: Sequence[str], shown: str) -> Iterator[Any]:
    schema, batches = open_arrow(file)
    chosen = _chosen(schema.names, columns, needed, shown)
    return (batch.select(chosen) for batch in batches)


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
