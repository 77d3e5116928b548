"""Counts the pages of Parquet's column chunks in the bytes that Arrow reads, before Arrow decodes them.

Arrow decompresses a page to the size in the page's header, also if the footer has a smaller one. So a page of 20 bytes
may become 2 GiB. Arrow stops at the footer's number of values, and does not read further pages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hsx_dist.inputs.store_file import StoreFile

#: Arrow's limit of a page's header. Its statistics may have large texts.
_MOST_HEADER = 16 << 20
#: Bytes that are read at once of pages that Arrow left out.
_READ = 1 << 16
#: Thrift's limit of structures and lists in others.
_MOST_LEVELS = 64
_DATA_PAGE, _DATA_PAGE_V2 = 0, 3
_DATA_HEADERS = {_DATA_PAGE: 5, _DATA_PAGE_V2: 8}  # type of a page → field of its header that has its number of values


class ParquetPages:
    """The pages of a row group's column chunks. What its methods raise ends the work on the file."""

    def __init__(self, chunks: Iterable[Any], file: StoreFile, decoded: Callable[[Any], int]) -> None:
        """Follow the bytes that Arrow reads of ``file``.

        Args:
            chunks: pyarrow's metadata of the column chunks that Arrow reads.
            decoded: the decoded bytes of a chunk that are counted already.

        Raises:
            ValueError: chunks overlap.
        """
        self._chunks = sorted((_ColumnChunk(chunk, decoded(chunk)) for chunk in chunks), key=lambda chunk: chunk.at)
        self._starts = [chunk.at for chunk in self._chunks]
        for chunk, limit in zip(self._chunks, [*self._starts[1:], file.size], strict=True):
            chunk.limit = limit
            if chunk.stop > limit:
                raise ValueError("column chunks overlap, or end after the file")
        self._file = file

    def count(self, begin: int, data: bytes) -> int:
        """Return the decoded bytes beyond those of the footer, of pages whose headers end in bytes read at ``begin``.

        Raises:
            ValueError: a header is damaged, or contradicts the footer.
        """
        i = bisect_right(self._starts, begin) - 1
        return self._chunks[i].count(begin, data) if i >= 0 else 0

    def finish(self) -> None:
        """Raise ValueError unless the pages have as many values as the footer says, also those that Arrow left out."""
        for chunk in self._chunks:
            while (at := chunk.at + len(chunk.held)) < chunk.stop:
                self._file.seek(at)
                self._file.read(min(_READ, chunk.stop - at))  # calls count
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


class _ColumnChunk:
    """A column chunk.

    ``at``: where its next page begins. ``held``: bytes from there on, an incomplete header. ``stop``: its end by the
    footer. Old versions of parquet-mr wrote an end that is too small, so its pages may reach to ``limit``.
    ``values``, ``decoded``: the footer's values and decoded bytes, less those of the pages so far.
    """

    __slots__ = ("at", "decoded", "held", "limit", "stop", "values")

    def __init__(self, chunk: Any, decoded: int) -> None:
        dictionary = chunk.dictionary_page_offset or 0
        self.at = min(chunk.data_page_offset, dictionary) if dictionary > 0 else chunk.data_page_offset  # as Arrow
        self.stop = self.limit = self.at + chunk.total_compressed_size
        self.values, self.decoded = chunk.num_values, decoded
        self.held = b""

    def count(self, begin: int, data: bytes) -> int:
        more = 0
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
                if len(self.held) > _MOST_HEADER:
                    raise ValueError(f"a page's header of more than {_MOST_HEADER} bytes") from None
                break
            self.at = begin + header.at + stored
            self.values -= values
            self.decoded -= decoded + header.at
            if self.values < 0:
                raise ValueError(f"pages with {-self.values} values more than the footer says")
            if self.decoded < 0:
                more, self.decoded = more - self.decoded, 0
        if self.at + len(self.held) >= self.limit and (self.values or self.held):
            raise ValueError("pages of a column chunk continue after it")
        return more


class _Header:
    """A page's header in ``data`` from ``at`` on, in Thrift's compact protocol.

    Its methods raise IndexError if ``data`` ends too early. They raise ValueError for forms that Parquet's writers do
    not write and Thrift reads: it takes the last of two fields of one number, and cuts large numbers.
    """

    __slots__ = ("at", "data")

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at

    def sizes(self) -> tuple[int, int, int]:
        """Return a page's decoded bytes, stored bytes and values. ``at`` is then the header's end."""
        found = self._struct(_MOST_LEVELS)
        kind, decoded, stored = (_number(found, number) for number in (1, 2, 3))
        if kind not in _DATA_HEADERS:
            return decoded, stored, 0
        inner = found.get(_DATA_HEADERS[kind])
        return decoded, stored, _number(inner if isinstance(inner, dict) else {}, 1)

    def _struct(self, levels: int) -> dict[int, Any]:
        """Read a structure. Returns its structures and integers of 32 bits, and None for others, by field number."""
        found: dict[int, Any] = {}
        number = 0
        while kind := (byte := self._byte()) & 15:
            number = number + (byte >> 4) if byte >> 4 else self._integer()
            if number in found or not 0 < number < 1 << 15:
                raise ValueError("a page's header with a field twice, or a wrong field")
            found[number] = None if kind <= 2 else self._value(kind, levels - 1)
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
                for _ in range(byte >> 4 if byte >> 4 != 15 else self._varint()):
                    self._value(byte & 15, levels - 1)
            case 12:
                return self._struct(levels)
            case _:
                raise ValueError(f"a page's header with a value of Thrift's type {kind}")
        return None

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
