"""What a part says of itself, and the safetensors table that follows from it.

The table is never trusted: writer and reader compute it from the description with the same code, and the reader
compares. A description is covered by a crc of its own, so that a flipped bit in it cannot pass for another shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from hsx_dist.errors import FormatError
from hsx_dist.format.codecs import Codec, NoneCodec, Plane, codec_from_dict
from hsx_dist.format.codecs.base import itemsize
from hsx_dist.page import CARRIER, Segment

#: Version of the layout. What an old reader would misread gets a new number; new keys in the description do not.
FORMAT = "hsx/1"
#: The limit of the safetensors library, header length field not counted.
MAX_HEADER_BYTES = 100_000_000
#: Raw bytes of one chunk of one layer: what a reader must hold to decode it.
MAX_CHUNK_BYTES = 256 << 20
MAX_HIDDEN_SIZE = 1 << 20
MAX_TOKENS = 1 << 40

#: Our dtype names → those of safetensors.
TENSOR_DTYPE = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_DTYPE_OF_TENSOR = {v: k for k, v in TENSOR_DTYPE.items()}
#: A chunk of a file without a description: such a file has no checksums, so this only sets how much is held at once.
_PLAIN_CHUNK_BYTES = 1 << 20

#: ``segments``: tensors for each segment, layer and plane. ``vllm``: one sample as ``hidden_states`` and ``token_ids``.
Schema = Literal["segments", "vllm"]
#: (safetensors dtype, shape, (begin, end) within the data section)
Tensor = tuple[str, tuple[int, ...], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One segment of a part. ``layer_ids`` are vLLM's, in stored order; empty in a file that does not tell them."""

    segment: Segment
    layer_ids: tuple[int, ...]
    dtype: str
    hidden_size: int
    chunk_tokens: int
    num_layers: int

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


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """A segment and what is needed to find and check its chunks.

    ``sizes``: bytes of every chunk, ``[layer][plane of varying size][chunk]``. ``crcs``: crc32c of every chunk over its
    planes in order, ``[layer][chunk]``; in schema ``vllm`` over all layers at once, ``[0][chunk]``.
    ``None`` in a file of vLLM's own, which has no checksums.
    """

    info: SegmentInfo
    sizes: tuple[tuple[tuple[int, ...], ...], ...]
    crcs: tuple[tuple[int, ...], ...] | None
    token_crc: int | None

    def plane_sizes(self, layer: int, planes: Sequence[Plane]) -> list[list[int]]:
        """Bytes of every chunk, ``[plane][chunk]``, of the ``layer``-th stored layer."""
        info, varying = self.info, iter(self.sizes[layer] if self.sizes else ())
        spans = [info.chunk_span(c) for c in range(info.num_chunks)]
        return [
            list(next(varying))
            if p.bytes_per_element is None
            else [(b - a) * info.hidden_size * p.bytes_per_element for a, b in spans]
            for p in planes
        ]


