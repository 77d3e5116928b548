"""A stored sample, or a range of its tokens, as a plain safetensors file that is made piece by piece."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hsx_dist.errors import FormatError
from hsx_dist.format.description import TENSOR_DTYPE
from hsx_dist.format.identity import IDENTITY
from hsx_dist.page import CARRIER, HIDDEN_STATES
from hsx_dist.reading.column import LOSS_MASK, StoredPoint, check_decoded
from hsx_dist.reading.sample import Sample, columns_of, header_bytes_of, load_bytes

#: Bytes of states that are loaded at once, if neither a chunk of the stored object nor the sample's token ids are more.
PIECE_BYTES = 8 << 20
_ID_BYTES = 8
#: Upper limit of the bytes of decoded JSON for each byte of its text. Nested lists take the most.
_DECODED = 50
#: The same for a byte of a part's header. Measured: 9 for many columns, 24 for many names in the metadata.
_HEADER = 24


@dataclass(frozen=True, slots=True)
class Range:
    """The requested part of a sample, as the arguments of ``Sample.load``.

    ``points``: may also be ``all``. ``None`` means ``all`` for a sample without hidden states.
    """

    layers: tuple[int, ...] | None = None
    tokens: tuple[int | None, int | None] | None = None
    points: tuple[str, ...] | Literal["all"] | None = None


@dataclass(frozen=True, slots=True)
class _States:
    """One point's tensor. ``shape``: ``[n, L, width]``, or ``[n, L, heads, dim]``. ``row_bytes``: bytes of one
    token."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    row_bytes: int


