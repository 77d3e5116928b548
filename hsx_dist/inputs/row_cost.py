"""What a row takes as Python objects, before they are made: a few KiB of a file can mean many GiB of them."""

from __future__ import annotations

from typing import Any

from hsx_dist.errors import FormatError

#: A row may take so many times ``input.max_row_bytes`` as objects: token ids take 5 times, text 8 times at most.
_COST_FACTOR = 12
#: So much is always taken.
_FREE_BYTES = 1 << 20
#: A byte of text in a table. With it, a row whose texts take ``input.max_row_bytes`` is the largest that is taken.
_TEXT_BYTE = _COST_FACTOR


def most_cost(max_row_bytes: int) -> int:
    """What a row may take as objects."""
    return _FREE_BYTES + _COST_FACTOR * max_row_bytes


def cost_of_json(line: bytes | str) -> int:
    """Bytes that the objects of a JSON text take, about: its strings, and each item, list and object."""
    if isinstance(line, str):
        items, lists, objects = line.count(","), line.count("["), line.count("{")
    else:
        items, lists, objects = line.count(b","), line.count(b"["), line.count(b"{")
    return 8 * len(line) + 40 * items + 70 * lists + 250 * objects


def cost_of_columns(batch: Any) -> int:
    """Bytes that ``batch.to_pylist()`` takes, about, from lengths and offsets alone. ``batch``: a RecordBatch.

    Raises:
        FormatError: a column has a type whose cost is not known.
    """
    return 250 * int(batch.num_rows) + sum(_cost(column) for column in batch.columns)


def _cost(column: Any) -> int:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, n = column.type, len(column)
    if not n:
        return 0
    types = pa.types
    if any(f(kind) for f in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)):
        return 80 * n + _TEXT_BYTE * int(pc.sum(pc.binary_length(column)).as_py() or 0)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return 80 * n + _TEXT_BYTE * _view_bytes(column)
    if types.is_fixed_size_binary(kind):
        return (80 + _TEXT_BYTE * kind.byte_width) * n
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        offsets = column.offsets
        start, stop = offsets[0].as_py(), offsets[n].as_py()
        children = (column.keys, column.items) if types.is_map(kind) else (column.values,)
        return 120 * n + sum(_cost(child.slice(start, stop - start)) for child in children)
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return 120 * n + _cost_of_ranges(column.values, _numbers(column.offsets), _numbers(column.sizes))
    if types.is_fixed_size_list(kind):
        size = kind.list_size
        return 120 * n + _cost(column.values.slice(column.offset * size, n * size))
    if types.is_struct(kind):
        return 250 * n + sum(100 * n + _cost(column.field(i)) for i in range(kind.num_fields))
    if types.is_dictionary(kind):
        value = kind.value_type
        if types.is_string(value) or types.is_large_string(value):
            lengths = pc.take(pc.binary_length(column.dictionary), column.indices)
            return 80 * n + _TEXT_BYTE * int(pc.sum(lengths).as_py() or 0)
        return n * _largest(column.dictionary)
    if types.is_run_end_encoded(kind):
        at, length = column.find_physical_offset(), column.find_physical_length()
        return n * _largest(column.values.slice(at, length))
    if types.is_union(kind):
        return 64 * n + _cost_of_union(column)
    if _is_fixed(kind):
        return 64 * n
    raise FormatError(f"expected columns of a type that has Python values, got {str(kind)[:80]}. Cast the column")


def _is_fixed(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_null(kind) or pa.types.is_primitive(kind) or pa.types.is_decimal(kind))


def _largest(values: Any) -> int:
    """What any one of ``values`` takes at most."""
    return 64 if _is_fixed(values.type) else _cost(values)


def _numbers(array: Any) -> Any:
    return array.to_numpy(zero_copy_only=False).astype("int64")


def _view_bytes(column: Any) -> int:
    """Bytes of the texts of a column of views, each of which begins with its length."""
    import numpy as np

    views = np.frombuffer(column.buffers()[1], np.int32)[4 * column.offset :][: 4 * len(column) : 4]
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    return int(views[valid].sum(dtype=np.int64))


def _cost_of_union(column: Any) -> int:
    import numpy as np

    kind = column.type
    if kind.mode == "sparse":
        return sum(_cost(column.field(i)) for i in range(kind.num_fields))
    rows = slice(column.offset, column.offset + len(column))
    codes = np.frombuffer(column.buffers()[1], np.int8)[rows]
    offsets = np.frombuffer(column.buffers()[2], np.int32)[rows].astype(np.int64)
    total = 0
    for i, code in enumerate(kind.type_codes):
        starts = offsets[codes == code]
        total += _cost_of_ranges(column.field(i), starts, np.ones_like(starts))
    return total


def _cost_of_ranges(values: Any, starts: Any, sizes: Any) -> int:
    """What ``values[start : start + size]`` of all pairs takes. The ranges may overlap."""
    starts, sizes = starts[sizes > 0], sizes[sizes > 0]
    if not len(starts):
        return 0
    stops = starts + sizes
    if _is_fixed(values.type):
        return 64 * int(sizes.sum())
    begin, end = int(starts.min()), int(stops.max())
    whole = _cost(values.slice(begin, end - begin))
    return whole if bool((starts[1:] >= stops[:-1]).all()) else len(starts) * whole
