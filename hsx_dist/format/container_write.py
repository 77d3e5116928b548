"""Pages → encoded segments → one part: a list of buffers that is uploaded without concatenation."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from hsx_dist.format.checksum import crc32c, crc32c_hex, crc32c_join
from hsx_dist.format.codecs import Codec, NoneCodec, codec_for
from hsx_dist.format.codecs.base import Allocate, allocate, encode_into, flat
from hsx_dist.format.description import Description
from hsx_dist.format.header import build_header
from hsx_dist.format.loss import Squares, combine, measure
from hsx_dist.format.segment_info import (
    ATTACHMENT_DTYPE,
    ATTACHMENT_NAME,
    MAX_ATTACHED_BYTES,
    MAX_CHUNK_BYTES,
    RESERVED_NAMES,
    Attachment,
    SegmentInfo,
    column_error,
    stored_meta,
)
from hsx_dist.lazy import cached_property
from hsx_dist.page import CARRIER, Page, Segment
from hsx_dist.store.base import Buffer

_ATTACHED_AS = {np.dtype(v): k for k, v in ATTACHMENT_DTYPE.items()}


@dataclass(frozen=True, eq=False)
class EncodedSegment:
    """A whole segment, encoded.

    ``info``: as a part describes it, with codec ``none`` in the layout of ``chunks``. ``token_ids``: int64 ``[n]``.
    ``chunks``: the codec's output, uint8, ``[layer][chunk]``. ``attached``: name → the user's small array.
    ``plain``: values in token-major order, as in vLLM's schema: ``chunks`` is ``[1][chunk]``, each ``[n, L, H]``.
    """

    info: SegmentInfo
    token_ids: np.ndarray[Any, Any]
    chunks: tuple[tuple[np.ndarray[Any, Any], ...], ...]
    codec: Codec
    attached: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    plain: bool = False

    @property
    def segment(self) -> Segment:
        return self.info.segment

    @cached_property
    def nbytes(self) -> int:
        """Bytes that the segment adds to a part's data: chunks, token ids and attached arrays."""
        small = self.token_ids.nbytes + sum(a.nbytes for a in self.attached.values())
        return small + sum(chunk.nbytes for layer in self.chunks for chunk in layer)

    @property
    def raw_nbytes(self) -> int:
        """Bytes of the states before encoding."""
        return self.info.num_layers * self.segment.num_tokens * self.info.row_bytes

    @cached_property
    def header_nbytes(self) -> int:
        """Upper bound of the bytes that the segment adds to a part's header, which safetensors limits to 100 MB."""
        layers, chunks = self.info.num_layers, self.info.num_chunks
        key = 14 * len(self.segment.key)  # one character beyond the BMP: two escapes, escaped again
        attached = sum(240 + 2 * len(name) + 44 * a.ndim for name, a in self.attached.items())
        if meta := stored_meta(self.segment):
            # Its quotes and escapes are escaped again. ``allow_nan=False``, as in the description: a value that cannot
            # be stored fails its segment here; in ``build_part`` it would fail the whole part.
            key += 2 * len(json.dumps(meta, sort_keys=True, allow_nan=False)) + 8
        return 640 + key + attached + layers * (24 + 120 + 48) + layers * chunks * 24


@dataclass(frozen=True, slots=True)
class _Chunk:
    token_ids: np.ndarray[Any, Any]
    layers: tuple[np.ndarray[Any, Any], ...]  # [layer], encoded: uint8
    crcs: tuple[int, ...]
    squares: tuple[Squares, ...]  # [layer], with a lossy codec


