"""Estimates a row's size as Python objects, also before they are created: a few KiB of a file can become many GiB."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from hsx_dist.errors import FormatError
from hsx_dist.format.json_objects import count_members
from hsx_dist.text import head

_Numbers = np.ndarray[Any, np.dtype[np.int64]]

#: A row may take ``_COST_FACTOR * input.max_row_bytes`` as objects. Token ids take 5 times their bytes, text at most 8
#: times.
_COST_FACTOR = 12
#: Bytes that every row may take in addition.
_FREE_BYTES = 1 << 20
#: Cost of a byte of text in a table. With this cost, the largest accepted row has ``input.max_row_bytes`` of text.
_TEXT_BYTE = _COST_FACTOR
#: An object of few members takes the same memory for each number of them. Each other member takes a place in a table,
#: and its name is an object.
_FEW_MEMBERS, _MEMBER = 5, 110
#: Colons of a JSON text whose members are not counted. Most rows have fewer.
_FEW_COLONS = _FREE_BYTES // _MEMBER
#: Least cost of a value of a table, and the cost of a number.
_VALUE = 64
#: Characters of a structure's field name that cost nothing. JSON text takes up to 2 bytes for each other one, and up to
#: 12 if the name is not plain. Python's objects share the name.
_FREE_NAME, _PLAIN_CHARACTER, _CHARACTER = 16, 2, 12
#: An integer key of a map becomes text, which takes more.
_INTEGER_NAME = 16
#: Bytes of a dictionary that count as one referenced byte. Arrow copies or checks them for each batch, at 1 to 20 GB/s
#: in a measurement. Reading plain texts as rows was more than 16 times as slow.
_DICTIONARY_BYTES = 16
#: Costs of other values of a fixed width. pickle, which carries rows to the driver, remembers the parts of each.
#: Timestamps in nanoseconds are larger objects, of pandas.
_TIME, _DECIMAL, _TIMESTAMP, _TIMESTAMP_OF_ZONE = 200, 350, 280, 550


def most_cost(max_row_bytes: int) -> int:
    """Return the limit of a row's bytes as objects."""
    return _FREE_BYTES + _COST_FACTOR * max_row_bytes


def cost_of_json(line: bytes | str) -> int:
    """Return about how many bytes a JSON text takes as objects: its strings, and each item, list, object and member."""
    if isinstance(line, str):
        items, lists, objects, colons = map(line.count, ",[{:")
    else:
        items, lists, objects, colons = map(line.count, (b",", b"[", b"{", b":"))
    members = count_members(line, colons) if colons > _FEW_COLONS else 0  # colons in strings are no members
    return 8 * len(line) + 40 * items + 70 * lists + 250 * objects + _MEMBER * max(0, members - _FEW_MEMBERS * objects)


def memory_of(value: Any) -> int:
    """Return about how many bytes a JSON value takes as Python objects. Counts a shared object at each of its places.
    Does not recurse."""
    total, todo = 0, [value]
    while todo:
        item = todo.pop()
        total += sys.getsizeof(item)
        if isinstance(item, str) and not item.isascii():
            total += sys.getsizeof(item)  # pickle adds its UTF-8 to the object
        elif isinstance(item, dict):
            todo += item.keys()
            todo += item.values()
        elif isinstance(item, list):
            todo += item
    return total


def cost_of_columns(batch: Any, most: int) -> int:
    """Return about how many bytes the rows of ``batch`` take as Python values, from lengths and offsets alone.

    The work is limited by ``most``, not by what the batch refers to: a dictionary of a few KiB in the file may have a
    billion values. If the bytes exceed ``most``, returns some number above ``most``.

    Raises:
        FormatError: a column has a type whose cost is not known.
    """
    rows = int(batch.num_rows)
    if not rows:
        return 0
    all_rows = np.zeros(1, np.int64), np.full(1, rows, np.int64)
    return 250 * rows + sum(_cost(column, *all_rows, most) for column in batch.columns)


def referenced_bytes(column: Any) -> int:
    """Return how many bytes the parts of an Arrow array refer to, and a 16th of the dictionaries' bytes.

    Counts bytes again for each part that refers to them: fields of a structure may share a dictionary, and views a
    text. A full check of the array reads them as often. Needs no checked offsets.
    """
    import pyarrow as pa

    types, total, todo = pa.types, _sum_of_buffers(column), [column]
    while todo:
        values = todo.pop()
        kind = values.type
        if types.is_dictionary(kind):
            total += _sum_of_buffers(values.dictionary) // _DICTIONARY_BYTES  # not among the array's own
            todo.append(values.dictionary)
        elif len(values) and (types.is_string_view(kind) or types.is_binary_view(kind)):
            lengths = _buffer(values, 1, np.dtype("4i4"))[:, 0].clip(0)
            valid = values.is_valid().to_numpy(zero_copy_only=False)
            total += int(lengths.sum(dtype=np.int64, where=valid))
        elif types.is_struct(kind):
            todo += map(values.field, range(kind.num_fields))
        elif types.is_map(kind):
            todo += values.keys, values.items
        elif types.is_nested(kind):
            todo.append(values.values)
    return total