class StatesFile:
    """A safetensors file of a sample.

    Tensors: ``token_ids`` int64 ``[n]``, ``loss_mask`` int64 ``[n]`` if the sample has one, ``layer_ids`` int64 ``[L]``
    and ``hidden_states`` ``[n, L, H]`` in their dtype. With ``points``: for each point a tensor with its name and
    ``NAME.layer_ids``. ``key`` and ``meta`` (``Sample.meta`` as JSON) are in the file's metadata.

    Attributes:
        layer_ids: layer ids of each stored point.
        size: bytes of the file.
        front_bytes: bytes of the file that this object holds: all but the states.
        loading_bytes: memory that one ``piece`` takes while it is loaded and sent, and the sample's decoded headers.
        request_tokens: number of the request's tokens, also those that are not stored.
    """

    def __init__(self, sample: Sample, wanted: Range):
        """Read everything but the states.

        Raises:
            ConfigError: the sample has no such layer or point.
            FormatError: as ``Sample.load``. Or all states of the points are more than their stored bytes allow.
            StoreError: as ``Sample.load``.
        """
        self._sample, self._layers = sample, wanted.layers
        self._start, stop, _ = slice(*(wanted.tokens or (None, None))).indices(sample.num_tokens)
        self._stop = max(self._start, stop)
        # Copies, so that the rest of the sample's ids and mask is freed.
        small = {"token_ids": sample.token_ids("numpy")[self._start : self._stop].copy()}
        if (mask := sample.loss_mask()) is not None:
            small[LOSS_MASK] = mask = mask[self._start : self._stop].copy()
        stored = sample.points
        alone = wanted.points is None and HIDDEN_STATES in stored
        names = (HIDDEN_STATES,) if alone else tuple(stored) if wanted.points in (None, "all") else wanted.points or ()
        self._states = [self._describe(name, stored) for name in names]
        # A small object may claim any number of pieces. Count them only after this check.
        columns = columns_of(sample)
        check_decoded([columns[name] for name in names])
        for name in names:
            ids = wanted.layers or stored[name].layers
            small["layer_ids" if alone else f"{name}.layer_ids"] = np.array(ids, np.int64)
        self.layer_ids = {name: point.layers for name, point in stored.items()}
        self.meta = sample.meta
        selection = self.meta.get("tokens")
        total = selection.get("of") if isinstance(selection, dict) else None
        self.request_tokens = total if type(total) is int else sample.num_tokens
        self.has_mask = mask is not None
        meta = json.dumps(self.meta)
        self._front = self._build_front(small, meta)
        row_bytes = sum(states.row_bytes for states in self._states)
        self.front_bytes = len(self._front)
        self.size = self.front_bytes + (self._stop - self._start) * row_bytes
        chunk = sample.chunk_tokens
        a, b = (self._start, self._start), (self._start, self._stop)  # no tokens take only memory for ids
        fetched = max((self._load_bytes(name, b) - self._load_bytes(name, a) for name in names), default=0)
        # Each piece loads the token ids of its segments. So a piece is not smaller than all ids, and all chunks count:
        # the first one may have most of the stored bytes. Else the time of all pieces would be quadratic.
        size = max(PIECE_BYTES, _ID_BYTES * sample.num_tokens)
        # Schema ``vllm`` stores all layers of a token together.
        token_bytes = max(row_bytes, fetched // max(self._stop - self._start, 1), 1)
        self._step = max(chunk, size // token_bytes // chunk * chunk)
        self._num_spans = -(-self._stop // self._step) - self._start // self._step if self._start < self._stop else 0
        reads = (self._load_bytes(name, self._span(i)) for name in names for i in range(self._num_spans))
        piece = min(self._step, self._stop - self._start) * row_bytes + max(reads, default=0)
        # The allocator keeps as much again (measured: 28 MB for a piece of 8 MB).
        self.loading_bytes = 2 * piece + _DECODED * len(meta) + _HEADER * header_bytes_of(sample)

    def _load_bytes(self, name: str, span: tuple[int, int]) -> int:
        return load_bytes(self._sample, self._layers, span, [name])

    def _describe(self, name: str, stored: Mapping[str, StoredPoint]) -> _States:
        states, _ = self._sample.load_carrier(self._layers, (0, 0), name)  # no tokens: checks and the shape
        point, (_, layers, width) = stored[name], states.shape
        row = (point.heads, width // point.heads) if point.heads else (width,)
        row_bytes = layers * width * np.dtype(CARRIER[point.dtype]).itemsize
        return _States(name, point.dtype, (self._stop - self._start, layers, *row), row_bytes)

    def _build_front(self, small: Mapping[str, np.ndarray[Any, Any]], meta: str) -> bytes:
        """Return the length field, the header, and the data of the ``small`` tensors, which are first in the file."""
        entries: dict[str, Any] = {"__metadata__": {"key": self._sample.key, "meta": meta}}
        tensors = [(name, "I64", array.shape, array.nbytes) for name, array in small.items()]
        tensors += [(s.name, TENSOR_DTYPE[s.dtype], s.shape, s.shape[0] * s.row_bytes) for s in self._states]
        end = 0
        for name, dtype, shape, nbytes in tensors:
            begin, end = end, end + nbytes
            if name in entries:
                raise FormatError(f"{self._sample.uri}: expected a name that only one tensor has, got {name!r} of two")
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        return b"".join([struct.pack("<Q", len(header)), header, *(array.data for array in small.values())])

    def is_of_same_sample(self, other: StatesFile) -> bool:
        """Whether ``other`` is the same range of the same sample, even if its object was stored again."""
        ours, theirs = self.meta.get(IDENTITY), other.meta.get(IDENTITY)
        return ours is not None and ours == theirs and self._cut == other._cut

    @property
    def _cut(self) -> tuple[Any, ...]:
        """The range, and how it is divided: with another step, the same number is another piece."""
        return self._start, self._stop, self._step, self._states

    def __len__(self) -> int:
        """Number of pieces."""
        return 1 + len(self._states) * self._num_spans

    def piece(self, i: int) -> bytes | memoryview:
        """Return the ``i``-th piece of the file. Blocks; raises as ``Sample.load``."""
        if i == 0:
            return self._front
        states, span = divmod(i - 1, self._num_spans)
        rows, _ = self._sample.load_carrier(self._layers, self._span(span), self._states[states].name)
        return np.ascontiguousarray(rows).data.cast("B")

    def _span(self, i: int) -> tuple[int, int]:
        """Return the ``i``-th range of tokens that are loaded at once. Each but the first starts at a chunk's start."""
        begin = (self._start // self._step + i) * self._step
        return max(begin, self._start), min(begin + self._step, self._stop)