class SegmentEncoder:
    """Collects and encodes the pages of *one* segment, in any order, from several threads at once.

    After ``add`` returns, nothing refers to the page's buffer. ``allocate(n)`` returns memory for encoded bytes, uint8
    ``[n]``; a process that builds many parts passes a ``BlockPool``'s. ``alone``: the segment will be the only one of
    its object. ``add`` then lays out a whole sample as vLLM's schema requires, which saves a copy later.
    """

    def __init__(self, codec: Codec, allocate: Allocate = allocate, *, alone: bool = False):
        self._codec = codec
        self._allocate = allocate
        self._alone = alone
        self._lock = threading.Lock()
        self._info: SegmentInfo | None = None
        self._taken: set[int] = set()
        self._done: dict[int, _Chunk] = {}

    def add(self, page: Page, look: Callable[[int, np.ndarray[Any, Any]], None] = lambda *_: None) -> int:
        """Encode one page. Returns the encoded bytes, token ids included; the sum over all pages is the segment's
        ``nbytes`` without attached arrays.

        Calls ``look`` with a layer's position and some of its rows, until it has got every row of every layer.

        Raises:
            ValueError: the page is of another segment, does not begin and end where a chunk does, or was added before.
        """
        with self._lock:
            info = _check_page(page, self._info)
            if page.chunk in self._taken:
                raise ValueError(f"{_where(info.segment)}: expected each page once, got page {page.chunk} twice")
            self._info = info
            self._taken.add(page.chunk)
        codec = codec_for(self._codec, page.dtype)
        try:
            if self._is_plain(info.segment):
                layers: tuple[np.ndarray[Any, Any], ...] = (self._rows(page, info, look),)
            else:
                layers = tuple(
                    encode_into(codec, page.layer(k), page.dtype, self._allocate, partial(look, k))
                    for k in range(info.num_layers)
                )
            lossy = range(info.num_layers) if codec.lossy else ()
            chunk = _Chunk(
                np.array(page.token_ids, dtype="<i8"),
                layers,
                tuple(map(crc32c, layers)),
                tuple(self._measure(page.layer(k), layers[k], page.dtype) for k in lossy),
            )
        except BaseException:
            with self._lock:
                self._taken.discard(page.chunk)
            raise
        with self._lock:
            self._done[page.chunk] = chunk
        return chunk.token_ids.nbytes + sum(data.nbytes for data in layers)

    def _is_plain(self, segment: Segment) -> bool:
        return self._alone and isinstance(self._codec, NoneCodec) and _is_a_vllm_sample(segment)

    def _rows(self, page: Page, info: SegmentInfo, look: Callable[..., None]) -> np.ndarray[Any, Any]:
        data = self._allocate(page.num_tokens * info.num_layers * info.row_bytes)
        rows = data.view(CARRIER[info.dtype]).reshape(page.num_tokens, info.num_layers, info.hidden_size)
        for k in range(info.num_layers):
            look(k, page.layer(k))
            rows[:, k] = page.layer(k)
        return data

    def _measure(self, x: np.ndarray[Any, Any], data: np.ndarray[Any, Any], dtype: str) -> Squares:
        decoded = np.empty(x.shape, CARRIER[dtype])
        self._codec.decode(data.data, decoded, dtype)
        return measure(x, decoded, dtype)

    @property
    def complete(self) -> bool:
        """Whether all pages are added and encoded."""
        with self._lock:
            return self._info is not None and len(self._done) == self._info.num_chunks

    def finish(self, attached: Mapping[str, np.ndarray[Any, Any]] | None = None) -> EncodedSegment:
        """Return the segment.

        ``attached``: the user's small arrays for the sample (a loss mask, a label), by name, stored with its first
        segment. Default: the arrays that its pages carry.

        Raises:
            ValueError: pages are missing; an attached array cannot be stored or is not for the first segment.
        """
        with self._lock:
            info = self._info
            if info is None:
                raise ValueError("expected the pages of a segment, got none")
            missing = [c for c in range(info.num_chunks) if c not in self._done]
            if missing:
                raise ValueError(
                    f"{_where(info.segment)}: expected {info.num_chunks} pages, got {len(missing)} fewer: "
                    f"{missing[:8]} are missing"
                )
            chunks = [self._done[c] for c in range(info.num_chunks)]
        token_ids = np.concatenate([c.token_ids for c in chunks])
        layers = tuple(zip(*(c.layers for c in chunks), strict=True))
        attached = _check_attached(info.segment, info.segment.attached if attached is None else attached)
        sized = not isinstance(self._codec, NoneCodec)
        described = replace(
            info,
            segment=replace(info.segment, attached={}),
            sizes=tuple(tuple(chunk.nbytes for chunk in layer) for layer in layers) if sized else (),
            crcs=tuple(zip(*(c.crcs for c in chunks), strict=True)),
            token_crc=crc32c(token_ids),
            loss=tuple(combine([c.squares[k] for c in chunks]) for k in range(info.num_layers) if chunks[0].squares),
            attached={n: Attachment(_ATTACHED_AS[a.dtype], a.shape, crc32c(a)) for n, a in sorted(attached.items())},
        )
        return EncodedSegment(described, token_ids, layers, self._codec, attached, plain=self._is_plain(info.segment))


@dataclass(frozen=True, eq=False)
class EncodedPart:
    """One object, ready to upload. ``buffers``: the header first; their concatenation has ``size`` bytes."""

    header: bytes
    buffers: list[Buffer]
    size: int
    #: CRC-32C of the whole object, eight hex digits.
    crc32c: str
    #: Bytes of ``header``: length field, JSON and padding.
    header_bytes: int
    raw_bytes: int