def _sum_of_buffers(values: Any) -> int:
    return sum(buffer.size for buffer in values.buffers() if buffer is not None)


def _cost(values: Any, starts: _Numbers, sizes: _Numbers, most: int) -> int:
    """Return the cost of ``values[start : start + size]`` of all ranges. The ranges do not overlap, except in the
    values of a dictionary."""
    import pyarrow as pa

    n = int(sizes.sum())
    kind, types = values.type, pa.types
    if not n or _VALUE * n > most:  # no value takes less
        return _VALUE * n
    if fixed := _fixed_cost(kind):
        return fixed * n
    if types.is_struct(kind):
        names = n * sum(_name_cost(field.name) for field in kind)
        if names > most:
            return names
        inner = sum(100 * n + _cost(values.field(i), starts, sizes, most) for i in range(kind.num_fields))
        return 250 * n + names + inner
    if types.is_fixed_size_binary(kind):
        return (80 + _TEXT_BYTE * kind.byte_width) * n
    if types.is_fixed_size_list(kind):
        size = kind.list_size
        return 120 * n + _cost(values.values, (values.offset + starts) * size, sizes * size, most)
    is_text = any(f(kind) for f in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary))
    if is_text or types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        is_large = types.is_large_string(kind) or types.is_large_binary(kind) or types.is_large_list(kind)
        ends = _buffer(values, 1, np.int64 if is_large else np.int32, more=1)
        starts, stops = ends[starts].astype(np.int64), ends[starts + sizes].astype(np.int64)
        if is_text:
            return 80 * n + _TEXT_BYTE * int((stops - starts).sum())
        if types.is_map(kind):  # becomes a mapping
            names = _INTEGER_NAME * int((stops - starts).sum()) if types.is_integer(kind.key_type) else 0
            return (
                250 * n
                + names
                + sum(_cost(child, starts, stops - starts, most) for child in (values.keys, values.items))
            )
        return 120 * n + _cost(values.values, starts, stops - starts, most)
    at = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(n)
    return _cost_of_references(values, at[_are_valid(values, at)], most) + (80 + _VALUE) * n


def _cost_of_references(values: Any, at: _Numbers, most: int) -> int:
    """Return the cost of the values to which the elements ``at`` refer. No element is null.

    A structure with an element may be null: then the element's reference has no meaning.
    """
    import pyarrow as pa

    kind, types = values.type, pa.types
    if types.is_string_view(kind) or types.is_binary_view(kind):  # each begins with its length
        return _TEXT_BYTE * int(_buffer(values, 1, np.dtype("4i4"))[at, 0].clip(0).sum(dtype=np.int64))
    if types.is_dictionary(kind):
        places = _buffer(values.indices, 1, kind.index_type.to_pandas_dtype())[at].astype(np.int64)
        places = places[(places >= 0) & (places < len(values.dictionary))]
        return _cost(values.dictionary, places, np.ones(len(places), np.int64), most)
    raise FormatError(f"expected columns of a type that has Python values, got {head(str(kind), 80)}. Cast the column")


def _name_cost(name: str) -> int:
    more = len(name) - _FREE_NAME
    if more <= 0:
        return 0
    return more * (_PLAIN_CHARACTER if name.isascii() and name.isprintable() else _CHARACTER)


def _fixed_cost(kind: Any) -> int:
    """Return the cost of each value of a type of fixed width, and 0 for any other type."""
    import pyarrow as pa

    types = pa.types
    if types.is_timestamp(kind):
        return _TIMESTAMP if kind.tz is None else _TIMESTAMP_OF_ZONE
    if types.is_decimal(kind):
        return _DECIMAL
    if types.is_temporal(kind):
        return _TIME
    return _VALUE if types.is_null(kind) or types.is_primitive(kind) else 0


def _buffer(values: Any, i: int, kind: Any, more: int = 0) -> Any:
    """Return buffer ``i`` of an Arrow array: a number per element, and ``more``. ``ValueError`` if it is shorter."""
    return np.frombuffer(values.buffers()[i], kind, values.offset + len(values) + more)[values.offset :]


def _are_valid(values: Any, at: _Numbers) -> Any:
    """Return, as bool, which elements are not null. References of null elements have no meaning."""
    bits = values.buffers()[0]
    if bits is None:
        return np.ones(len(at), bool)
    place = values.offset + at
    return np.frombuffer(bits, np.uint8)[place >> 3] >> (place & 7).astype(np.uint8) & 1 == 1
