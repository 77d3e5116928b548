"""Keys, segments and pages.

A *page* has consecutive tokens of one sample, with all captured layers, in host memory. A writer joins the pages of a
*segment*, the unit of durability. A reader joins the segments of a *sample*.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from hsx_dist import text

#: dtype names (torch's) → numpy type of the same width that carries the bits.
CARRIER: dict[str, type[np.unsignedinteger[Any]]] = {
    "bfloat16": np.uint16,
    "float16": np.uint16,
    "float32": np.uint32,
    "int32": np.uint32,
}
#: dtypes of a model's states. ``int32`` is for ids, whose bits are no floats.
FLOATS: tuple[str, ...] = ("bfloat16", "float16", "float32")
#: The point that is stored unless others are chosen: the residual stream that enters a layer.
HIDDEN_STATES = "hidden_states"

#: Escaped form of each byte of a key's UTF-8.
_QUOTED = tuple(
    chr(b) if chr(b).isascii() and (chr(b).isalnum() or chr(b) in "_-.") else f"%{b:02X}" for b in range(256)
)
#: File systems allow names of 255 bytes, including the suffixes of markers, locks and temporary files.
_MAX_NAME = 128
#: ``Page.data`` of a page without memory.
_DETACHED = np.empty((0, 0, 0), np.uint8)


def object_name(key: str) -> str:
    """Return the name of the object for ``key``, valid in every store. Clients can compute it from the key.

    ASCII letters, digits, ``_``, ``-`` and a ``.`` that is not the first character are kept. Every other character
    becomes the ``%XX`` of its UTF-8 bytes. So no key can leave its folder, and no two keys share a name. A name of more
    than 128 characters is cut, and ends in ``~`` and 32 hex digits of the key's SHA-256.

    Raises:
        ValueError: the key is empty.

    Example:
        >>> object_name("chat/7")
        'chat%2F7'
    """
    if not key:
        raise ValueError("expected a sample key, got an empty one. Use a key of at least one character")

    # Escapes only the characters that fit into the name: a key may be long, and this runs on the engine's thread.
    name = "".join(map(_QUOTED.__getitem__, key[: _MAX_NAME + 1].encode("utf-8", "surrogatepass")))
    if name.startswith("."):
        name = f"%2E{name[1:]}"
    if len(name) > _MAX_NAME:
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        name = f"{name[: _MAX_NAME - 33]}~{digest}"
    return name


def sample_key(key: str, *, prompt: int = 0, choice: int = 0) -> str:
    """Return the key of one result of a request that chose ``key`` and has several results.

    Args:
        key: the client's ``hidden_states_key``.
        prompt: index of the prompt in a completion request's batch.
        choice: index of the choice among the ``n`` choices of a prompt.

    Returns:
        ``key`` for the first; ``-p1``, ``-p2``, … is appended for a later prompt, and after that ``-n1``, … for a
        later choice.

    Example:
        >>> sample_key("chat-7", prompt=1, choice=2)
        'chat-7-p1-n2'
    """
    return f"{key}{f'-p{prompt}' if prompt else ''}{f'-n{choice}' if choice else ''}"


def token_hash(token_ids: np.ndarray[Any, Any]) -> str:
    """Return 16 hex digits of BLAKE2b over the ids as little-endian int64. ``token_ids``: integers ``[n]``."""
    ids = np.ascontiguousarray(token_ids, dtype="<i8")
    return hashlib.blake2b(ids.data, digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens ``[start, stop)`` of the ``total`` tokens of one column of sample ``key``. ``index`` counts from 0.

    Attributes:
        row: index of the sample's input row, if any. Stored in receipts, not in parts.
        content: ``Row.content`` of that row. Stored in receipts, not in parts.
        sample_hash: ``token_hash`` of the whole sample's ids. It identifies segments of the same sample if a row was
            computed twice. Stored in receipts, not in parts.
        source: unique id of one copy out of a KV cache, shared by that copy's pages. Pages of a recomputed row are not
            mixed with pages of the first computation.
        meta: facts about the sample other than its states (why its request ended, which of its tokens these are), as
            JSON values that are stored with the sample.
        metadata: a client's or a row's JSON object, as text until it is stored as ``meta["metadata"]``. Processes that
            pass it on neither decode nor pickle its members.
        name: the object's name in the store, if every sample is a separate object and the client chose its name.
    """

    key: str
    index: int
    start: int
    stop: int
    total: int
    row: int | None = field(default=None, compare=False)
    content: str = field(default="", compare=False)
    sample_hash: str = field(default="", compare=False)
    source: str = field(default="", compare=False)
    meta: Mapping[str, Any] = field(default_factory=dict, compare=False)
    #: Small arrays that are stored with the sample, by name. Only segment 0 has them.
    attached: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict, compare=False, repr=False)
    name: str = field(default="", compare=False)
    metadata: str = field(default="", compare=False)
    #: A sample has ``columns`` columns, and ``column`` counts them from 0. A column has one tensor-parallel rank's part
    #: of one point (``shard`` of ``shards``, along the row), for all tokens. ``index`` counts within the column.
    column: int = 0
    columns: int = 1
    point: str = HIDDEN_STATES
    shard: int = 0
    shards: int = 1
    #: Length of a head, if the point's rows consist of heads; otherwise 0.
    head: int = 0

    def __str__(self) -> str:
        """Describe the segment for messages. ``repr`` has all of ``meta``: megabytes, if a stored object has them."""
        of = f" of column {self.column} of {self.columns} ({self.point}, shard {self.shard} of {self.shards})"
        column = of if self.of_points else ""
        key = text.head(self.key, 80)
        return f"segment {self.index}{column} of {key!a}, tokens [{self.start}, {self.stop}) of {self.total}"

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def id(self) -> tuple[str, int, int]:
        """Key, column and index, which are unique within a part."""
        return self.key, self.column, self.index

    @property
    def of_points(self) -> bool:
        """Whether the segment has other points or several columns, not only hidden states."""
        return (self.columns, self.point, self.shards, self.head) != (1, HIDDEN_STATES, 1, 0)

    def bare(self) -> Segment:
        """The segment without ``meta``, ``attached`` and ``metadata``."""
        return replace(self, meta={}, attached={}, metadata="")


