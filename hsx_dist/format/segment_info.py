"""One segment of a part, as the part's description has it: its members, and the checks of a reader."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hsx_dist.errors import FormatError
from hsx_dist.format.codecs import Codec, NoneCodec
from hsx_dist.format.codecs.base import itemsize
from hsx_dist.format.json_objects import number, shown
from hsx_dist.format.loss import Loss
from hsx_dist.page import CARRIER, FLOATS, HIDDEN_STATES, Segment
from hsx_dist.text import head

#: Raw bytes of one chunk of one layer: a reader allocates them to decode it.
MAX_CHUNK_BYTES = 256 << 20
#: Limits for untrusted headers. The product of these two and a value's bytes fits 64 bits.
MAX_HIDDEN_SIZE = 1 << 20
#: Limit of the layers of a segment, and of the layer ids in a run's description. `hsx ls` prints the ids with each
#: sample, and statistics have an object for each layer. No model has more layers.
MAX_LAYERS = 1024
MAX_TOKENS = 1 << 40
MAX_COLUMNS = 1 << 16

#: Dtypes of attached arrays: safetensors' names → numpy's names.
ATTACHMENT_DTYPE = {
    "BOOL": "bool", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "F16": "<f2",
    "U32": "<u4", "I32": "<i4", "F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8",
}  # fmt: skip
ATTACHMENT_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
#: Names that readers use for a sample's fields. An attached array must not have one.
RESERVED_NAMES = frozenset({"hidden_states", "token_ids", "layer_ids", "input_ids", "key", "meta"})
#: Names that readers use for other fields next to a sample's points. A point of this name would replace one of them.
_NOT_POINTS = (RESERVED_NAMES | {"loss_mask"}) - {HIDDEN_STATES}
#: Limit of one attached array. A loss mask takes one byte per token.
MAX_ATTACHED_BYTES = 64 << 20
_POINT = re.compile(r"[a-z][a-z0-9_]{0,63}")
#: Members that the segments of a part usually have in common. If so, they are written once.
SHARED = ("dtype", "hidden_size", "layer_ids", "chunk_tokens", "index", "start")
#: Additional members of a segment in a part with ``FORMAT_OF_POINTS``.
OF_POINTS = ("point", "column", "columns", "shard", "shards", "head")
#: All members of a segment that readers know.
SEGMENT_MEMBERS = frozenset(
    {*SHARED, *OF_POINTS, "key", "stop", "total", "crcs", "token_crc", "sizes", "loss", "attached", "meta"}
)


@dataclass(frozen=True, slots=True)
class Attachment:
    """A user's small tensor that is stored with a sample. ``dtype``: safetensors' name."""

    dtype: str
    shape: tuple[int, ...]
    crc: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(ATTACHMENT_DTYPE[self.dtype]).itemsize

    @property
    def is_small(self) -> bool:
        """Whether it has at most eight dimensions and ``MAX_ATTACHED_BYTES``, with 1 for a dimension of 0.

        numpy refuses an empty array if its other dimensions overflow.
        """
        nonzero = replace(self, shape=tuple(n or 1 for n in self.shape))
        return len(self.shape) <= 8 and nonzero.nbytes <= MAX_ATTACHED_BYTES


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One segment of a part, as the part describes it: its shape, and the sizes and checksums of its chunks.

    ``layer_ids`` are vLLM's, in stored order; empty in a file that does not name them.
    ``sizes``: stored bytes of every chunk, ``[layer][chunk]``; empty with codec ``none``, where they follow from the
    shape.
    ``crcs``: crc32c of every chunk, ``[layer][chunk]``; in schema ``vllm`` of all layers at once, ``[0][chunk]``.
    ``crcs`` and ``token_crc`` are ``None`` in a file that vLLM wrote, and while a segment is encoded.
    ``loss``: per layer, with a lossy codec. ``attached``: name → the user's tensor.
    """

    segment: Segment
    layer_ids: tuple[int, ...]
    dtype: str
    hidden_size: int
    chunk_tokens: int
    num_layers: int
    sizes: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    crcs: tuple[tuple[int, ...], ...] | None = field(default=None, repr=False)
    token_crc: int | None = field(default=None, repr=False)
    loss: tuple[Loss, ...] = field(default=(), repr=False)
    attached: Mapping[str, Attachment] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        ids = ", ".join(map(str, self.layer_ids[:8])) + ("" if self.num_layers <= 8 else ", …")
        return f"{self.segment}, {self.dtype} rows of {self.hidden_size} of layers {ids}"

    @property
    def num_chunks(self) -> int:
        return -(-self.segment.num_tokens // self.chunk_tokens)

    def chunk_span(self, chunk: int) -> tuple[int, int]:
        """Tokens ``[start, stop)`` of a chunk, counted from the segment's start."""
        start = chunk * self.chunk_tokens
        return start, min(start + self.chunk_tokens, self.segment.num_tokens)

    @property
    def row_bytes(self) -> int:
        """Raw bytes of one token in one layer."""
        return self.hidden_size * itemsize(self.dtype)

    @property
    def raw_bytes(self) -> int:
        """Bytes of all states before encoding."""
        return self.segment.num_tokens * self.num_layers * self.row_bytes

    def chunk_sizes(self, layer: int, first: int = 0, last: int | None = None) -> Sequence[int]:
        """Stored bytes of the chunks ``[first, last)`` of the ``layer``-th stored layer. ``None``: to the last one."""
        if self.sizes:
            return self.sizes[layer][first:last]
        chunks = range(self.num_chunks)[first:last]
        return [(b - a) * self.row_bytes for a, b in map(self.chunk_span, chunks)]

    def layer_bytes(self, layer: int) -> int:
        """Stored bytes of the ``layer``-th stored layer."""
        # Without sizes, do not add up the chunks: a short header of schema ``vllm`` may claim billions of them.
        return sum(self.sizes[layer]) if self.sizes else self.segment.num_tokens * self.row_bytes


def segment_row(info: SegmentInfo, *, of_points: bool) -> dict[str, Any]:
    """A segment's members, with those that ``common`` may have instead."""
    s = info.segment
    row: dict[str, Any] = {
        "key": s.key,
        "index": s.index,
        "start": s.start,
        "stop": s.stop,
        "total": s.total,
        "dtype": info.dtype,
        "hidden_size": info.hidden_size,
        "layer_ids": list(info.layer_ids),
        "chunk_tokens": info.chunk_tokens,
        "crcs": info.crcs,
        "token_crc": info.token_crc,
    }
    if of_points:
        row |= {name: getattr(s, name) for name in OF_POINTS}
    if info.sizes:
        row["sizes"] = info.sizes
    if info.loss:
        row["loss"] = [[_finite(x.rms), _finite(x.worst_token)] for x in info.loss]
    if info.attached:
        row["attached"] = {n: [a.dtype, list(a.shape), a.crc] for n, a in info.attached.items()}
    return row


def stored_meta(s: Segment) -> dict[str, Any]:
    """The stored ``meta`` of a segment's sample; the client's metadata is its member ``metadata``."""
    return {**s.meta, "metadata": json.loads(s.metadata)} if s.metadata else dict(s.meta)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no infinity


#: The lists and objects of members, from the outermost to the innermost. Other members have none, except ``meta``.
_NESTING: Mapping[str, tuple[type, ...]] = {
    "layer_ids": (list,),
    **dict.fromkeys(("sizes", "crcs", "loss"), (list, list)),
    "attached": (dict, list, list),
}
_CONTAINERS = frozenset({list, dict})


def check_nesting(d: Mapping[str, Any]) -> None:
    """``FormatError`` when a member has other lists and objects than a valid one: they take 44 times their text."""
    for name, value in d.items():
        if type(value) not in _CONTAINERS or name == "meta":
            continue
        level = [value]
        for kind in (*_NESTING.get(name, ()), None):
            if not level:
                break
            if set(map(type, level)) != {kind}:
                raise FormatError(f"{name}: expected {_form(name)}, got other lists or objects")
            level = [v for x in level for v in (x.values() if kind is dict else x) if type(v) in _CONTAINERS]


def _form(name: str) -> str:
    kinds = ["a list" if kind is list else "an object" for kind in _NESTING.get(name, ())]
    return " of ".join(kinds) or "a number or a string"


#: Tables and lists of a segment.
_REPEATED = ("layer_ids", "sizes", "crcs", "loss", "attached")


def count_numbers(d: Mapping[str, Any], most: int) -> int:
    """The number of entries of a segment's tables and lists and of their rows. The rows of one with more than ``most``
    are skipped."""
    tables = [d[name] for name in _REPEATED if isinstance(d.get(name), list | dict)]
    return sum(len(t) + (sum(len(x) for x in t if isinstance(x, list)) if len(t) <= most else 0) for t in tables)


def segment_info(d: dict[str, Any], codec: Codec, schema: str) -> SegmentInfo:
    """Check the members of a segment. Raises ``FormatError``."""
    total = _int(d, "total", 1, MAX_TOKENS)
    start = _int(d, "start", 0, total - 1)
    index, stop = _int(d, "index", 0, total - 1), _int(d, "stop", start + 1, total)
    meta = typed_member(d, "meta", Mapping) if "meta" in d else {}
    key = typed_member(d, "key", str)
    if not key:
        raise FormatError("key: expected a non-empty string, got ''")
    segment = Segment(key, index, start, stop, total, meta=meta, **_column(d))
    dtype = typed_member(d, "dtype", str)
    if dtype not in CARRIER:
        raise FormatError(f"dtype: expected one of {', '.join(CARRIER)}, got {head(dtype, 40)!r}")
    layer_ids = _ints(typed_member(d, "layer_ids", list), 0, MAX_HIDDEN_SIZE, "layer_ids")
    bounded_int("layers", len(layer_ids), 1, MAX_LAYERS)
    if len(set(layer_ids)) != len(layer_ids):
        raise FormatError(f"layer_ids: expected different ids, got {list(layer_ids[:20])}")
    hidden_size = _int(d, "hidden_size", 1, MAX_HIDDEN_SIZE)
    chunk_tokens = _int(d, "chunk_tokens", 1, MAX_TOKENS)
    info = SegmentInfo(segment, layer_ids, dtype, hidden_size, chunk_tokens, len(layer_ids))
    if min(chunk_tokens, segment.num_tokens) * info.row_bytes > MAX_CHUNK_BYTES:
        raise FormatError(
            f"chunk_tokens: expected chunks of at most {MAX_CHUNK_BYTES} bytes a layer, got {chunk_tokens} tokens of "
            f"{info.row_bytes} bytes"
        )
    plain = isinstance(codec, NoneCodec)
    if wrong := column_error(info):
        raise FormatError(wrong)
    if schema == "vllm" and (not plain or segment.num_tokens != total or segment.of_points):
        raise FormatError(
            "schema vllm: expected a whole sample of hidden states with codec none, got another segment or codec"
        )
    sizes = () if plain else _table(d, "sizes", (len(layer_ids), info.num_chunks), MAX_CHUNK_BYTES * 2)
    crcs = _table(d, "crcs", (len(layer_ids) if schema == "segments" else 1, info.num_chunks), 0xFFFFFFFF)
    loss = _losses(typed_member(d, "loss", list), len(layer_ids)) if "loss" in d else ()
    attached = {n: _attachment(n, a) for n, a in typed_member(d, "attached", dict).items()} if "attached" in d else {}
    token_crc = _int(d, "token_crc", 0, 0xFFFFFFFF)
    return replace(info, sizes=sizes, crcs=crcs, token_crc=token_crc, loss=loss, attached=attached)


def _column(d: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a segment's column. Empty when the description has none of them; it has all or none."""
    if d.keys().isdisjoint(OF_POINTS):
        return {}
    return {"point": typed_member(d, "point", str)} | {
        name: _int(d, name, 0, MAX_HIDDEN_SIZE) for name in OF_POINTS[1:]
    }


def column_error(info: SegmentInfo) -> str | None:
    """An error message if a segment's column is invalid, else ``None``."""
    s = info.segment
    if not _POINT.fullmatch(s.point):
        return f"point: expected a name of at most 64 lower-case letters, digits and '_', got {head(s.point, 80)!r}"
    if s.point in _NOT_POINTS:
        return f"point: expected a name that no other member of a sample has, got {s.point}"
    if not 0 <= s.column < s.columns <= MAX_COLUMNS:
        return f"column: expected one from 0 of at most {MAX_COLUMNS} columns, got {s.column} of {s.columns}"
    if not 0 <= s.shard < s.shards <= s.columns:
        return f"shard: expected one from 0 of at most {s.columns} shards, one a column, got {s.shard} of {s.shards}"
    if s.head < 0 or (s.head and info.hidden_size % s.head):
        return f"head: expected 0 or a divisor of hidden_size {info.hidden_size}, got {s.head}"
    if s.point == HIDDEN_STATES and (s.head or info.dtype not in FLOATS):
        return f"point: expected hidden states of {', '.join(FLOATS)} without heads, got {info.dtype}, head {s.head}"
    return None


def _losses(items: list[Any], num_layers: int) -> tuple[Loss, ...]:
    found = []
    for item in items:
        match item:
            case [rms, worst] if all(x is None or number(x) is None for x in (rms, worst)):
                found.append(Loss(*(math.inf if x is None else float(x) for x in (rms, worst))))
            case _:
                raise FormatError(f"loss: expected two numbers a layer, got {shown(item)}")
    if len(found) != num_layers or any(x.rms < 0 or x.worst_token < 0 for x in found):
        raise FormatError(f"loss: expected two numbers of at least 0 for each of {num_layers} layers, got {len(found)}")
    return tuple(found)


def _attachment(name: str, item: Any) -> Attachment:
    match item:
        case [str(dtype), list(shape), crc] if dtype in ATTACHMENT_DTYPE and ATTACHMENT_NAME.fullmatch(name):
            dims = _ints(shape, 0, MAX_ATTACHED_BYTES, "attached")
            made = Attachment(dtype, dims, bounded_int("attached", crc, 0, 0xFFFFFFFF))
            if made.is_small:
                return made
    raise FormatError(f"attached {head(name, 80)!r}: expected a dtype, a small shape and a crc32c, got {shown(item)}")


def _table(d: Mapping[str, Any], name: str, shape: tuple[int, int], most: int) -> tuple[tuple[int, ...], ...]:
    rows = typed_member(d, name, list)
    if len(rows) != shape[0] or any(type(row) is not list or len(row) != shape[1] for row in rows):
        raise FormatError(f"{name}: expected {shape[0]} lists of {shape[1]}, got {shown(rows)}")
    _ints([value for row in rows for value in row], 0, most, name)
    return tuple(map(tuple, rows))


def _ints(values: list[Any], least: int, most: int, name: str) -> tuple[int, ...]:
    # There may be millions of chunks, so the loop that finds a wrong value runs only when there is one.
    if values and not (set(map(type, values)) == {int} and least <= min(values) and max(values) <= most):
        for value in values:
            bounded_int(name, value, least, most)
    return tuple(values)


def bounded_int(name: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise FormatError(f"{name}: expected a whole number from {least} to {most}, got {shown(value)}")
    return value


def _int(d: Mapping[str, Any], name: str, least: int, most: int) -> int:
    return bounded_int(name, d.get(name), least, most)


def typed_member(d: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    value = d.get(name)
    if not isinstance(value, kind):
        raise FormatError(f"{name}: expected a {kind.__name__}, got {type(value).__name__}")
    return value
