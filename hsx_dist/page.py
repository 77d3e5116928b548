"""What flows through the system: keys, segments and pages.

A *page* is a run of consecutive tokens of one sample, all captured layers, on the host. Pages of one *segment* (the
unit of durability) meet again in a writer; the segments of one *sample* meet again in a reader.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

#: dtype names (torch's) → numpy type of the same width in which the bits travel.
CARRIER: dict[str, type[np.unsignedinteger[Any]]] = {
    "bfloat16": np.uint16,
    "float16": np.uint16,
    "float32": np.uint32,
    "int32": np.uint32,
}
#: Those of a model's states. ``int32`` holds ids: no bits of it are a float's.
FLOATS: tuple[str, ...] = ("bfloat16", "float16", "float32")
#: The point that is stored unless others are chosen: the residual stream that enters a layer.
HIDDEN_STATES = "hidden_states"

#: By byte of a key's UTF-8.
_QUOTED = tuple(
    chr(b) if chr(b).isascii() and (chr(b).isalnum() or chr(b) in "_-.") else f"%{b:02X}" for b in range(256)
)
#: File systems take names of 255 bytes; a name also gets suffixes of markers, locks and temporary files.
_MAX_NAME = 128
#: ``Page.data`` of a page that is attached to no memory.
_DETACHED = np.empty((0, 0, 0), np.uint8)


def object_name(key: str) -> str:
    """A name under which an object for ``key`` can lie in any store; a client can compute it from the key.

    ASCII letters, digits, ``_``, ``-`` stand for themselves, and so does ``.`` unless it leads; everything else becomes
    ``%XX`` of its UTF-8 bytes, so that no key can leave its folder and no two keys share a name. A name that would
    be longer than 128 characters is cut, and ends in ``~`` and 32 hex digits of the key's SHA-256.
    """
    if not key:
        raise ValueError("a sample key must not be empty")

    # No more than can be in the name: a key of a client may be long, and its name is asked for on the engine's thread.
    name = "".join(map(_QUOTED.__getitem__, key[: _MAX_NAME + 1].encode("utf-8", "surrogatepass")))
    if name.startswith("."):
        name = f"%2E{name[1:]}"
    if len(name) > _MAX_NAME:
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        name = f"{name[: _MAX_NAME - 33]}~{digest}"
    return name


def sample_key(key: str, *, prompt: int = 0, choice: int = 0) -> str:
    """The key of one result when a request that chose ``key`` has several.

    Args:
        key: what the client gave as ``hidden_states_key``.
        prompt: which prompt of a completion request's batch, from 0.
        choice: which of the ``n`` choices of a prompt, from 0.

    Returns:
        ``key`` for the first; ``-p1``, ``-p2``, … is appended for a later prompt, and after that ``-n1``, … for a
        later choice.
    """
    return f"{key}{f'-p{prompt}' if prompt else ''}{f'-n{choice}' if choice else ''}"


def token_hash(token_ids: np.ndarray[Any, Any]) -> str:
    """16 hex digits of BLAKE2b over the ids as little-endian int64; ``token_ids``: integers ``[n]``."""
    ids = np.ascontiguousarray(token_ids, dtype="<i8")
    return hashlib.blake2b(ids.data, digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens ``[start, stop)`` of the ``total`` tokens of one column of sample ``key``; segments count from 0.

    ``row``: the input row (from 0) that the sample came from, where there was one; ``sample_hash``: ``token_hash`` of
    the whole sample's ids, by which segments know each other again when a row was computed twice. Receipts keep both;
    parts do not. ``source`` is the same for the pages of one copy out of a cache, and for no others: when a row is
    computed again, what came of it before is not mixed with what comes now. ``meta``: what is known of the sample
    beyond its states (why its request ended, which of its tokens these are); JSON values, stored with it.
    ``metadata``: a client's or a row's own, a JSON object as text until it is stored as ``meta["metadata"]``: no
    process that passes it on decodes or pickles what is in it. ``name``: the object's name under the store, where every
    sample is one and its client chose the name.
    """

    key: str
    index: int
    start: int
    stop: int
    total: int
    row: int | None = field(default=None, compare=False)
    sample_hash: str = field(default="", compare=False)
    source: str = field(default="", compare=False)
    meta: Mapping[str, Any] = field(default_factory=dict, compare=False)
    #: Small arrays that are stored with the sample, by name; with segment 0 alone.
    attached: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict, compare=False, repr=False)
    name: str = field(default="", compare=False)
    metadata: str = field(default="", compare=False)
    #: A sample has ``columns`` columns, and ``column`` counts them from 0. A column is what one tensor-parallel rank
    #: has of one point (``shard`` of ``shards``, along the row), for all tokens; ``index`` counts within the column.
    column: int = 0
    columns: int = 1
    point: str = HIDDEN_STATES
    shard: int = 0
    shards: int = 1
    #: Length of a head, where the point's rows are made of heads; 0: they are not.
    head: int = 0

    def __str__(self) -> str:
        """For messages: ``repr`` has all of ``meta``, which may be megabytes of a stored object."""
        of = f" of column {self.column} of {self.columns} ({self.point}, shard {self.shard} of {self.shards})"
        column = of if self.of_points else ""
        return f"segment {self.index}{column} of {self.key[:80]!a}, tokens [{self.start}, {self.stop}) of {self.total}"

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def id(self) -> tuple[str, int, int]:
        """Key, column and index: what no two segments of a part share."""
        return self.key, self.column, self.index

    @property
    def of_points(self) -> bool:
        """Whether there is more to say of it than of hidden states alone."""
        return (self.columns, self.point, self.shards, self.head) != (1, HIDDEN_STATES, 1, 0)

    def bare(self) -> Segment:
        """The segment without ``meta``, ``attached`` and ``metadata``."""
        return replace(self, meta={}, attached={}, metadata="")


