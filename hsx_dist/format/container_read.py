"""Reading parts. The header has the position of every chunk; only requested chunks are fetched, checked and decoded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hsx_dist.errors import ConfigError, FormatError
from hsx_dist.format.checksum import check_crc32c, crc32c
from hsx_dist.format.chunk_places import ChunkPlaces
from hsx_dist.format.codecs import Codec, codec_for
from hsx_dist.format.codecs.base import FREE_BYTES, check_expansion, check_whole, raw_array
from hsx_dist.format.header import parse_header
from hsx_dist.format.header_source import header_of
from hsx_dist.format.loss import Loss
from hsx_dist.format.part_request import positions, span
from hsx_dist.format.part_source import PartSource, fetched, located, verified
from hsx_dist.format.segment_info import ATTACHMENT_DTYPE, SegmentInfo
from hsx_dist.page import CARRIER
from hsx_dist.store.base import coalesce

#: Attempts to open an object whose size changes between the requests.
_MOST_LOOKS = 10
#: Memory for states: shape and dtype → a carrier array, its content arbitrary.
Empty = Callable[[tuple[int, int, int], str], np.ndarray[Any, Any]]
#: Byte ranges of a part's data → their bytes.
_Fetch = Callable[[Sequence[tuple[int, int]]], list[memoryview]]
T = TypeVar("T")


class Loaded(NamedTuple):
    """``states``: carrier ``[n, L, H]``; ``token_ids``: int64, from ``Part.load`` of the *whole* segment; ``attached``:
    the requested arrays that exist, by name."""

    states: np.ndarray[Any, Any]
    token_ids: np.ndarray[Any, Any]
    attached: dict[str, np.ndarray[Any, Any]]


class Part:
    """One stored part, open for reading; immutable, and safe to share between threads.

    If bytes fail a check, they are fetched once more, past all caches. Only a second failure is raised, so an answer
    that was damaged on the way does no harm.

    Also opens a file that vLLM wrote (``hidden_states``, ``token_ids``, no metadata): one segment without key, layer
    ids and checksums.
    """

    def __init__(self, store: PartSource, name: str, body: bytes, size: int, front: bytes = b""):
        """``body``: the header without its length field. ``size``: the object's size in bytes. ``front``: the first
        bytes of its data."""
        self.name = name
        #: Size of the object in bytes.
        self.size = size
        #: Bytes of length field, JSON and padding.
        self.header_bytes = 8 + len(body)
        self.description, self._tensors = parse_header(body, size - self.header_bytes)
        self._store = store
        self._front = memoryview(front)
        self._mended = False
        self._size_is_known = False
        self._places = ChunkPlaces()
        self._where = f"{store.url.rstrip('/')}/{name}"

    @classmethod
    def open(
        cls,
        store: PartSource,
        name: str,
        *,
        header_bytes: int | None = None,
        size: int | None = None,
        front_bytes: int = 0,
    ) -> Part:
        """Read and check the header.

        ``header_bytes`` and ``size``: from a receipt. With both, opening takes one request; each omitted argument costs
        one more.
        ``front_bytes``: bytes of data to fetch in the same request and keep. All token ids are at the front.

        Raises:
            NotFound, StoreError: raised by the store.
            FormatError: the object is not a part, or is truncated; ``UnknownCodec`` when its codec is not registered.
            IntegrityError: its description changed after it was written.
        """

        def read(again: bool) -> Part:
            for _ in range(_MOST_LOOKS if size is None else 0):
                found = store.head(name).size
                try:
                    return cls._open(store, name, header_bytes, found, front_bytes, again)
                except FormatError:
                    # If a server replaced the object between two requests, open it again.
                    if store.head(name).size == found:
                        raise
            whole = store.head(name).size if size is None else size
            return cls._open(store, name, header_bytes, whole, front_bytes, again)

        part = verified(f"{store.url.rstrip('/')}/{name}", read)
        part._size_is_known = size is None
        return part

    @classmethod
    def _open(
        cls, store: PartSource, name: str, header_bytes: int | None, size: int, front_bytes: int, again: bool
    ) -> Part:
        with header_of(store, name, header_bytes, size, front_bytes, again) as (body, front):
            return cls(store, name, body, size, front)

    @property
    def front_bytes(self) -> int:
        """Bytes of the data that were fetched with the header, and are kept."""
        return self._front.nbytes

    @property
    def codec(self) -> Codec:
        return self.description.codec

    @property
    def about(self) -> dict[str, Any]:
        """The run's description when it wrote the part: model, revision, versions, …"""
        return dict(self.description.about)

    @property
    def segments(self) -> tuple[SegmentInfo, ...]:
        return self.description.segments

    def check_size(self) -> None:
        """Compare ``size``, which may be a receipt's claim, with the store's. ``FormatError`` if they differ."""
        if self._size_is_known:
            return
        found = self._store.head(self.name).size
        if found != self.size:
            raise FormatError(f"{self._where}: expected {self.size} bytes, got {found}")
        self._size_is_known = True

    def layer_bytes(self, i: int) -> dict[int, int]:
        """Layer id → stored bytes of the states of segment ``i``; empty for a file without layer ids."""
        info = self._info(i)
        return {layer: info.layer_bytes(k) for k, layer in enumerate(info.layer_ids)}

    def loss(self, i: int) -> dict[int, Loss]:
        """Layer id → a lossy codec's loss in segment ``i``, measured when it was written; empty for other codecs."""
        info = self._info(i)
        return dict(zip(info.layer_ids, info.loss, strict=False))

    def attached_names(self, i: int) -> frozenset[str]:
        """Names of the arrays attached to the sample whose first segment is ``i``. Makes no request."""
        return frozenset(self._info(i).attached)

    def attached_shape(self, i: int, name: str) -> tuple[int, ...] | None:
        """The shape of the array attached under this name; ``None`` when there is none. Makes no request."""
        found = self._info(i).attached.get(name)
        return None if found is None else found.shape

    def attached(self, i: int, names: Collection[str] | None = None) -> dict[str, np.ndarray[Any, Any]]:
        """The small arrays that a user attached to the sample whose first segment is ``i``, by name. ``names``: only
        these; a name without an array is ignored."""
        wanted = [name for name in self._info(i).attached if names is None or name in names]
        ranges = _whole([self._attached_range(i, name) for name in wanted])
        return self._verified(lambda fetch: self._attached(i, wanted, fetch(ranges)))

    def token_ids(self, i: int) -> np.ndarray[Any, Any]:
        """Token ids of segment ``i``: int64 ``[n]``, maybe read-only."""
        ranges = _whole([self._token_range(i)])
        return self._verified(lambda fetch: self._token_ids(i, fetch(ranges)[0]))

    def read(
        self,
        i: int,
        *,
        layers: Sequence[int] | None = None,
        tokens: tuple[int, int] | None = None,
        out: np.ndarray[Any, Any] | None = None,
    ) -> np.ndarray[Any, Any]:
        """States of segment ``i``: the dtype's carrier, ``[n, len(layers), H]``; ``out`` if given, else a new array.

        ``layers``: vLLM's layer ids, in the order of the result; ``None``: all, in stored order. ``tokens``:
        ``(start, stop)`` counted from the segment's start.

        Raises:
            ConfigError: the segment has no such layer or token.
            FormatError: the data is truncated or is not an encoding of that shape.
            IntegrityError: a checksum does not match.
        """
        return self._verified(lambda fetch: self._read(fetch, i, layers, tokens, out, []))[0]

    def load(
        self,
        i: int,
        *,
        layers: Sequence[int] | None = None,
        tokens: tuple[int, int] | None = None,
        out: np.ndarray[Any, Any] | None = None,
        attached: Collection[str] = (),
        empty: Empty | None = None,
    ) -> Loaded:
        """``read``, the token ids, and the attached arrays with names in ``attached``, fetched in one call.

        ``empty``: allocates the memory for the states when ``out`` is not given.
        """
        names = [name for name in self._info(i).attached if name in attached]
        extra = _whole([self._token_range(i), *(self._attached_range(i, name) for name in names)])

        def read(fetch: _Fetch) -> Loaded:
            states, (ids, *views) = self._read(fetch, i, layers, tokens, out, extra, empty)
            return Loaded(states, self._token_ids(i, ids), self._attached(i, names, views))

        return self._verified(read)

    def fetch_bytes(self, i: int, layers: Sequence[int] | None, tokens: tuple[int, int]) -> int:
        """Bytes that ``read`` fetches with these arguments, with gaps between layers. Makes no request."""
        return sum(b - a for a, b in coalesce(self._wanted(i, positions(self._info(i), layers), *tokens)[2]))

    def scan(self, i: int) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        """Yield every chunk of segment ``i``, checked and decoded: position of the layer, states ``[rows, H]``
        (carrier). Raises as ``read``, also for more states than ``read`` would allocate."""
        info = self._info(i)
        with located(self._where):
            check_expansion(info.raw_bytes, sum(map(info.layer_bytes, range(info.num_layers))))
        if self.description.schema == "vllm":
            for c in range(info.num_chunks):
                span = self._row_range(i, c, c + 1)
                rows = self._verified(partial(self._fetched_rows, i, c, span))
                yield from ((k, rows[:, k]) for k in range(info.num_layers))
            return
        for k in range(info.num_layers):
            end = self._begin(f"{i}.{k}")
            for c, size in enumerate(info.chunk_sizes(k)):
                begin, end = end, end + size
                yield k, self._verified(partial(self._fetched_chunk, i, k, c, (begin, end)))

    def stored_order(self, slots: Collection[int]) -> list[int]:
        """``slots`` in the order of their states in the object: codec ``none`` stores wide dtypes first."""
        of_segments = self.description.schema == "segments"
        return sorted(slots, key=lambda i: self._begin(f"{i}.0") if of_segments else i)

    # -- what to fetch ---------------------------------------------------------------------------------------------

    def _info(self, i: int) -> SegmentInfo:
        segments = self.segments
        if not 0 <= i < len(segments):
            raise ConfigError(f"expected a segment from 0 to {len(segments) - 1}, got {i}")
        return segments[i]

    def _begin(self, name: str) -> int:
        return self._tensors[name][2][0]

    def _token_range(self, i: int) -> tuple[int, int]:
        name = "token_ids" if self.description.schema == "vllm" else f"{i}.token_ids"
        return self._tensors[name][2]

    def _attached_range(self, i: int, name: str) -> tuple[int, int]:
        prefix = "" if self.description.schema == "vllm" else f"{i}."
        return self._tensors[f"{prefix}attached.{name}"][2]

    def _row_range(self, i: int, first: int, last: int) -> tuple[int, int]:
        """Schema ``vllm``: chunks ``[first, last)``, which follow one another, all layers."""
        info, base = self._info(i), self._begin("hidden_states")
        row, n, c = info.num_layers * info.row_bytes, info.segment.num_tokens, info.chunk_tokens
        return base + min(first * c, n) * row, base + min(last * c, n) * row

    def _layer_range(self, i: int, k: int, first: int, last: int) -> tuple[int, int]:
        """Chunks ``[first, last)`` of the ``k``-th stored layer, which follow one another."""
        info = self._info(i)
        start = self._begin(f"{i}.{k}") + self._places.bytes_before(i, info, k, first)
        return start, start + sum(info.chunk_sizes(k, first, last))

    def _wanted(self, i: int, picks: Sequence[int], start: int, stop: int) -> tuple[int, int, list[tuple[int, int]]]:
        """First and last chunk with tokens ``[start, stop)``, and the ranges to fetch for the layers ``picks``."""
        c = self._info(i).chunk_tokens
        first, last = start // c, -(-stop // c)
        if start == stop or not picks:
            last = first
        if self.description.schema == "vllm":
            return first, last, [self._row_range(i, first, last)]
        return first, last, [self._layer_range(i, k, first, last) for k in picks]

    def _fetch(self, again: bool, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Byte ranges of the data. Those within ``front``, which was fetched with the header, need no request.

        ``again``: fetch all ranges past all caches. Only the first time, replace ``front`` too, also in the caches.
        """
        front, shift = self._front, self.header_bytes
        if again and self._mended:
            front = front[:0]
        elif again and any(b <= front.nbytes for _, b in ranges):
            self._mended = True
            front = self._front = fetched(self._store, self.name, [(0, shift + front.nbytes)], again)[0][shift:]
        far = [(shift + a, shift + b) for a, b in ranges if b > front.nbytes]
        if sum(b - a for a, b in far) > FREE_BYTES:  # the size may be only a claim
            self.check_size()
        found = iter(fetched(self._store, self.name, far, again) if far else ())
        return [front[a:b] if b <= front.nbytes else next(found) for a, b in ranges]

    def _verified(self, read: Callable[[_Fetch], T]) -> T:
        """What ``read`` makes of fetched bytes. If a check fails, it gets them once more, past all caches."""
        return verified(self._where, lambda again: read(partial(self._fetch, again)))

    # -- fetched bytes ---------------------------------------------------------------------------------------------

    def _read(
        self,
        fetch: _Fetch,
        i: int,
        layers: Sequence[int] | None,
        tokens: tuple[int, int] | None,
        out: np.ndarray[Any, Any] | None,
        extra: list[tuple[int, int]],
        empty: Empty | None = None,
    ) -> tuple[np.ndarray[Any, Any], list[memoryview]]:
        info = self._info(i)
        picks = positions(info, layers)
        start, stop = (0, info.segment.num_tokens) if tokens is None else span(tokens)
        if not 0 <= start <= stop <= info.segment.num_tokens:
            raise ConfigError(f"expected tokens within [0, {info.segment.num_tokens}), got [{start}, {stop})")
        first, last, wanted = self._wanted(i, picks, start, stop)
        shape = (stop - start, len(picks), info.hidden_size)
        # Before the fetch: extra has the ids of the whole segment, which in a file with holes may be any number.
        if out is None:
            check_expansion(shape[0] * shape[1] * info.row_bytes, sum(b - a for a, b in wanted))
        _check_cut_chunks(info, picks, range(first, last), start, stop)
        views = fetch([*extra, *wanted])
        extras, views = views[: len(extra)], views[len(extra) :]
        if out is None:  # allocate after the fetch, which has shown that the object holds the segment's bytes
            out = (empty or new_states)(shape, info.dtype)
        elif (out.shape, out.dtype) != (shape, CARRIER[info.dtype]):
            raise ValueError(f"out: expected {CARRIER[info.dtype]} {shape}, got {out.dtype} {out.shape}")
        if self.description.schema == "vllm":
            step = info.chunk_tokens * info.num_layers * info.row_bytes
            whole = picks == list(range(info.num_layers))
            for c in range(first, last):
                x = self._rows(i, c, views[0][(c - first) * step : (c - first + 1) * step])
                for to, rows in [(out, x)] if whole else ((out[:, at], x[:, k]) for at, k in enumerate(picks)):
                    _place(to, rows, info.chunk_span(c), start, stop)
            return out, extras
        for at, (k, view) in enumerate(zip(picks, views, strict=True)):
            self._read_layer(i, k, (first, last), view, out[:, at], start)
        return out, extras

    def _read_layer(
        self,
        i: int,
        k: int,
        chunks: tuple[int, int],
        view: memoryview,
        out: np.ndarray[Any, Any],
        start: int,
    ) -> None:
        """Decode ``chunks`` of a layer from their stored bytes, ``view``, into ``out`` ``[n, H]``: tokens from
        ``start`` on."""
        info = self._info(i)
        begin, stop = 0, start + len(out)
        for c, size in zip(range(*chunks), info.chunk_sizes(k, *chunks), strict=True):
            data, begin = view[begin : begin + size], begin + size
            a, b = info.chunk_span(c)
            if start <= a and b <= stop:
                self._decode(i, k, c, data, out[a - start : b - start])
                continue
            x = _empty_chunk(info, c)
            self._decode(i, k, c, data, x)
            _place(out, x, (a, b), start, stop)
            del x  # before the next chunk is allocated

    def _decode(self, i: int, k: int, c: int, data: memoryview, out: np.ndarray[Any, Any]) -> None:
        """Check and decode one chunk of one layer into ``out`` ``[rows, H]``."""
        info = self._info(i)
        assert info.crcs is not None, "only a file in schema vllm has no checksums"
        place = f"segment {i}, layer {info.layer_ids[k]}, tokens {info.chunk_span(c)}"
        check_crc32c(crc32c(data), info.crcs[k][c], place)
        with located(place):
            codec_for(self.codec, info.dtype).decode(data, out, info.dtype)

    def _fetched_chunk(self, i: int, k: int, c: int, span: tuple[int, int], fetch: _Fetch) -> np.ndarray[Any, Any]:
        data = fetch([span])[0]
        x = _empty_chunk(self._info(i), c)
        self._decode(i, k, c, data, x)
        return x

    def _fetched_rows(self, i: int, c: int, span: tuple[int, int], fetch: _Fetch) -> np.ndarray[Any, Any]:
        return self._rows(i, c, fetch([span])[0])

    def _rows(self, i: int, c: int, view: memoryview) -> np.ndarray[Any, Any]:
        """Schema ``vllm``: the checked rows of a chunk, ``[rows, L, H]``."""
        info = self._info(i)
        if info.crcs is not None:
            check_crc32c(crc32c(view), info.crcs[0][c], f"segment {i}, tokens {info.chunk_span(c)}")
        return np.frombuffer(view, CARRIER[info.dtype]).reshape(-1, info.num_layers, info.hidden_size)

    def _attached(self, i: int, names: Sequence[str], views: Sequence[memoryview]) -> dict[str, np.ndarray[Any, Any]]:
        found = {}
        for name, view in zip(names, views, strict=True):
            a = self._info(i).attached[name]
            check_crc32c(crc32c(view), a.crc, f"attached {name!r} of segment {i}")
            found[name] = np.frombuffer(view, ATTACHMENT_DTYPE[a.dtype]).reshape(a.shape).copy()
        return found

    def _token_ids(self, i: int, view: memoryview) -> np.ndarray[Any, Any]:
        info = self._info(i)
        if info.token_crc is not None:
            check_crc32c(crc32c(view), info.token_crc, f"token ids of segment {i}")
        return raw_array(view, 8, (info.segment.num_tokens,), "token_ids").view(np.int64)


def _whole(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """``ranges``, after ``check_whole`` of their bytes."""
    check_whole(sum(stop - start for start, stop in ranges))
    return ranges


def new_states(shape: tuple[int, int, int], dtype: str) -> np.ndarray[Any, Any]:
    """An uninitialised carrier array. ``FormatError`` when this machine cannot allocate it."""
    try:
        return np.empty(shape, CARRIER[dtype])
    except (MemoryError, ValueError) as e:
        raise FormatError(
            f"expected states that fit this machine's memory, got a header with {shape[0]} tokens of {shape[1]} layers"
        ) from e


def _check_cut_chunks(info: SegmentInfo, picks: Sequence[int], chunks: Sequence[int], start: int, stop: int) -> None:
    """``check_expansion`` of those of ``chunks`` that are decoded whole for some of their tokens."""
    for c in {chunks[0], chunks[-1]} if chunks and info.sizes else ():
        a, b = info.chunk_span(c)
        for k in picks if a < start or stop < b else ():
            check_expansion((b - a) * info.row_bytes, info.sizes[k][c])


def _empty_chunk(info: SegmentInfo, chunk: int) -> np.ndarray[Any, Any]:
    """Memory ``[rows, H]`` for one layer of a chunk."""
    a, b = info.chunk_span(chunk)
    return new_states((b - a, 1, info.hidden_size), info.dtype)[:, 0]


def _place(out: np.ndarray[Any, Any], x: np.ndarray[Any, Any], span: tuple[int, int], start: int, stop: int) -> None:
    """Copy the rows of a chunk (tokens ``span``) within ``[start, stop)`` to their place in ``out``."""
    a, b = max(span[0], start), min(span[1], stop)
    out[a - start : b - start] = x[a - span[0] : b - span[0]]
