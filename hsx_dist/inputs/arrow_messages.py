"""Arrow's IPC messages, read one by one and checked before Arrow sees them.

A compressed buffer begins with the length that it claims to expand to, and Arrow allocates that length. Here the claims
are compared with a limit first. A message is rewritten without the buffers of columns that are not asked for, so these
are neither read nor expanded. Arrow gets the bytes that were checked.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import IO, Any

from hsx_dist.errors import FormatError
from hsx_dist.inputs.decompress import check_expansion

#: Decompressed bytes of the asked columns of a record batch, and of all dictionaries.
MAX_BATCH_BYTES = 2 << 30
_CONTINUATION = b"\xff\xff\xff\xff"
_SCHEMA, _DICTIONARIES, _BATCH = 1, 2, 3
_BLOCK, _BUFFER = 24, 16
#: Tables in a schema may be shared. Arrow makes objects of its own for each reference, so each reference counts.
MAX_FIELDS, MAX_LEVELS = 10_000, 64
_TIMESTAMP = 10


class _Table:
    """A flatbuffer's table: the fields that are read here, each checked against the bytes that are there."""

    def __init__(self, data: bytes, at: int | None = None) -> None:
        self.data = data
        self.at = _number(data, 0, "<I") if at is None else at

    def place(self, field: int) -> int | None:
        """Where the field is stored; None where it has its default."""
        table = self.at - _number(self.data, self.at, "<i")
        if 4 + 2 * field >= _number(self.data, table, "<H"):
            return None
        offset = _number(self.data, table + 4 + 2 * field, "<H")
        return self.at + offset if offset else None

    def number(self, field: int, kind: str) -> int:
        at = self.place(field)
        return 0 if at is None else _number(self.data, at, kind)

    def table(self, field: int) -> _Table | None:
        at = self.place(field)
        return None if at is None else _Table(self.data, at + _number(self.data, at, "<I"))

    def tables(self, field: int) -> Iterator[_Table]:
        """The tables in a vector of them."""
        for at in self.items(field, 4):
            yield _Table(self.data, at + _number(self.data, at, "<I"))

    def items(self, field: int, size: int) -> range:
        """Where the items of a vector of structs begin."""
        at = self.place(field)
        if at is None:
            return range(0)
        at += _number(self.data, at, "<I")
        count = _number(self.data, at, "<I")
        if count * size > len(self.data) - at - 4:
            raise _invalid("a vector that is longer than its message")
        return range(at + 4, at + 4 + count * size, size)


def _number(data: bytes, at: int, kind: str) -> int:
    if not 0 <= at <= len(data) - struct.calcsize(kind):
        raise _invalid("an offset outside of its message")
    return int(struct.unpack_from(kind, data, at)[0])


def _invalid(got: str) -> Exception:
    import pyarrow as pa

    error: Exception = pa.ArrowInvalid(f"expected Arrow's messages, got {got}")
    return error


def check_schema(schema: _Table) -> None:
    """Count what Arrow makes of a schema. Each reference to a table or a text counts, also to one that is shared.

    Raises:
        FormatError: there are too many fields, too many levels, or more texts than the bytes hold.
        pyarrow.ArrowInvalid: the schema is damaged.
    """
    fields, left = 0, len(schema.data)
    todo = [(field, 1) for field in islice(schema.tables(1), MAX_FIELDS + 1)]
    left = _without_metadata(schema, 2, left)
    while todo:
        field, level = todo.pop()
        fields += 1
        if fields + len(todo) > MAX_FIELDS or level > MAX_LEVELS:
            raise FormatError(
                f"expected a schema of at most {MAX_FIELDS} fields at {MAX_LEVELS} levels, got more. Write fewer "
                "columns"
            )
        kind = field.table(3)
        zone = len(kind.items(1, 1)) if kind is not None and field.number(2, "<B") == _TIMESTAMP else 0
        left = _without_metadata(field, 6, left - len(field.items(0, 1)) - zone)
        todo += [(child, level + 1) for child in islice(field.tables(5), MAX_FIELDS + 1)]


def _without_metadata(table: _Table, field: int, left: int) -> int:
    """How many of ``left`` bytes remain without the texts of a vector of names and values."""
    for pair in table.tables(field):
        left -= 16 + len(pair.items(0, 1)) + len(pair.items(1, 1))  # a pair takes 16 bytes at least
        if left < 0:
            break
    if left < 0:
        raise FormatError("expected a schema whose texts are stored once each, got shared ones. Write the file again")
    return left


def check_schema_message(message: bytes) -> None:
    """``check_schema`` for an encapsulated message; the same errors."""
    begin = 8 if message.startswith(_CONTINUATION) else 4
    schema = _Table(message[begin:]).table(2)
    if schema is None:
        raise _invalid("a message without a schema")
    check_schema(schema)