@dataclass(frozen=True)
class Description:
    """Everything that a part says of itself; its JSON is in the safetensors metadata under ``hsx``."""

    codec: Codec
    about: Mapping[str, Any]
    schema: Schema
    segments: tuple[SegmentRecord, ...]

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Name → dtype, shape and place of every tensor, in the order in which they lie, without holes."""
        entries: list[tuple[str, str, tuple[int, ...], int]] = []
        if self.schema == "vllm":
            info = self.segments[0].info
            n, shape = info.segment.num_tokens, (info.segment.num_tokens, info.num_layers, info.hidden_size)
            entries.append(("token_ids", "I64", (n,), 8 * n))
            entries.append(("hidden_states", TENSOR_DTYPE[info.dtype], shape, n * info.num_layers * info.row_bytes))
        else:
            # The widest type first: every tensor is then aligned for its dtype, as views in torch need it.
            for i, record in enumerate(self.segments):
                n = record.info.segment.num_tokens
                entries.append((f"{i}.token_ids", "I64", (n,), 8 * n))
            for i, record in enumerate(self.segments):
                info, planes = record.info, self.codec.planes(record.info.dtype)
                for k in range(info.num_layers):
                    for plane, sizes in zip(planes, record.plane_sizes(k, planes), strict=True):
                        nbytes = sum(sizes)
                        if plane.name:
                            entries.append((f"{i}.{k}.{plane.name}", "U8", (nbytes,), nbytes))
                        else:
                            shape2 = (info.segment.num_tokens, info.hidden_size)
                            entries.append((f"{i}.{k}", TENSOR_DTYPE[info.dtype], shape2, nbytes))
        ends = accumulate(e[3] for e in entries)
        return {name: (d, shape, (end - size, end)) for (name, d, shape, size), end in zip(entries, ends, strict=True)}

    @property
    def data_bytes(self) -> int:
        """Bytes after the header."""
        return max(end for _, _, (_, end) in self.tensors.values())

    def to_json(self) -> str:
        """Compact, sorted, pure ASCII: equal descriptions are equal strings."""
        rows = [_shared(r.info) for r in self.segments]
        common = {k: v for k, v in rows[0].items() if all(r[k] == v for r in rows)}
        segments = []
        for row, r in zip(rows, self.segments, strict=True):
            s = r.info.segment
            own = {k: v for k, v in row.items() if k not in common}
            own |= {"key": s.key, "index": s.index, "start": s.start, "stop": s.stop, "total": s.total}
            own |= {"sizes": r.sizes, "crcs": r.crcs, "token_crc": r.token_crc}
            if s.meta:
                own["meta"] = dict(s.meta)
            segments.append(own)
        body = {
            "codec": self.codec.to_dict(),
            "about": dict(self.about),
            "schema": self.schema,
            "common": common,
            "segments": segments,
        }
        return json.dumps(body, separators=(",", ":"), sort_keys=True, ensure_ascii=True, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Description:
        """Read and check every number. ``FormatError`` (``UnknownCodec`` for its codec) says what is wrong."""
        body = _typed(parse_json(text, floats=True), dict, "the description")
        codec = codec_from_dict(_get(body, "codec", dict))
        about = _get(body, "about", dict)
        schema = _get(body, "schema", str)
        common = _get(body, "common", dict)
        items = _get(body, "segments", list)
        if schema not in ("segments", "vllm"):
            raise FormatError(f"schema: expected 'segments' or 'vllm', got {schema!r}")
        if not items or (schema == "vllm" and len(items) != 1):
            raise FormatError(f"segments: expected {'one' if schema == 'vllm' else 'at least one'}, got {len(items)}")
        records = []
        for i, item in enumerate(items):
            try:
                records.append(_record(common | _typed(item, dict, "a segment"), codec, schema))
            except FormatError as e:
                raise type(e)(f"segment {i}: {e}") from e
        return cls(codec, about, "vllm" if schema == "vllm" else "segments", tuple(records))


def plain_description(tensors: Mapping[str, Any]) -> Description:
    """A description for a file of vLLM's own, without metadata: ``hidden_states [T, L, H]`` and ``token_ids [T]``."""
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
    return Description(NoneCodec(), {}, "vllm", (SegmentRecord(info, (), None, None),))


def parse_json(text: str | bytes, *, floats: bool) -> Any:
    """JSON without duplicate names or NaN; ``floats=False`` refuses fractions too. ``FormatError`` otherwise."""

    def refuse(token: str) -> Any:
        raise FormatError(f"expected JSON with whole numbers, got {token[:40]}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        d = dict(pairs)
        if len(d) != len(pairs):
            raise FormatError("expected JSON without duplicate names")
        return d

    try:
        text = text if isinstance(text, str) else text.decode()
        kwargs: dict[str, Any] = {} if floats else {"parse_float": refuse}
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse, **kwargs)
    except FormatError:
        raise
    except (ValueError, RecursionError) as e:
        raise FormatError(f"expected JSON: {e}") from e