def build_part(segments: Sequence[EncodedSegment], codec: Codec, about: Mapping[str, Any]) -> EncodedPart:
    """Build one part from ``segments``, which ``codec`` encoded. The part refers to their data without a copy.

    A whole sample alone, with codec ``none``, is stored in vLLM's schema: its layers are transposed, one chunk at a
    time. ``about`` (JSON types) describes the run: model, revision, versions, …

    Raises:
        ValueError: no segments; a segment is given twice; another codec encoded them; or the header is too large.
    """
    if not segments:
        raise ValueError("expected at least one segment, got none")
    if len({s.segment.id for s in segments}) != len(segments):
        raise ValueError("expected every segment once, got one twice")
    if any(s.codec != codec for s in segments):
        raise ValueError(f"expected segments that {codec} encoded, got {sorted({str(s.codec) for s in segments})}")
    if len(segments) > 1 and any(s.plain for s in segments):
        raise ValueError("expected segments in the layout for several to a part, got one encoded with alone=True")
    if len(segments) == 1 and _is_a_vllm_sample(segments[0].segment) and isinstance(codec, NoneCodec):
        description, data = _vllm_schema(segments[0], codec, about)
    else:
        description, data = _segments_schema(segments, codec, about)
    header = build_header(description)
    buffers = [header, *(buffer for buffer, _ in data)]
    size = len(header) + description.data_bytes
    actual = sum(_nbytes(b) for b in buffers)
    if actual != size:
        raise ValueError(f"expected {size} bytes, got {actual}: {codec} encoded chunks of a wrong size")
    crc = crc32c_hex(_crc32c_of([(header, None), *data]))
    return EncodedPart(header, buffers, size, crc, len(header), sum(s.raw_nbytes for s in segments))


#: A buffer to store, and its crc32c if known.
_Piece = tuple[Buffer, int | None]
#: Computing the crc of fewer bytes than this costs less than joining a known crc to another.
_WORTH_JOINING = 512 << 10


def _crc32c_of(pieces: Iterable[_Piece]) -> int:
    """CRC-32C of the concatenated pieces, from the known crcs of large pieces.

    Chunks are thus read only once, when they are encoded. A later corruption in memory is not in the crc, so a reader
    detects it.
    """
    value = 0
    for buffer, known in pieces:
        if known is not None and (nbytes := _nbytes(buffer)) >= _WORTH_JOINING:
            value = crc32c_join(value, known, nbytes)
        else:
            value = crc32c(buffer, value)
    return value


def _is_a_vllm_sample(s: Segment) -> bool:
    """Whether vLLM's schema can hold the segment: one whole sample's hidden states."""
    return not s.of_points and s.index == 0 and s.start == 0 and s.stop == s.total


def _checked(s: EncodedSegment) -> Iterator[tuple[Sequence[np.ndarray[Any, Any]], tuple[int, ...]]]:
    """The segment's chunks and their crc32c, layer by layer."""
    assert s.info.crcs is not None, "an encoder takes the crc32c of each chunk"
    return zip(s.chunks, s.info.crcs, strict=True)


def _segments_schema(
    segments: Sequence[EncodedSegment], codec: Codec, about: Mapping[str, Any]
) -> tuple[Description, list[_Piece]]:
    content: dict[str, Iterable[_Piece]] = {}
    for i, s in enumerate(segments):
        content |= _small(s, f"{i}.")
        content |= {f"{i}.{k}": zip(*layer, strict=True) for k, layer in enumerate(_checked(s))}
    description = Description(codec, about, "segments", tuple(s.info for s in segments))
    return description, [piece for name in description.tensors for piece in content[name]]


def _small(s: EncodedSegment, prefix: str) -> dict[str, Iterable[_Piece]]:
    found: dict[str, Iterable[_Piece]] = {f"{prefix}token_ids": [(s.token_ids, None)]}
    return found | {f"{prefix}attached.{name}": [(a, None)] for name, a in s.attached.items()}


def _vllm_schema(s: EncodedSegment, codec: Codec, about: Mapping[str, Any]) -> tuple[Description, list[_Piece]]:
    states, crcs = next(_checked(s)) if s.plain else _transposed(s)
    description = Description(codec, about, "vllm", (replace(s.info, crcs=(crcs,)),))
    content = {**_small(s, ""), "hidden_states": zip(states, crcs, strict=True)}
    return description, [piece for name in description.tensors for piece in content[name]]


def _transposed(s: EncodedSegment) -> tuple[Sequence[np.ndarray[Any, Any]], tuple[int, ...]]:
    """A copy of the chunks in token-major order, and their crc32c."""
    carrier, width = CARRIER[s.info.dtype], s.info.hidden_size
    layers = ([layer[c].view(carrier).reshape(-1, width) for layer in s.chunks] for c in range(s.info.num_chunks))
    states = [flat(np.stack(chunk, axis=1)) for chunk in layers]
    return states, tuple(map(crc32c, states))


