"""Counts the pages of Parquet's column chunks in the bytes that Arrow reads, before Arrow decodes them.

Arrow decompresses a page to the size in the page's header, also if the footer has a smaller one. So a page of 20 bytes
may become 2 GiB. Arrow stops at the footer's number of values, and does not read further pages.

Some encodings of texts begin with lists of the texts' lengths. Arrow decodes as many lengths as such a list says, also
if the page has fewer values. A list of 10 bytes may say 2 ** 31 lengths.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np

from hsx_dist.inputs.allowance import Allowance
from hsx_dist.inputs.store_file import StoreFile

#: Arrow's limit of a page's header. Its statistics may have large texts.
_MOST_HEADER = 16 << 20
#: Bytes that are read at once of pages that Arrow left out.
_READ = 1 << 16
#: Thrift's limit of structures and lists in others.
_MOST_LEVELS = 64
#: Limit of the values in a header, with those in lists and structures. Parquet's writers write about 20, and no lists.
_MOST_VALUES = 4096
_DATA_PAGE, _DATA_PAGE_V2 = 0, 3
_DATA_HEADERS = {_DATA_PAGE: 5, _DATA_PAGE_V2: 8}  # type of a page → field of its header that has its number of values
_ENCODINGS = {_DATA_PAGE: 2, _DATA_PAGE_V2: 4}  # type of a page → field of that header that has its encoding
_LISTS = {6: 1, 7: 2}  # DELTA_LENGTH_BYTE_ARRAY, DELTA_BYTE_ARRAY → the lists of lengths before a page's texts
_RLE = 3
#: Arrow decompresses the second kind of pages of parquet-cpp before 2.0 also if they say that they are not compressed.
_OLD_WRITER = re.compile(r"\s*parquet-cpp(?!\S)", re.IGNORECASE)


class ParquetPages:
    """The pages of a row group's column chunks. What its methods raise ends the work on the file."""

    def __init__(
        self,
        chunks: Iterable[tuple[Any, Any]],
        file: StoreFile,
        decoded: Callable[[Any], int],
        allowance: Allowance,
        *,
        old_writer: bool,
    ) -> None:
        """Follow the bytes that Arrow reads of ``file``.

        Args:
            chunks: pyarrow's schema and metadata of the column chunks that Arrow reads.
            decoded: the decoded bytes of a chunk, as the footer says.
            allowance: counts the pages, and their decoded bytes, or their share of the footer's if that is more.
            old_writer: see ``has_old_writer``.

        Raises:
            ValueError: chunks overlap.
        """
        self._chunks = sorted(
            (_ColumnChunk(schema, chunk, decoded(chunk), allowance, old_writer) for schema, chunk in chunks),
            key=lambda chunk: chunk.at,
        )
        self._starts = [chunk.at for chunk in self._chunks]
        for chunk, limit in zip(self._chunks, [*self._starts[1:], file.size], strict=True):
            chunk.limit = limit
            if chunk.stop > limit:
                raise ValueError("column chunks overlap, or end after the file")
        self._file = file

    def count(self, begin: int, data: bytes) -> None:
        """Count the pages whose headers end in bytes read at ``begin``.

        Raises:
            ValueError: a header is damaged, or contradicts the footer or the page's lengths.
            LookupError, OSError: a page with lengths is cut, or cannot be decompressed.
        """
        i = bisect_right(self._starts, begin) - 1
        if i >= 0:
            self._chunks[i].count(begin, data)

    def finish(self) -> None:
        """Raise ValueError unless the pages have as many values as the footer says, also those that Arrow left out."""
        for chunk in self._chunks:
            while (at := chunk.at + len(chunk.held)) < chunk.stop:
                self._file.seek(at)
                self._file.read(min(max(_READ, len(chunk.held)), chunk.stop - at))  # calls count
            if chunk.values or chunk.held:
                raise ValueError(f"pages with {chunk.values} values fewer than the footer says, or a cut page")


def stored_values(column: Any) -> int:
    """Return how many values Parquet has for the first stored column of an Arrow array: an empty list has one."""
    import pyarrow as pa

    empty = 0
    while pa.types.is_nested(column.type):
        if pa.types.is_struct(column.type):
            column = column.field(0)
        elif pa.types.is_fixed_size_list(column.type):
            empty += column.null_count
            column = column.flatten()
        else:
            kind = np.int64 if pa.types.is_large_list(column.type) else np.int32
            # Not by to_numpy, which imports pandas.
            ends = np.frombuffer(column.buffers()[1], kind, column.offset + len(column) + 1)[column.offset :]
            empty += len(column) - int(np.count_nonzero(np.diff(ends)))
            entries = column.keys if pa.types.is_map(column.type) else column.values
            column = entries.slice(ends[0], ends[-1] - ends[0])
    return empty + len(column)