def _shared(info: SegmentInfo) -> dict[str, Any]:
    """What the segments of a run usually have in common: written once."""
    return {
        "dtype": info.dtype,
        "hidden_size": info.hidden_size,
        "layer_ids": list(info.layer_ids),
        "chunk_tokens": info.chunk_tokens,
    }


def _record(d: dict[str, Any], codec: Codec, schema: str) -> SegmentRecord:
    total = _int(d, "total", 1, MAX_TOKENS)
    start = _int(d, "start", 0, total - 1)
    index, stop = _int(d, "index", 0, total - 1), _int(d, "stop", start + 1, total)
    meta = _get(d, "meta", dict) if "meta" in d else {}
    segment = Segment(_get(d, "key", str), index, start, stop, total, meta=meta)
    dtype = _get(d, "dtype", str)
    if dtype not in CARRIER:
        raise FormatError(f"dtype: expected one of {', '.join(CARRIER)}, got {dtype!r}")
    layer_ids = _ints(_get(d, "layer_ids", list), 0, MAX_HIDDEN_SIZE, "layer_ids")
    if not layer_ids or len(set(layer_ids)) != len(layer_ids):
        raise FormatError(f"layer_ids: expected at least one, each once, got {layer_ids}")
    hidden_size = _int(d, "hidden_size", 1, MAX_HIDDEN_SIZE)
    chunk_tokens = _int(d, "chunk_tokens", 1, MAX_TOKENS)
    info = SegmentInfo(segment, layer_ids, dtype, hidden_size, chunk_tokens, len(layer_ids))
    if min(chunk_tokens, segment.num_tokens) * info.row_bytes > MAX_CHUNK_BYTES:
        raise FormatError(f"chunk_tokens: {chunk_tokens} tokens of {info.row_bytes} bytes exceed {MAX_CHUNK_BYTES}")
    if schema == "vllm" and (codec.planes(dtype)[0].name or segment.num_tokens != total):
        raise FormatError("schema vllm: expected a whole sample, not encoded")
    varying = sum(p.bytes_per_element is None for p in codec.planes(dtype))
    sizes = _nested(d, "sizes", (len(layer_ids), varying, info.num_chunks), MAX_CHUNK_BYTES * 2) if varying else ()
    crcs = _nested(d, "crcs", (len(layer_ids) if schema == "segments" else 1, info.num_chunks), 0xFFFFFFFF)
    return SegmentRecord(info, sizes, crcs, _int(d, "token_crc", 0, 0xFFFFFFFF))


def _nested(d: Mapping[str, Any], name: str, shape: tuple[int, ...], most: int) -> tuple[Any, ...]:
    def check(value: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != shape[0]:
            got = f"{len(value)} values" if isinstance(value, list) else type(value).__name__
            raise FormatError(f"{name}: expected a list of {shape[0]}, got {got}")
        return _ints(value, 0, most, name) if len(shape) == 1 else tuple(check(v, shape[1:]) for v in value)

    return check(d.get(name), shape)


def _ints(values: list[Any], least: int, most: int, name: str) -> tuple[int, ...]:
    for value in values:
        _bounded(name, value, least, most)
    return tuple(values)


def _bounded(name: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise FormatError(f"{name}: expected a whole number from {least} to {most}, got {str(value)[:40]}")
    return value


def _int(d: Mapping[str, Any], name: str, least: int, most: int) -> int:
    return _bounded(name, d.get(name), least, most)


def _get(d: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    return _typed(d.get(name), kind, name)


def _typed(value: Any, kind: type[Any], name: str) -> Any:
    if not isinstance(value, kind):
        raise FormatError(f"{name}: expected a {kind.__name__}, got {type(value).__name__}")
    return value