def _check_attached(segment: Segment, attached: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Check the attached arrays. Returns little-endian, contiguous copies."""
    if attached and (segment.index or segment.column):
        raise ValueError(
            f"{_where(segment)}: expected attached arrays with segment 0 alone, of column 0, got {sorted(attached)}"
        )
    found = {}
    for name, value in attached.items():
        if name in RESERVED_NAMES:
            raise ValueError(
                f"{_where(segment)}: expected an array to attach with another name than "
                f"{', '.join(sorted(RESERVED_NAMES))}, got {name!r}. Rename the array"
            )
        array = np.array(value, order="C")
        little = array.dtype.newbyteorder("<")
        if not ATTACHMENT_NAME.fullmatch(name) or little not in _ATTACHED_AS:
            raise ValueError(
                f"{_where(segment)}: expected names of letters, digits, '_', '-' and arrays of bool, integers or "
                f"floats of at most 64 bits to attach, got {name!r} of {array.dtype}"
            )
        if name == "loss_mask" and array.shape != (segment.total,):
            raise ValueError(
                f"{_where(segment)}: expected a loss_mask of {segment.total} tokens to attach, got shape {array.shape}"
            )
        if not Attachment(_ATTACHED_AS[little], array.shape, 0).is_small:
            raise ValueError(
                f"{_where(segment)}: expected at most {MAX_ATTACHED_BYTES} bytes to attach, where a dimension of 0 "
                f"counts as 1, and 8 dimensions, got {array.nbytes} bytes of {name!r}, shape {array.shape}"
            )
        found[name] = array.astype(little, copy=False)
    return found


def _check_page(page: Page, known: SegmentInfo | None) -> SegmentInfo:
    """Check a page for consistency, and against ``known``, the segment of the pages before it. Returns its segment."""
    s, n = page.segment, page.num_tokens
    info = SegmentInfo(s, tuple(page.layer_ids), page.dtype, page.hidden_size, page.chunk_tokens, len(page.layer_ids))
    if known is not None and info != known:
        raise ValueError(f"{_where(known.segment)}: expected a page of {known}, got a page of {info}")
    if known is None:
        if not 0 <= s.start < s.stop <= s.total or s.index < 0 or page.chunk_tokens < 1 or page.hidden_size < 1:
            raise ValueError(f"expected a segment of at least one token within its sample, got {info}")
        if page.dtype not in CARRIER:
            raise ValueError(f"{_where(s)}: expected dtype {', '.join(CARRIER)}, got {page.dtype!r}")
        if not info.layer_ids or len(set(info.layer_ids)) != info.num_layers:
            raise ValueError(f"{_where(s)}: expected at least one layer, each once, got {info.layer_ids}")
        if wrong := column_error(info):
            raise ValueError(f"{_where(s)}: {wrong}")
        if min(info.chunk_tokens, s.num_tokens) * info.row_bytes > MAX_CHUNK_BYTES:
            raise ValueError(f"{_where(s)}: expected pages of at most {MAX_CHUNK_BYTES} bytes a layer, got {info}")
    first, odd = divmod(page.start - s.start, page.chunk_tokens)
    if odd or not 0 <= first < info.num_chunks or (page.start - s.start, page.stop - s.start) != info.chunk_span(first):
        raise ValueError(
            f"{_where(s)}: expected pages of {page.chunk_tokens} tokens from {s.start}, got [{page.start}, {page.stop})"
        )
    rows, layers = page.data.shape[:2] if page.order == "TLH" else page.data.shape[1::-1]
    if page.data.shape != tuple(page.shape) or layers != info.num_layers or rows < n:
        raise ValueError(f"{_where(s)}: expected data {page.order} of {n} rows of {info}, got shape {page.data.shape}")
    if page.data.dtype != CARRIER[page.dtype]:
        raise ValueError(f"{_where(s)}: expected {CARRIER[page.dtype]} for {page.dtype}, got {page.data.dtype}")
    if page.token_ids.shape != (n,):
        raise ValueError(f"{_where(s)}: expected {n} token ids, got shape {page.token_ids.shape}")
    return info


def _where(s: Segment) -> str:
    column = f" of column {s.column} ({s.point})" if s.of_points else ""
    return f"segment {s.index}{column} of {s.key!r}"


def _nbytes(data: Buffer) -> int:
    return len(data) if isinstance(data, bytes | bytearray) else data.nbytes