def has_old_writer(metadata: Any) -> bool:
    """Return whether Arrow may decompress pages of a file that say that they are not compressed.

    ``metadata``: pyarrow's metadata of the file.
    """
    try:
        return _OLD_WRITER.match(metadata.created_by or "") is not None
    except UnicodeDecodeError:
        return True


class _ColumnChunk:
    """A column chunk.

    ``at``: where its next page begins. ``held``: bytes from there on, a part of a header or page. ``stop``: its end by
    the footer. Old versions of parquet-mr wrote an end that is too small, so its pages may reach to ``limit``.
    ``values``: the footer's values, less those of the pages so far.
    """

    __slots__ = (
        *("_allowance", "_claimed", "_codec", "_decoded", "_levels", "_old_writer", "_taken", "_values"),
        *("at", "held", "limit", "stop", "values"),
    )

    def __init__(self, schema: Any, chunk: Any, decoded: int, allowance: Allowance, old_writer: bool) -> None:
        dictionary = chunk.dictionary_page_offset or 0
        self.at = min(chunk.data_page_offset, dictionary) if dictionary > 0 else chunk.data_page_offset  # as Arrow
        self.stop = self.limit = self.at + chunk.total_compressed_size
        self.values = self._values = chunk.num_values
        self._claimed, self._decoded, self._taken = decoded, 0, 0
        self.held = b""
        self._allowance, self._codec, self._old_writer = allowance, chunk.compression, old_writer
        # Fields of the first data header with the encodings of the levels that a page has.
        levels = {3: schema.max_definition_level, 4: schema.max_repetition_level}
        self._levels = [number for number, most in levels.items() if most]

    def count(self, begin: int, data: bytes) -> None:
        if self.held and begin <= self.at + len(self.held):
            begin, data = self.at, self.held + data[self.at + len(self.held) - begin :]
        self.held = b""
        # Arrow reads pages until it has all values.
        while begin <= self.at < begin + len(data) and (self.values or self.at < self.stop):
            header = _Header(data, self.at - begin)
            try:
                decoded, stored, values = header.sizes()
            except IndexError:
                self.held = data[self.at - begin :]
                if len(self.held) > _MOST_HEADER and not header.lists:
                    raise ValueError(f"a page's header of more than {_MOST_HEADER} bytes") from None
                break
            self._decoded += decoded + begin + header.at - self.at
            self.at = begin + header.at + stored
            self.values -= values
            if self.values < 0:
                raise ValueError(f"pages with {-self.values} values more than the footer says")
            share = self._claimed * (self._values - self.values) // max(self._values, 1)
            taken, self._taken = self._taken, max(self._decoded, share)
            self._allowance.take(decoded=self._taken - taken)
            self._allowance.expand(parts=1)
            if header.lists:
                self._check_lengths(header, decoded, stored, values)
        if self.at + len(self.held) >= self.limit and (self.values or self.held):
            raise ValueError("pages of a column chunk continue after it")

    def _check_lengths(self, header: _Header, decoded: int, stored: int, values: int) -> None:
        """Raise ValueError, LookupError or OSError unless a page's lists say at most as many lengths as ``values``."""
        if self._codec == "UNKNOWN":  # of pyarrow's names
            raise ValueError("a page of lengths in the old codec LZ4 or an unknown codec")
        body, inner, at = header.data[header.at : header.at + stored], header.inner, 0
        if header.kind == _DATA_PAGE:
            plain = self._decompressed(body, decoded)
            for number in self._levels:
                if inner.get(number) != _RLE:
                    raise ValueError("a page of lengths whose levels have an old encoding")
                at += 4 + int.from_bytes(plain[at : at + 4], "little")
            _check_lists(plain, at, header.lists, values)
            return
        at = _number(inner, 5) + _number(inner, 6)  # bytes of levels, which are never compressed
        is_plain = inner.get(7) is False
        if is_plain:
            _check_lists(body, at, header.lists, values)
            if not self._old_writer:
                return
        try:
            plain = self._decompressed(body[at:], decoded - at)
        except (OSError, ValueError, LookupError):
            if is_plain:
                return
            raise
        _check_lists(plain, 0, header.lists, values)

    def _decompressed(self, data: bytes, size: int) -> bytes:
        import pyarrow as pa

        if self._codec == "UNCOMPRESSED" or not data:
            return data
        if size < 0:
            raise ValueError("a page with more bytes of levels than bytes")
        codec = pa.Codec("lz4_raw" if self._codec == "LZ4" else self._codec.lower())
        found: bytes = codec.decompress(data, size, asbytes=True)
        # pyarrow does not return how many bytes were written. If there are fewer, the others are any memory.
        with suppress(OSError, ValueError):
            if size > 1 and codec.decompress(data, size - 1, asbytes=True):
                raise LookupError("a page with fewer decompressed bytes than its header says")
        return found


