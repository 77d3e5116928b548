"""A part's description, and the safetensors table computed from it.

The table is never trusted: writer and reader compute it from the description with the same code, and the reader
compares. A separate crc covers the description, so that a flipped bit cannot result in another valid shape.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from hsx_dist.errors import FormatError
from hsx_dist.format.codecs import Codec, NoneCodec, codec_from_dict
from hsx_dist.format.codecs.base import itemsize
from hsx_dist.format.description_text import parse_description
from hsx_dist.format.json_objects import check_depth, shown
from hsx_dist.format.segment_info import (
    ATTACHMENT_DTYPE,
    MAX_HIDDEN_SIZE,
    MAX_LAYERS,
    MAX_TOKENS,
    OF_POINTS,
    SHARED,
    SegmentInfo,
    bounded_int,
    count_numbers,
    segment_info,
    segment_row,
    stored_meta,
    typed_member,
)
from hsx_dist.lazy import cached_property
from hsx_dist.page import FLOATS, Segment

#: Version of the layout. A change that an old reader would misread gets a new number; a new key in the description
#: does not.
FORMAT = "hsx/1"
#: Version of a part with a segment of several columns, or of another point than the hidden states.
FORMAT_OF_POINTS = "hsx/2"
#: The limit of the safetensors library, without the header's length field.
MAX_HEADER_BYTES = 100_000_000
#: Our dtype names → safetensors' names.
TENSOR_DTYPE = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int32": "I32"}
#: Written into every part, so that a part without its run explains itself.
LAYER_MEANING = (
    "layer id k is the residual stream that enters decoder layer k: 0 the embeddings, N (the model's number of "
    "layers) the last layer's output before the final norm"
)
_LAYER_MEANING_OF_POINTS = f"of hidden_states, {LAYER_MEANING}; of another point, layer id k is decoder layer k"
_WIDTH = {**{k: np.dtype(v).itemsize for k, v in ATTACHMENT_DTYPE.items()}, "BF16": 2}
_DTYPE_OF_TENSOR = {TENSOR_DTYPE[dtype]: dtype for dtype in FLOATS}
#: Chunk size for a file without a description. Such a file has no checksums, so this only limits the memory in use.
_PLAIN_CHUNK_BYTES = 1 << 20

#: ``segments``: one tensor per segment and layer. ``vllm``: one sample as ``hidden_states`` and ``token_ids``.
Schema = Literal["segments", "vllm"]
#: (safetensors dtype, shape, (begin, end) within the data section)
Tensor = tuple[str, tuple[int, ...], tuple[int, int]]


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
        rows = [segment_row(info, of_points=self.of_points) for info in self.segments]
        shared = (*SHARED, *OF_POINTS) if self.of_points else SHARED
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
        about = typed_member(body, "about", dict)
        check_depth([about, typed_member(body, "codec", dict)], "the description")
        codec = codec_from_dict(body["codec"])
        schema = typed_member(body, "schema", str)
        common = typed_member(body, "common", dict)
        if "meta" in common:  # each segment would have it: a small text would expand to gigabytes
            raise FormatError("common: expected members that segments share, got meta")
        items = typed_member(body, "segments", list)
        if schema not in ("segments", "vllm"):
            raise FormatError(f"schema: expected 'segments' or 'vllm', got {shown(schema)}")
        if not items or (schema == "vllm" and len(items) != 1):
            raise FormatError(f"segments: expected {'one' if schema == 'vllm' else 'at least one'}, got {len(items)}")
        infos = []
        # Members of ``common`` are in the text once but apply to every segment: a few KiB could expand to many GiB.
        left, tensors = len(text), 0
        for i, item in enumerate(items):
            try:
                left -= len(common) + len(item)
                record = common | item if left >= 0 else item
                left -= count_numbers(record, left)
                if left < 0:
                    raise FormatError(
                        f"expected all segments together to have at most {len(text)} members and numbers, one for each "
                        "byte of the description, got more"
                    )
                each = [record.get(name) for name in ("attached", "layer_ids")]
                tensors += 1 + sum(len(names) for names in each if isinstance(names, list | dict))
                if schema == "segments" and num_tensors is not None and tensors > num_tensors:
                    raise FormatError(f"expected {num_tensors} tensors, as in the header, got more")
                infos.append(segment_info(record, codec, schema))
            except FormatError as e:
                raise type(e)(f"segment {i}: {e}") from e
        if len({info.segment.id for info in infos}) != len(infos):
            raise FormatError("segments: expected each key, column and index once, got one twice")
        return cls(codec, about, "vllm" if schema == "vllm" else "segments", tuple(infos))


def described_layers(about: Mapping[str, Any]) -> int | None:
    """The number of layers of the model that a part is of; ``None`` if its ``about`` has none.

    Anyone may have written a part, so a number that no layer's id can have is none.
    """
    found = about.get("num_hidden_layers")
    return found if type(found) is int and 0 < found <= MAX_HIDDEN_SIZE else None


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
    bounded_int("tokens", n, 1, MAX_TOKENS)
    bounded_int("layers", num_layers, 1, MAX_LAYERS)
    bounded_int("hidden_size", hidden_size, 1, MAX_HIDDEN_SIZE)
    chunk_tokens = max(1, _PLAIN_CHUNK_BYTES // (num_layers * hidden_size * itemsize(dtype)))
    info = SegmentInfo(Segment("", 0, 0, n, n), (), dtype, hidden_size, chunk_tokens, num_layers)
    return Description(NoneCodec(), {}, "vllm", (info,))


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=True, allow_nan=False)


def _meta(info: SegmentInfo) -> dict[str, Any]:
    return {"meta": meta} if (meta := stored_meta(info.segment)) else {}