@dataclass(frozen=True, slots=True, eq=False)
class Page:
    """Tokens ``[start, stop)`` of a sample (absolute positions within it), all captured layers, on the host.

    ``shape`` is ``[L, rows, H]`` if ``order`` is ``"LTH"``, and ``[rows, L, H]`` if it is ``"TLH"``. ``rows`` may
    exceed ``stop - start``, since the gather copies whole cache blocks; rows past ``stop - start`` have no meaning.

    ``data`` is a contiguous array of that shape, of the dtype's carrier (``CARRIER``). It is not sent to another
    process, which instead attaches its view of the ring, ``offset`` bytes from the ring's start.

    Every page of a segment except the last has ``chunk_tokens`` tokens, and starts at a multiple of ``chunk_tokens``
    from the segment's start.
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
    error: str = ""  # why the states were not copied; then ``data`` has no meaning, and the segment is lost

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def chunk(self) -> int:
        """Index of this page in its segment."""
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
        """Return the page with its view of the ring's ``memory`` (uint8).

        Raises:
            ValueError: the page exceeds ``memory``.
        """
        data = memory[self.offset : self.offset + self.nbytes].view(CARRIER[self.dtype]).reshape(self.shape)
        return replace(self, data=data)

    def detached(self) -> Page:
        """Return the page as it is sent to another process: without data.

        Only a segment's first page has the segment's long parts: a client's metadata may be as long as the sample, and
        is sent once.
        """
        return replace(self, data=_DETACHED, segment=self.segment if self.first else self.segment.bare())

    def layer(self, i: int) -> np.ndarray[Any, Any]:
        """Return the ``i``-th captured layer, ``[num_tokens, H]``, as a view (its rows may be strided)."""
        return self.data[i, : self.num_tokens] if self.order == "LTH" else self.data[: self.num_tokens, i]