class Messages:
    """The schema and the other messages of an Arrow file (``footer``: its footer) or stream of ``size`` bytes.
    ``clean`` removes extension types from the bytes of a schema."""

    def __init__(self, file: IO[bytes], size: int, footer: bytes | None, clean: Callable[[bytes], bytes]) -> None:
        import pyarrow as pa

        self._file, self._size = file, size
        if footer is None:
            found = self._next(0)
            if found is None:
                raise _invalid("no schema")
            schema, self._begin = clean(found[0]), found[1]
            self._blocks = None
            if _Table(schema).number(1, "<B") != _SCHEMA:
                raise _invalid("another message in the place of the schema")
            check_schema_message(_encapsulated(schema))
        else:
            root = _Table(clean(footer))
            at = root.table(1)
            if at is None:
                raise _invalid("a footer without a schema")
            check_schema(at)
            # A message whose header is the schema within the footer.
            head = struct.pack("<I5H2xihBxI4x", 16, 10, 12, 4, 6, 8, 12, root.number(0, "<h"), _SCHEMA, 8 + at.at)
            schema = head + root.data
            self._blocks = [_number(root.data, i, "<q") for field in (2, 3) for i in root.items(field, _BLOCK)]
        self._schema = _encapsulated(schema)
        try:
            self.schema = pa.ipc.open_stream(pa.py_buffer(self._schema)).schema
        except OSError as e:  # Arrow's class for a damaged schema, too. No store is read here.
            raise _invalid(str(e)) from e

    def batches(self, names: Sequence[str]) -> Iterator[Any]:
        """The record batches with the columns ``names``.

        Raises:
            FormatError: a batch or the dictionaries would take too much memory.
            pyarrow.ArrowInvalid: the messages are damaged.
        """
        import pyarrow as pa

        feed = _Feed()
        feed.add(self._schema)
        wanted = [i for i, name in enumerate(self.schema.names) if name in names]
        options = pa.ipc.IpcReadOptions(included_fields=wanted)
        reader = pa.ipc.open_stream(feed, options=options)
        dictionaries: dict[int, tuple[int, int]] = {}
        for metadata, body in self._messages():
            message = _Table(metadata)
            kind, header = message.number(1, "<B"), message.table(2)
            batch = header.table(1) if header is not None and kind == _DICTIONARIES else header
            if kind not in (_DICTIONARIES, _BATCH) or header is None or batch is None:
                raise _invalid(f"a message of type {kind}")
            asked = _asked(batch, self.schema, set(wanted)) if kind == _BATCH else None
            made, stored = self._load(feed, message, batch, body, asked, dictionaries.values())
            if kind == _BATCH:
                try:
                    found = reader.read_next_batch()
                except OSError as e:  # Arrow's class for damaged bytes, too. No store is read here.
                    raise _invalid(str(e)) from e
                yield found.select(list(names))
            else:
                number = header.number(0, "<q")
                before = dictionaries.get(number, (0, 0)) if header.number(2, "<B") else (0, 0)
                dictionaries[number] = (before[0] + made, before[1] + stored)

    def _messages(self) -> Iterator[tuple[bytes, int]]:
        """(metadata, where the body begins) of all messages but the schema."""
        if self._blocks is not None:
            for at in self._blocks:
                found = self._next(at)
                if found is None:
                    raise _invalid("a block without a message")
                yield found
            return
        at = self._begin
        while (found := self._next(at)) is not None:
            yield found
            at = found[1] + _Table(found[0]).number(3, "<q")

    def _next(self, at: int) -> tuple[bytes, int] | None:
        prefix = self._read(at, min(8, max(self._size - at, 0)))
        if not prefix:
            return None  # the end of a stream without a mark
        # Before Arrow 0.15 messages had no continuation mark.
        begin = 8 if prefix.startswith(_CONTINUATION) else 4
        length = _number(prefix, begin - 4, "<i")
        if length == 0:
            return None
        metadata = self._read(at + begin, length)
        body = _Table(metadata).number(3, "<q")
        if body < 0 or body > self._size - at - begin - length:
            raise _invalid(f"a message of {body} bytes at {at} in a file of {self._size} bytes")
        return metadata, at + begin + length

    def _read(self, at: int, length: int) -> bytes:
        if at < 0 or length < 0 or at + length > self._size:
            raise _invalid(f"{length} bytes at {at} in a file of {self._size} bytes")
        self._file.seek(at)
        found = self._file.read(length)
        if len(found) != length:
            raise _invalid(f"{len(found)} of {length} bytes at {at}")
        return found

    def _load(
        self, feed: _Feed, message: _Table, batch: _Table, body: int, asked: list[bool] | None, held: Any
    ) -> tuple[int, int]:
        """Feed a message with its asked buffers (None: all). Returns its bytes decompressed and stored."""
        length = message.number(3, "<q")
        compressed = batch.place(3) is not None
        made, stored = (sum(column) for column in zip((0, 0), *held, strict=True))
        buffers: list[tuple[int, int, int]] = []
        for i, place in enumerate(batch.items(2, _BUFFER)):
            start, size = _number(message.data, place, "<q"), _number(message.data, place + 8, "<q")
            if start < 0 or size < 0 or start + size > length:
                raise _invalid(f"a buffer of {size} bytes at {start} in a body of {length} bytes")
            buffers.append((place, start, size if asked is None or asked[i] else 0))
        total = sum(size for _, _, size in buffers)
        if total > length:
            raise _invalid("buffers that share their bytes")
        _check(made + total)
        patched, pieces, end, claimed = bytearray(message.data), [], 0, 0
        for place, start, size in buffers:
            piece = self._read(body + start, size)
            # A compressed buffer begins with the length that it expands to; -1: it is stored as it is.
            claim = _number(piece, 0, "<q") if compressed and size else size
            if claim < -1:
                raise _invalid(f"a buffer that expands to {claim} bytes")
            claimed += size if claim == -1 else claim
            struct.pack_into("<qq", patched, place, end, size)
            pieces += [piece, bytes(-size % 8)]
            end += size + -size % 8
        _check(made + claimed)
        check_expansion(made + claimed, stored + total, "an Arrow record batch or its dictionaries")
        if (at := message.place(3)) is not None:
            struct.pack_into("<q", patched, at, end)
        feed.add(_encapsulated(bytes(patched)))
        feed.add(b"".join(pieces))
        return claimed, total