def _check_lists(data: bytes, at: int, lists: int, values: int) -> None:
    reader = _Header(data, at)
    for _ in range(lists):
        reader.skip_lengths(values)


class _Header:
    """A page's header in ``data`` from ``at`` on, in Thrift's compact protocol.

    Its methods raise IndexError if ``data`` ends too early. They raise ValueError for forms that Parquet's writers do
    not write and Thrift reads: it takes the last of two fields of one number, and cuts large numbers.
    """

    __slots__ = ("_values", "at", "data", "inner", "kind", "lists")

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at
        self.kind = self.lists = self._values = 0
        self.inner: dict[int, Any] = {}

    def sizes(self) -> tuple[int, int, int]:
        """Return a page's decoded bytes, stored bytes and values. ``at`` is then the header's end.

        Raises IndexError also if the page has lengths and ``data`` ends before its end.
        """
        found = self._struct(_MOST_LEVELS)
        self.kind, decoded, stored = (_number(found, number) for number in (1, 2, 3))
        if self.kind not in _DATA_HEADERS:
            return decoded, stored, 0
        inner = found.get(_DATA_HEADERS[self.kind])
        self.inner = inner if isinstance(inner, dict) else {}
        self.lists = _LISTS.get(_number(self.inner, _ENCODINGS[self.kind]), 0)
        if self.lists and self.at + stored > len(self.data):
            raise IndexError
        return decoded, stored, _number(self.inner, 1)

    def skip_lengths(self, most: int) -> None:
        """Skip a list of lengths (DELTA_BINARY_PACKED). Raises ValueError if it has more than ``most``."""
        block, parts, count, _ = (self._varint() for _ in range(4))
        size = block // max(parts, 1)  # lengths of a part of a block
        if count > most or not size or size % 32:
            raise ValueError(f"a page of {most} values with {count} lengths, in blocks of {block}")
        count -= 1  # The first is in the list's header.
        while count > 0:
            self._varint()
            widths = self.at
            self._skip(parts)
            for width in self.data[widths : self.at]:
                if count > 0:
                    self._skip(width * size // 8)
                    count -= size

    def _struct(self, levels: int) -> dict[int, Any]:
        """Read a structure. Returns its structures, truths and integers of 32 bits, or None, by field number."""
        found: dict[int, Any] = {}
        number = 0
        while kind := (byte := self._byte()) & 15:
            number = number + (byte >> 4) if byte >> 4 else self._integer()
            if number in found or not 0 < number < 1 << 15:
                raise ValueError("a page's header with a field twice, or a wrong field")
            self._count(1)
            found[number] = kind == 1 if kind <= 2 else self._value(kind, levels - 1)
        return found

    def _value(self, kind: int, levels: int) -> Any:
        if levels < 0:
            raise ValueError(f"a page's header nested more than {_MOST_LEVELS} deep")
        match kind:
            case 5:
                return self._integer()
            case 4 | 6:
                self._varint()
            case 1 | 2 | 3:
                self._byte()
            case 7:
                self._skip(8)
            case 8:
                self._skip(self._varint())
            case 9 | 10:
                byte = self._byte()
                self._count(size := byte >> 4 if byte >> 4 != 15 else self._varint())
                for _ in range(size):
                    self._value(byte & 15, levels - 1)
            case 12:
                return self._struct(levels)
            case _:
                raise ValueError(f"a page's header with a value of Thrift's type {kind}")
        return None

    def _count(self, values: int) -> None:
        self._values += values
        if self._values > _MOST_VALUES:
            raise ValueError(f"a page's header of more than {_MOST_VALUES} values")

    def _integer(self) -> int:
        value = self._varint()
        if value >> 32:
            raise ValueError("a page's header with an integer of more than 32 bits")
        return value >> 1 ^ -(value & 1)

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a page's header with an integer of more than 64 bits")

    def _byte(self) -> int:
        byte = self.data[self.at]
        self.at += 1
        return byte

    def _skip(self, size: int) -> None:
        self.at += size
        if self.at > len(self.data):
            raise IndexError


def _number(found: dict[int, Any], number: int) -> int:
    value = found.get(number)
    if type(value) is not int or value < 0:
        raise ValueError("a page's header without a type, sizes or a number of values")
    return value
