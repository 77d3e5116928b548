"""A part's description, and the safetensors table computed from it.

The table is never trusted: writer and reader compute it from the description with the same code, and the reader
compares. A separate crc covers the description, so that a flipped bit cannot result in another valid shape.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from hsx_dist.errors import FormatError
from hsx_dist.format.codecs import Codec, NoneCodec, codec_from_dict
from hsx_dist.format.codecs.base import itemsize
from hsx_dist.format.description_text import parse_description
from hsx_dist.format.json_objects import check_depth, number, shown
from hsx_dist.format.loss import Loss
from hsx_dist.lazy import cached_property
from hsx_dist.page import CARRIER, FLOATS, HIDDEN_STATES, Segment

#: Version of the layout. A change that an old reader would misread gets a new number; a new key in the description
#: does not.
FORMAT = "hsx/1"
#: Version of a part with a segment of several columns, or of another point than the hidden states.
FORMAT_OF_POINTS = "hsx/2"
#: The limit of the safetensors library, without the header's length field.
MAX_HEADER_BYTES = 100_000_000
#: Raw bytes of one chunk of one layer: a reader allocates them to decode it.
MAX_CHUNK_BYTES = 256 << 20
#: Limits for untrusted headers. The product of these two and a value's bytes fits 64 bits.
MAX_HIDDEN_SIZE = 1 << 20
MAX_TOKENS = 1 << 40
MAX_COLUMNS = 1 << 16

#: Our dtype names → safetensors' names.
TENSOR_DTYPE = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int32": "I32"}
#: Dtypes of attached arrays: safetensors' names → numpy's names.
ATTACHMENT_DTYPE = {
    "BOOL": "bool", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "F16": "<f2",
    "U32": "<u4", "I32": "<i4", "F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8",
}  # fmt: skip
ATTACHMENT_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
#: Names that readers use for a sample's fields. An attached array must not have one.
RESERVED_NAMES = frozenset({"hidden_states", "token_ids", "layer_ids", "input_ids", "key", "meta"})
#: Limit of one attached array. A loss mask takes one byte per token.
MAX_ATTACHED_BYTES = 64 << 20
_POINT = re.compile(r"[a-z][a-z0-9_]{0,63}")
#: Written into every part, so that a part without its run explains itself.
LAYER_MEANING = (
    "layer id k is the residual stream that enters decoder layer k: 0 the embeddings, N (the model's number of "
    "layers) the last layer's output before the final norm"
)
_LAYER_MEANING_OF_POINTS = f"of hidden_states, {LAYER_MEANING}; of another point, layer id k is decoder layer k"
_WIDTH = {**{k: np.dtype(v).itemsize for k, v in ATTACHMENT_DTYPE.items()}, "BF16": 2}
#: Members that the segments of a part usually have in common. If so, they are written once.
_SHARED = ("dtype", "hidden_size", "layer_ids", "chunk_tokens", "index", "start")
#: Additional members of a segment in a part with ``FORMAT_OF_POINTS``.
_OF_POINTS = ("point", "column", "columns", "shard", "shards", "head")
_DTYPE_OF_TENSOR = {TENSOR_DTYPE[dtype]: dtype for dtype in FLOATS}
#: Chunk size for a file without a description. Such a file has no checksums, so this only limits the memory in use.
_PLAIN_CHUNK_BYTES = 1 << 20

#: ``segments``: one tensor per segment and layer. ``vllm``: one sample as ``hidden_states`` and ``token_ids``.
Schema = Literal["segments", "vllm"]
#: (safetensors dtype, shape, (begin, end) within the data section)
Tensor = tuple[str, tuple[int, ...], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Attachment:
    """A user's small tensor that is stored with a sample. ``dtype``: safetensors' name."""

    dtype: str
    shape: tuple[int, ...]
    crc: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(ATTACHMENT_DTYPE[self.dtype]).itemsize


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

    def chunk_sizes(self, layer: int) -> Sequence[int]:
        """Stored bytes of every chunk of the ``layer``-th stored layer."""
        if self.sizes:
            return self.sizes[layer]
        return [(b - a) * self.row_bytes for a, b in map(self.chunk_span, range(self.num_chunks))]

    def layer_bytes(self, layer: int) -> int:
        """Stored bytes of the ``layer``-th stored layer."""
        # Without sizes, do not add up the chunks: a short header of schema ``vllm`` may claim billions of them.
        return sum(self.sizes[layer]) if self.sizes else self.segment.num_tokens * self.row_bytes


@dataclass(frozen=True)
class Description:
    """A part's description. Its JSON is in the safetensors metadata under ``hsx``."""

    codec: Codec
    about: Mapping[str, Any]
    schema: Schema
    segments: tuple[SegmentInfo, ...]

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Name → dtype, shape and place of every tensor, in stored order, without gaps."""
        # The widest type first, so that every tensor is aligned for its dtype. Views in torch require it.
        entries = sorted(self._entries(), key=lambda e: -_WIDTH[e[1]])
        ends = accumulate(e[3] for e in entries)
        return {name: (d, shape, (end - size, end)) for (name, d, shape, size), end in zip(entries, ends, strict=True)}

    def _entries(self) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
        """Name, dtype, shape and bytes of every tensor, segment by segment."""
        plain, vllm = isinstance(self.codec, NoneCodec), self.schema == "vllm"
        for i, info in enumerate(self.segments):
            prefix = "" if vllm else f"{i}."
            n = info.segment.num_tokens
            yield f"{prefix}token_ids", "I64", (n,), 8 * n
            for name, attached in sorted(info.attached.items()):
                yield f"{prefix}attached.{name}", attached.dtype, attached.shape, attached.nbytes
            if vllm:
                shape = (n, info.num_layers, info.hidden_size)
                yield "hidden_states", TENSOR_DTYPE[info.dtype], shape, n * info.num_layers * info.row_bytes
                continue
            for k in range(info.num_layers):
                if plain:
                    yield f"{i}.{k}", TENSOR_DTYPE[info.dtype], (n, info.hidden_size), n * info.row_bytes
                else:
                    nbytes = sum(info.sizes[k])
                    yield f"{i}.{k}", "U8", (nbytes,), nbytes

    @cached_property
    def of_points(self) -> bool:
        return any(info.segment.of_points for info in self.segments)

    @property
    def format(self) -> str:
        """The oldest version that can describe this part."""
        return FORMAT_OF_POINTS if self.of_points else FORMAT

    @property
    def data_bytes(self) -> int:
        """Bytes after the header."""
        return max(end for _, _, (_, end) in self.tensors.values())

    def to_json(self) -> str:
        """Compact, sorted JSON in ASCII. Equal descriptions result in equal strings."""
        rows = [_row(info, of_points=self.of_points) for info in self.segments]
        shared = (*_SHARED, *_OF_POINTS) if self.of_points else _SHARED
        common = {k: rows[0][k] for k in shared if all(r[k] == rows[0][k] for r in rows)}
        meaning = _LAYER_MEANING_OF_POINTS if self.of_points else LAYER_MEANING
        body: dict[str, Any] = {"codec": self.codec.to_dict(), "about": dict(self.about), "schema": self.schema}
        body |= {"common": common, "layer_meaning": meaning}
        segments = (
            {k: v for k, v in row.items() if k not in common} | _meta(info)
            for row, info in zip(rows, self.segments, strict=True)
        )
        # Encode one segment at a time: decoded metadata takes many times the memory of its text.
        return f'{_compact(body)[:-1]},"segments":[{",".join(map(_compact, segments))}]}}'

    @classmethod
    def from_json(cls, text: str, num_tensors: int | None = None) -> Description:
        """Parse a description and check every number. Raises ``FormatError``; ``UnknownCodec`` for an unknown codec.

        ``num_tensors``: tensors in the header's table. A description with more is refused before it allocates an object
        for each.
        """
        body = parse_description(text, num_tensors)
        about = _get(body, "about", dict)
        check_depth([about, _get(body, "codec", dict)], "the description")
        codec = codec_from_dict(body["codec"])
        schema = _get(body, "schema", str)
        common = _get(body, "common", dict)
        if "meta" in common:  # each segment would have it: a small text would expand to gigabytes
            raise FormatError("common: expected members that segments share, got meta")
        items = _get(body, "segments", list)
        if schema not in ("segments", "vllm"):
            raise FormatError(f"schema: expected 'segments' or 'vllm', got {shown(schema)}")
        if not items or (schema == "vllm" and len(items) != 1):
            raise FormatError(f"segments: expected {'one' if schema == 'vllm' else 'at least one'}, got {len(items)}")
        infos = []
        # Members of ``common`` are in the text once but apply to every segment: a few KiB could expand to many GiB.
        left, tensors = len(text), 0
        for i, item in enumerate(items):
            try:
                item = _typed(item, dict, "a segment")
                left -= len(common) + len(item)
                record = common | item if left >= 0 else item
                left -= sum(_numbers(record.get(name), left) for name in _REPEATED)
                if left < 0:
                    raise FormatError(
                        f"expected all segments together to have at most {len(text)} members and numbers, one for each "
                        "byte of the description, got more"
                    )
                each = [record.get(name) for name in ("attached", "layer_ids")]
                tensors += 1 + sum(len(names) for names in each if isinstance(names, list | dict))
                if schema == "segments" and num_tensors is not None and tensors > num_tensors:
                    raise FormatError(f"expected {num_tensors} tensors, as in the header, got more")
                infos.append(_info(record, codec, schema))
            except FormatError as e:
                raise type(e)(f"segment {i}: {e}") from e
        if len({info.segment.id for info in infos}) != len(infos):
            raise FormatError("segments: expected each key, column and index once, got one twice")
        return cls(codec, about, "vllm" if schema == "vllm" else "segments", tuple(infos))


def plain_description(tensors: Mapping[str, Any]) -> Description:
    """A description for a file that vLLM wrote, without metadata: ``hidden_states [T, L, H]``, ``token_ids [T]``."""
    try:
        name, shape, _ = tensors["hidden_states"]
        n, num_layers, hidden_size = shape
        dtype = _DTYPE_OF_TENSOR[name]
    except (KeyError, TypeError, ValueError) as e:
        raise FormatError(
            "expected a part of hsx_dist, or vLLM's hidden_states [T, L, H] in BF16, F16 or F32 with token_ids [T]; "
            f"got tensors {sorted(tensors)[:8]}"
        ) from e
    _bounded("tokens", n, 1, MAX_TOKENS)
    _bounded("layers", num_layers, 1, MAX_HIDDEN_SIZE)
    _bounded("hidden_size", hidden_size, 1, MAX_HIDDEN_SIZE)
    chunk_tokens = max(1, _PLAIN_CHUNK_BYTES // (num_layers * hidden_size * itemsize(dtype)))
    info = SegmentInfo(Segment("", 0, 0, n, n), (), dtype, hidden_size, chunk_tokens, num_layers)
    return Description(NoneCodec(), {}, "vllm", (info,))


def _row(info: SegmentInfo, *, of_points: bool) -> dict[str, Any]:
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
        row |= {name: getattr(s, name) for name in _OF_POINTS}
    if info.sizes:
        row["sizes"] = info.sizes
    if info.loss:
        row["loss"] = [[_finite(x.rms), _finite(x.worst_token)] for x in info.loss]
    if info.attached:
        row["attached"] = {n: [a.dtype, list(a.shape), a.crc] for n, a in info.attached.items()}
    return row


def _meta(info: SegmentInfo) -> dict[str, Any]:
    return {"meta": meta} if (meta := stored_meta(info.segment)) else {}


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=True, allow_nan=False)


def stored_meta(s: Segment) -> dict[str, Any]:
    """The stored ``meta`` of a segment's sample; the client's metadata is its member ``metadata``."""
    return {**s.meta, "metadata": json.loads(s.metadata)} if s.metadata else dict(s.meta)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no infinity


#: Tables and lists of a segment.
_REPEATED = ("layer_ids", "sizes", "crcs", "loss", "attached")


def _numbers(table: Any, most: int) -> int:
    """The number of entries of a table or list and of its rows. The rows of one with more than ``most`` are skipped."""
    if not isinstance(table, list | dict):
        return 0
    return len(table) + (sum(len(x) for x in table if isinstance(x, list)) if len(table) <= most else 0)


def _info(d: dict[str, Any], codec: Codec, schema: str) -> SegmentInfo:
    total = _int(d, "total", 1, MAX_TOKENS)
    start = _int(d, "start", 0, total - 1)
    index, stop = _int(d, "index", 0, total - 1), _int(d, "stop", start + 1, total)
    meta = _get(d, "meta", Mapping) if "meta" in d else {}
    key = _get(d, "key", str)
    if not key:
        raise FormatError("key: expected a non-empty string, got ''")
    segment = Segment(key, index, start, stop, total, meta=meta, **_column(d))
    dtype = _get(d, "dtype", str)
    if dtype not in CARRIER:
        raise FormatError(f"dtype: expected one of {', '.join(CARRIER)}, got {dtype[:40]!r}")
    layer_ids = _ints(_get(d, "layer_ids", list), 0, MAX_HIDDEN_SIZE, "layer_ids")
    if not layer_ids or len(set(layer_ids)) != len(layer_ids):
        raise FormatError(f"layer_ids: expected one or more different ids, got {list(layer_ids[:20])}")
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
    loss = _losses(_get(d, "loss", list), len(layer_ids)) if "loss" in d else ()
    attached = {n: _attachment(n, a) for n, a in _get(d, "attached", dict).items()} if "attached" in d else {}
    token_crc = _int(d, "token_crc", 0, 0xFFFFFFFF)
    return replace(info, sizes=sizes, crcs=crcs, token_crc=token_crc, loss=loss, attached=attached)


def _column(d: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a segment's column. Empty when the description has none of them; it has all or none."""
    if d.keys().isdisjoint(_OF_POINTS):
        return {}
    return {"point": _get(d, "point", str)} | {name: _int(d, name, 0, MAX_HIDDEN_SIZE) for name in _OF_POINTS[1:]}