@dataclass(frozen=True, slots=True, eq=False)
class Page:
    """Tokens ``[start, stop)`` of a sample (absolute positions within it), all captured layers, on the host.

    ``shape`` is ``[L, rows, H]`` when ``order`` is ``"LTH"`` or ``[rows, L, H]`` when it is ``"TLH"``; ``rows >=
    stop - start``, as the gather copies whole cache blocks; the rows past ``stop - start`` mean nothing. ``data`` is a
    contiguous array of that shape, of the dtype's carrier (``CARRIER``). A page that crosses a process border has none:
    the other process attaches its own view of the ring, ``offset`` bytes from the ring's start.
    Every page of a segment but the last has ``chunk_tokens`` tokens, and starts at a multiple of them from the
    segment's start.
    """

    segment: Segment
    start: int
    stop: int
    chunk_tokens: int
    layer_ids: tuple[int, ...]
    dtype: str
    shape: tuple[int, int, int]
    order: Literal["LTH", "TLH"]
    token_ids: np.ndarray[Any, Any]  # int64 [stop - start]
    data: np.ndarray[Any, Any] = field(default_factory=lambda: _DETACHED, repr=False)
    offset: int = 0
    error: str = ""  # why the states were not copied; then ``data`` means nothing, and the segment is lost

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def chunk(self) -> int:
        """Which chunk of its segment this page is."""
        return (self.start - self.segment.start) // self.chunk_tokens

    @property
    def hidden_size(self) -> int:
        return self.shape[2]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(CARRIER[self.dtype]).itemsize

    @property
    def first(self) -> bool:
        """Whether no page of the segment precedes this one."""
        return self.start == self.segment.start

    @property
    def last(self) -> bool:
        """Whether no page of the segment follows this one."""
        return self.stop == self.segment.stop

    @property
    def ends_sample(self) -> bool:
        return self.stop == self.segment.total

    def attached(self, memory: np.ndarray[Any, Any]) -> Page:
        """The page with its view of the ring's ``memory`` (uint8).

        Raises:
            ValueError: the page does not lie within ``memory``.
        """
        data = memory[self.offset : self.offset + self.nbytes].view(CARRIER[self.dtype]).reshape(self.shape)
        return replace(self, data=data)

    def detached(self) -> Page:
        """The page as it crosses a process border: without data, and with the long parts of its segment only if it is
        the segment's first. A client's metadata may be as long as the sample: it travels once."""
        return replace(self, data=_DETACHED, segment=self.segment if self.first else self.segment.bare())

    def layer(self, i: int) -> np.ndarray[Any, Any]:
        """The ``i``-th captured layer, ``[num_tokens, H]``, a view (its rows may be strided)."""
        return self.data[i, : self.num_tokens] if self.order == "LTH" else self.data[: self.num_tokens, i]
