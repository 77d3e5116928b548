"""Open Parquet and Arrow input without Arrow's extension types.

A column's extension type is named in the file. Arrow gives the file's bytes to the type of that name if the process has
registered one, and Ray Data registers types that unpickle. Arrow looks the types up while it opens a file, so their
names are overwritten in the schema before Arrow sees it. Each column then has its storage type.
"""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any
from uuid import UUID

from hsx_dist.errors import FormatError
from hsx_dist.inputs.arrow_messages import Messages, check_schema_message

#: The key under which a field's metadata names its extension type. All of Arrow's schemas hold it as these bytes.
_EXTENSION = b"ARROW:extension:name"
#: The key under which Parquet's footer keeps the Arrow schema, in base64.
_ARROW_SCHEMA = b"ARROW:schema"
# As long as the key, and without a character of it: no other place of the schema moves, and no new key forms.
_NO_EXTENSION = b"-" * len(_EXTENSION)
_NO_ARROW_SCHEMA = b"-" * len(_ARROW_SCHEMA)
_ARROW_MAGIC, _PARQUET_MAGIC = b"ARROW1", b"PAR1"
_BUFFER = 1 << 20


def open_arrow(file: IO[bytes]) -> tuple[Any, Callable[[Sequence[str]], Iterator[Any]]]:
    """The schema of an Arrow file (also Feather version 2) or an Arrow stream, and a function that reads the record
    batches with some of its columns.

    Raises:
        pyarrow.ArrowInvalid: the file has neither format.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    footer = _footer(file, size, _ARROW_MAGIC)[1] if file.read(8).startswith(_ARROW_MAGIC) else None
    messages = Messages(file, size, footer, lambda data: data.replace(_EXTENSION, _NO_EXTENSION))
    return messages.schema, messages.batches


def with_uuids_as_text(batch: Any) -> Any:
    """A record batch in which a column of Arrow's type ``arrow.uuid`` is text; its storage type is 16 bytes."""
    import pyarrow as pa

    for i, field in enumerate(batch.schema):
        if (field.metadata or {}).get(_NO_EXTENSION) == b"arrow.uuid" and field.type == pa.binary(16):
            texts = [None if value is None else str(UUID(bytes=value)) for value in batch.column(i).to_pylist()]
            batch = batch.set_column(i, field.name, pa.array(texts, pa.string()))
    return batch


def open_parquet(file: IO[bytes], read_dictionary: Sequence[str] = ()) -> Any:
    """The ``pyarrow.parquet.ParquetFile`` of ``file``; ``read_dictionary``: columns that are read as dictionaries.

    Raises:
        pyarrow.ArrowInvalid: the file is not Parquet, or its footer is encrypted.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = file.seek(0, io.SEEK_END)
    _, footer, tail = _footer(file, size, _PARQUET_MAGIC)
    metadata = _metadata(_plain_footer(footer), tail)
    file.seek(0)
    # From version 21 on, pyarrow makes extension types also of Parquet's own logical types.
    plain = {"arrow_extensions_enabled": False} if int(pa.__version__.split(".")[0]) >= 21 else {}
    # With the metadata Arrow does not read the file's own footer. Without pre_buffer, which would fetch whole row
    # groups ahead; with a buffer, pages are fetched one after another.
    how: dict[str, Any] = {"pre_buffer": False, "buffer_size": _BUFFER, "read_dictionary": list(read_dictionary)}
    return pq.ParquetFile(file, metadata=metadata, **how, **plain)


def _footer(file: IO[bytes], size: int, magic: bytes) -> tuple[int, bytes, bytes]:
    """The offset of a file's footer, its bytes, and the bytes after it: its length and ``magic``."""
    import pyarrow as pa

    after = 4 + len(magic)
    file.seek(max(size - after, 0))
    tail = file.read(after)
    if len(tail) != after or not tail.endswith(magic):
        raise pa.ArrowInvalid(f"expected {magic.decode()} at the end of the file, got {tail[-len(magic) :]!r}")
    (length,) = struct.unpack("<i", tail[:4])
    at = size - after - length
    if length <= 0 or at < len(magic):
        raise pa.ArrowInvalid(f"expected a footer within the file of {size} bytes, got one of {length}")
    file.seek(at)
    return at, file.read(length), tail


def _plain_footer(footer: bytes) -> bytes:
    """Parquet's footer with an Arrow schema that names no extension type, or without the Arrow schema."""
    hidden = footer.replace(_ARROW_SCHEMA, _NO_ARROW_SCHEMA)
    if hidden == footer:
        return footer
    if footer.count(_ARROW_SCHEMA) > 1 or _NO_ARROW_SCHEMA in footer:
        return hidden  # which of several schemas Arrow takes is not certain
    tail = len(hidden).to_bytes(4, "little") + _PARQUET_MAGIC
    text = (_metadata(hidden, tail).metadata or {}).get(_NO_ARROW_SCHEMA, b"")
    try:
        schema = base64.b64decode(text, validate=True)
        check_schema_message(schema)
    except (ValueError, FormatError):  # Arrow's class for what is damaged is a ValueError
        return hidden
    plain = base64.b64encode(schema.replace(_EXTENSION, _NO_EXTENSION))
    return footer.replace(text, plain) if len(plain) == len(text) and footer.count(text) == 1 else hidden


def _metadata(footer: bytes, tail: bytes) -> Any:
    """The metadata in ``footer``, read from a file in memory that holds only the footer."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_metadata(pa.BufferReader(_PARQUET_MAGIC + footer + tail))
    except OSError as e:  # Arrow's class for bytes that are not Thrift, too
        raise pa.ArrowInvalid(str(e)) from e