def _check(claim: int) -> None:
    if claim > MAX_BATCH_BYTES:
        raise FormatError(
            f"expected Arrow record batches whose asked columns take at most {MAX_BATCH_BYTES} bytes with all "
            f"dictionaries, got {claim} bytes. Write the file in smaller batches"
        )


def _asked(batch: _Table, schema: Any, wanted: set[int]) -> list[bool] | None:
    """Which of a batch's buffers belong to the wanted fields; None where that is not known: then all are read."""
    counts = (_number(batch.data, at, "<q") for at in batch.items(4, 8))
    asked: list[bool] = []
    total = len(batch.items(2, _BUFFER))
    for i, field in enumerate(schema):
        count = _buffers(field.type, counts)
        if not 0 <= count <= total - len(asked):
            return None
        asked += [i in wanted] * count
    return asked if len(asked) == total else None


def _buffers(kind: Any, views: Iterator[int]) -> int:
    """How many buffers a column of this type has in a message. ``views``: how many data buffers each view has."""
    import pyarrow as pa

    types = pa.types
    if types.is_null(kind):
        return 0
    if types.is_dictionary(kind):
        return 2
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return 2 + next(views, 0)
    if types.is_map(kind):
        return 3 + _buffers(kind.key_type, views) + _buffers(kind.item_type, views)
    if types.is_fixed_size_list(kind):
        return 1 + _buffers(kind.value_type, views)
    if types.is_list(kind) or types.is_large_list(kind):
        return 2 + _buffers(kind.value_type, views)
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return 3 + _buffers(kind.value_type, views)
    if types.is_run_end_encoded(kind):
        return 2 + _buffers(kind.value_type, views)
    if types.is_struct(kind) or types.is_union(kind):
        own = 2 if types.is_union(kind) and kind.mode == "dense" else 1
        return own + sum(_buffers(kind.field(i).type, views) for i in range(kind.num_fields))
    if any(f(kind) for f in (types.is_string, types.is_binary, types.is_large_string, types.is_large_binary)):
        return 3
    return 2


def _encapsulated(metadata: bytes) -> bytes:
    metadata += bytes(-len(metadata) % 8)
    return _CONTINUATION + struct.pack("<i", len(metadata)) + metadata


class _Feed(io.RawIOBase):
    """A stream of the pieces that were added."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[bytes] = []

    def add(self, piece: bytes) -> None:
        if piece:
            self._pieces.append(piece)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:  # type: ignore[override]
        """At most ``size`` bytes of the pieces; a piece that is asked for as a whole is not copied."""
        found: list[bytes] = []
        while self._pieces and size:
            piece = self._pieces[0]
            if size < 0 or len(piece) <= size:
                found.append(self._pieces.pop(0))
            else:
                found.append(piece[:size])
                self._pieces[0] = piece[size:]
            size -= len(found[-1]) if size > 0 else 0
        return found[0] if len(found) == 1 else b"".join(found)
