"""What a row takes as Python objects, before they are made: a few KiB of a file can mean many GiB of them."""

from __future__ import annotations

from typing import Any

#: A row may take so many times ``input.max_row_bytes`` as objects: token ids take 5 times, text 8 times at most.
_COST_FACTOR = 12
#: So much is always taken.
_FREE_BYTES = 1 << 20


def most_cost(max_row_bytes: int) -> int:
    """What a row may take as objects."""
    return _FREE_BYTES + _COST_FACTOR * max_row_bytes


def cost_of_json(line: bytes) -> int:
    """Bytes that the objects of a JSON text take, about: its strings, and each item, list and object."""
    return 8 * len(line) + 40 * line.count(b",") + 70 * line.count(b"[") + 250 * line.count(b"{")


def cost_of_columns(batch: Any) -> int:
    """Bytes that ``batch.to_pylist()`` takes, about, from lengths and offsets alone. ``batch``: a RecordBatch."""
    return 250 * int(batch.num_rows) + sum(_cost(column) for column in batch.columns)


def _cost(column: Any) -> int:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, n = column.type, len(column)
    if not n:
        return 0
    types = pa.types
    if any(f(kind) for f in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)):
        return 80 * n + 4 * int(pc.sum(pc.binary_length(column)).as_py() or 0)
    if types.is_fixed_size_binary(kind):
        return (80 + 4 * kind.byte_width) * n
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        offsets = column.offsets
        start, stop = offsets[0].as_py(), offsets[n].as_py()
        children = (column.keys, column.items) if types.is_map(kind) else (column.values,)
        return 120 * n + sum(_cost(child.slice(start, stop - start)) for child in children)
    if types.is_fixed_size_list(kind):
        size = kind.list_size
        return 120 * n + _cost(column.values.slice(column.offset * size, n * size))
    if types.is_struct(kind):
        return 250 * n + sum(100 * n + _cost(column.field(i)) for i in range(kind.num_fields))
    if types.is_dictionary(kind):
        value = kind.value_type
        if types.is_string(value) or types.is_large_string(value):
            lengths = pc.take(pc.binary_length(column.dictionary), column.indices)
            return 80 * n + 4 * int(pc.sum(lengths).as_py() or 0)
        return n * _cost(column.dictionary)  # any of them may be the largest
    if types.is_null(kind) or types.is_primitive(kind) or types.is_decimal(kind):
        return 64 * n
    return n * (64 + 4 * int(column.get_total_buffer_size()))  # views and runs: each row may be all of it