def column_error(info: SegmentInfo) -> str | None:
    """An error message if a segment's column is invalid, else ``None``."""
    s = info.segment
    if not _POINT.fullmatch(s.point):
        return f"point: expected a name of at most 64 lower-case letters, digits and '_', got {s.point[:80]!r}"
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
            made = Attachment(dtype, dims, _bounded("attached", crc, 0, 0xFFFFFFFF))
            if len(dims) <= 8 and made.nbytes <= MAX_ATTACHED_BYTES:
                return made
    raise FormatError(f"attached {name[:80]!r}: expected a dtype, a small shape and a crc32c, got {shown(item)}")


def _table(d: Mapping[str, Any], name: str, shape: tuple[int, int], most: int) -> tuple[tuple[int, ...], ...]:
    rows = _get(d, name, list)
    if len(rows) != shape[0] or any(type(row) is not list or len(row) != shape[1] for row in rows):
        raise FormatError(f"{name}: expected {shape[0]} lists of {shape[1]}, got {shown(rows)}")
    _ints([value for row in rows for value in row], 0, most, name)
    return tuple(map(tuple, rows))


def _ints(values: list[Any], least: int, most: int, name: str) -> tuple[int, ...]:
    # There may be millions of chunks, so the loop that finds a wrong value runs only when there is one.
    if values and not (set(map(type, values)) == {int} and least <= min(values) and max(values) <= most):
        for value in values:
            _bounded(name, value, least, most)
    return tuple(values)


def _bounded(name: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise FormatError(f"{name}: expected a whole number from {least} to {most}, got {shown(value)}")
    return value


def _int(d: Mapping[str, Any], name: str, least: int, most: int) -> int:
    return _bounded(name, d.get(name), least, most)


def _get(d: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    return _typed(d.get(name), kind, name)


def _typed(value: Any, kind: type[Any], name: str) -> Any:
    if not isinstance(value, kind):
        raise FormatError(f"{name}: expected a {kind.__name__}, got {type(value).__name__}")
    return value
