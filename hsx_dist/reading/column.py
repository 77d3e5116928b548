"""One column of a sample: one shard of one point, for all tokens, in the segments that its receipts prove."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hsx_dist.errors import FormatError, IntegrityError
from hsx_dist.format.codecs.base import FREE_BYTES, check_expansion, check_whole
from hsx_dist.format.container import Part, SegmentInfo
from hsx_dist.format.container_read import Empty, Loaded, new_states
from hsx_dist.format.json_objects import MemberCheck, count, list_of, object_of
from hsx_dist.format.loss import Loss
from hsx_dist.format.segments import SegmentProof
from hsx_dist.page import HIDDEN_STATES, token_hash
from hsx_dist.text import head

#: Name of the attached array that marks the tokens that count in training.
LOSS_MASK = "loss_mask"
#: The findings of ``SanityChecks``, by name. Each has at most one entry for each layer.
_FINDINGS: Mapping[str, MemberCheck] = {"nonfinite_rows": object_of(count), "zero_layers": list_of(count)}
_ID_BYTES = 8
_REPAIR = "Restore the part, or delete it and run the extraction again"


class SampleColumn:
    """The segments of one column, in token order. Fetches data only on access."""

    def __init__(self, key: str, segments: Sequence[SegmentProof], open_part: Callable[[str], Part], url: str):
        """``segments``: as ``SampleRecord.segments``. Those of an object without a receipt have no ``token_hash``."""
        self.key = key
        self.segments = tuple(segments)
        self._open = open_part
        self._url = url.rstrip("/")
        self._infos: dict[int, SegmentInfo] = {}

    def __len__(self) -> int:
        return len(self.segments)

    @property
    def first(self) -> SegmentInfo:
        """Header of the first segment: point, layers, dtype, width."""
        return self.info(0)

    def part(self, i: int) -> tuple[Part, int]:
        """The part that stores the ``i``-th segment, and its slot there. Checked as in ``info``."""
        self.info(i)
        proof = self.segments[i]
        return self._open(proof.part), proof.slot

    def info(self, i: int) -> SegmentInfo:
        """Header of the ``i``-th segment. ``IntegrityError``: the part differs from its receipt."""
        info = self._infos.get(i)
        if info is None:
            proof = self.segments[i]
            found = self._open(proof.part).segments
            if proof.slot >= len(found) or not agrees(found[proof.slot], proof):
                raise IntegrityError(
                    f"{self._url}/{proof.part}: expected {proof.segment} at place {proof.slot}, as its receipt says, "
                    f"got {found[proof.slot].segment if proof.slot < len(found) else 'nothing'}. {_REPAIR}"
                )
            info = found[proof.slot]
            if proof.token_hash and proof.raw_bytes != info.raw_bytes:  # readers limit their memory by it
                raise IntegrityError(
                    f"{self._url}/{proof.part}: expected {proof.raw_bytes} bytes of states in {proof.segment}, as its "
                    f"receipt says, got {info.raw_bytes}. {_REPAIR}"
                )
            self._infos[i] = info
            if i and not _is_of_one_column(info, self.first):
                raise FormatError(f"sample {head(self.key, 80)!a}: expected segments of {self.first}, got {info}")
        return info

    def token_ids(self) -> np.ndarray[Any, Any]:
        """Token ids, int64 ``[T]``."""
        check_whole(_ID_BYTES * sum(proof.segment.num_tokens for proof in self.segments))
        return np.concatenate([self._ids(i) for i in range(len(self))])

    def findings(self) -> Iterator[dict[str, Any]]:
        """The findings of ``SanityChecks`` that the segments' ``meta`` has as ``bad``, each with its token range.

        Skips values that no writer stores. A caller keeps the findings of all segments, and decoded lists and objects
        take up to 44 times the memory of their text.
        """
        for info in map(self.info, range(len(self))):
            s, stored = info.segment, info.segment.meta.get("bad")
            found = {
                name: stored[name]
                for name, check in _FINDINGS.items()
                if isinstance(stored, dict) and check(stored.get(name)) is None and len(stored[name]) <= info.num_layers
            }
            if found:
                yield (
                    {"start": s.start, "stop": s.stop}
                    | ({"point": s.point} if s.point != HIDDEN_STATES else {})
                    | found
                )

    def loss(self) -> dict[int, Loss]:
        """Layer id → the largest loss of all segments."""
        found: dict[int, Loss] = {}
        for i in range(len(self)):
            part, slot = self.part(i)
            for layer, loss in part.loss(slot).items():
                before = found.get(layer, loss)
                found[layer] = Loss(max(before.rms, loss.rms), max(before.worst_token, loss.worst_token))
        return found

    def load(
        self,
        layers: Sequence[int] | None,
        start: int,
        stop: int,
        *,
        masked: bool = False,
        empty: Empty | None = None,
        out: np.ndarray[Any, Any] | None = None,
    ) -> Loaded:
        """Load tokens ``[start, stop)`` with their ids.

        ``out``: a carrier array ``[n, L, H]`` for the result. ``masked``: also fetch the whole loss mask, if the first
        segment is read and has one.
        """
        first = self.first
        if layers is None and first.layer_ids:
            layers = first.layer_ids  # segments may store layers in different orders
        within = self._within(start, stop)
        check_whole(_ID_BYTES * sum(self.segments[i].segment.num_tokens for i in within))
        ids = np.empty(stop - start, np.int64)
        small: dict[str, np.ndarray[Any, Any]] = {}
        if len(within) > 1 and out is None:
            num_layers = first.num_layers if layers is None else len(layers)
            self.check_size(within, (stop - start) * num_layers * first.row_bytes)
            out = (empty or new_states)((stop - start, num_layers, first.hidden_size), first.dtype)
        for i in within:
            s, (part, slot) = self.segments[i].segment, self.part(i)
            a, b = max(start, s.start), max(min(stop, s.stop), max(start, s.start))
            states, own, attached = part.load(
                slot,
                layers=layers,
                tokens=(a - s.start, b - s.start) if a < b else (0, 0),
                out=None if out is None else out[a - start : b - start],
                attached=(LOSS_MASK,) if masked and i == 0 else (),
                empty=empty,
            )
            small |= attached
            self._check_ids(i, own)
            ids[a - start : b - start] = own[a - s.start : b - s.start]
            del own  # maybe a view of one answer of the store, with all stored states of the segment
        return Loaded(states if out is None else out, ids, small)

    def load_bytes(self, layers: Sequence[int] | None, start: int, stop: int) -> int:
        """Maximum bytes of memory that ``load`` takes in addition to the states. Reads only headers."""
        found = ids = 0
        for i in self._within(start, stop):
            s, (part, slot) = self.segments[i].segment, self.part(i)
            found = max(found, _load_bytes(part, slot, layers, max(start - s.start, 0), min(stop, s.stop) - s.start))
            ids += _ID_BYTES * s.num_tokens
        return found + ids + _ID_BYTES * (stop - start)

    def _within(self, start: int, stop: int) -> range:
        """Segments with tokens in ``[start, stop)``. Without any: the first. Its empty array has the right shape."""
        first = bisect_right(self.segments, start, key=lambda proof: proof.segment.stop)
        last = bisect_left(self.segments, stop, key=lambda proof: proof.segment.start)
        return range(first, last) or range(1)

    def check_size(self, segments: Iterable[int], nbytes: int) -> None:
        """Refuse to allocate ``nbytes`` for states before any are fetched: a receipt may claim any number of tokens."""
        _check_size(self.parts(segments), nbytes)

    def parts(self, segments: Iterable[int]) -> dict[str, Part]:
        """The parts that hold these segments, by name."""
        return {name: self._open(name) for name in (self.segments[i].part for i in segments)}

    def _ids(self, i: int) -> np.ndarray[Any, Any]:
        part, slot = self.part(i)
        ids = part.token_ids(slot)
        self._check_ids(i, ids)
        return ids

    def _check_ids(self, i: int, ids: np.ndarray[Any, Any]) -> None:
        proof = self.segments[i]
        if proof.token_hash and token_hash(ids) != proof.token_hash:
            raise IntegrityError(
                f"{self._url}/{proof.part}: expected token ids of hash {proof.token_hash} for {self.key!r}, as its "
                f"receipt says, got {token_hash(ids)}. {_REPAIR}"
            )


def _load_bytes(part: Part, slot: int, layers: Sequence[int] | None, start: int, stop: int) -> int:
    """Bytes of memory to read tokens ``[start, stop)`` of a segment in addition to the states and their ids.

    They hold all stored ids, the fetched chunks, and values and codes of a chunk that is decoded whole.
    """
    info = part.segments[slot]
    ids = _ID_BYTES * info.segment.num_tokens
    if start >= stop:
        return ids
    if layers is not None:
        layers = [layer for layer in layers if layer in info.layer_ids]  # ``load`` raises for others
    rows = min(info.chunk_tokens, info.segment.num_tokens)
    is_whole = not start % info.chunk_tokens and (not stop % info.chunk_tokens or stop == info.segment.num_tokens)
    return ids + part.fetch_bytes(slot, layers, (start, stop)) + (1 if is_whole else 2) * rows * info.row_bytes


def agrees(info: SegmentInfo, proof: SegmentProof) -> bool:
    """Whether a part and its receipt describe the same segment. Receipts do not name the point."""
    said, proven = ((s.id, s.columns, s.start, s.stop, s.total) for s in (info.segment, proof.segment))
    return said == proven


def is_mean(meta: Mapping[str, Any]) -> bool:
    """Whether the sample is the mean over a request's tokens. Its receipt has the hash of the request's ids."""
    tokens = meta.get("tokens")
    return isinstance(tokens, dict) and "mean" in tokens


def _is_of_one_column(info: SegmentInfo, first: SegmentInfo) -> bool:
    one, other = (
        (x.segment.point, x.segment.shard, x.segment.shards, x.segment.head, x.dtype, x.hidden_size, set(x.layer_ids))
        for x in (info, first)
    )
    return one == other


@dataclass(frozen=True)
class StoredPoint:
    """A point as stored in a sample.

    Attributes:
        layers: ids in stored order. Decoder layers; for ``hidden_states`` vLLM's layer ids.
        width: elements of a row, over all shards.
        heads: number of heads in a row. 0: rows do not consist of heads.
        dtype: ``bfloat16``, ``float16``, ``float32``, or ``int32`` for ids.

    Example:
        >>> sample.points["hidden_states"]
        StoredPoint(layers=(2, 15, 27, 30), width=576, heads=0, dtype='bfloat16')
    """

    layers: tuple[int, ...]
    width: int
    heads: int
    dtype: str


class PointColumns:
    """The columns of one point, by shard. A row of the point is the concatenation of the shards' rows."""

    def __init__(self, columns: Sequence[SampleColumn]):
        """Raises:
        IntegrityError: the columns are not all shards of one point, each once.
        """
        self.columns = sorted(columns, key=lambda column: column.first.segment.shard)
        infos = [column.first for column in self.columns]
        first = infos[0]
        shards = [(x.segment.shard, x.segment.shards, x.segment.head, x.dtype, set(x.layer_ids)) for x in infos]
        facts = len(infos), first.segment.head, first.dtype, set(first.layer_ids)
        if shards != [(i, *facts) for i in range(len(infos))]:
            raise IntegrityError(
                f"sample {head(self.columns[0].key, 80)!a}: expected the shards of point "
                f"{first.segment.point!r}, each once "
                f"and with the same layers, got {[str(x.segment) for x in infos[:4]]}"
            )
        width = sum(x.hidden_size for x in infos)
        heads = width // first.segment.head if first.segment.head else 0
        self.stored = StoredPoint(first.layer_ids, width, heads, first.dtype)

    def chunk_tokens(self) -> int:
        """The largest number of tokens that any segment decodes together."""
        return max(column.info(i).chunk_tokens for column in self.columns for i in range(len(column)))

    def load_bytes(self, layers: Sequence[int] | None, start: int, stop: int) -> int:
        """As ``SampleColumn.load_bytes``: columns are read one after the other, and the first one's ids are kept."""
        ids = _ID_BYTES * (stop - start)
        return max(column.load_bytes(layers, start, stop) for column in self.columns) + ids

    def load(
        self, layers: Sequence[int] | None, start: int, stop: int, *, masked: bool = False, empty: Empty | None = None
    ) -> Loaded:
        """Load whole rows: carrier ``[n, L, width]``. Arguments and other results: as ``SampleColumn.load``.

        Raises:
            IntegrityError: the shards' token ids differ.
        """
        if len(self.columns) == 1:
            return self.columns[0].load(layers, start, stop, masked=masked, empty=empty)
        layers = self.stored.layers if layers is None else layers
        first = self.columns[0].first
        shape = (stop - start, len(layers), self.stored.width)
        out, at = (empty or new_states)(shape, first.dtype), 0
        ids: np.ndarray[Any, Any] | None = None
        attached: dict[str, np.ndarray[Any, Any]] = {}
        for column in self.columns:
            width = column.first.hidden_size
            rows = column.load(layers, start, stop, masked=masked, out=out[:, :, at : at + width])
            ids = require_same_ids(ids, rows.token_ids, column.key)
            attached |= rows.attached
            at += width
        assert ids is not None, "a point has columns"
        return Loaded(out, ids, attached)


def check_columns(points: Iterable[tuple[PointColumns, Sequence[int] | None]], tokens: int) -> None:
    """Raise ``FormatError`` if ``tokens`` tokens of all columns of ``points`` need more memory than their parts allow.

    ``points``: pairs of a point and its layers; ``None``: all layers. The check covers all columns together: each may
    claim as much as its whole part allows, and one part may store thousands of columns.
    """
    parts: dict[str, Part] = {}
    nbytes = 0
    for point, layers in points:
        for column in point.columns:
            parts |= column.parts(range(len(column)))
            nbytes += tokens * len(point.stored.layers if layers is None else layers) * column.first.row_bytes
    _check_size(parts, nbytes)


def check_decoded(points: Sequence[PointColumns], *, channel_bytes: int = 0) -> None:
    """Raise ``FormatError`` if all states of ``points`` are more than their stored bytes allow.

    For a reader that decodes them in small pieces: the limit of each piece does not limit the time of all.
    ``channel_bytes``: memory that the reader takes for each channel of a point. It has the same limit.
    """
    parts: dict[str, Part] = {}
    raw = stored = 0
    for column in (column for point in points for column in point.columns):
        parts |= column.parts(range(len(column)))
        for info in map(column.info, range(len(column))):
            raw += info.raw_bytes
            stored += sum(map(info.layer_bytes, range(info.num_layers)))
    _check_size(parts, raw)
    check_expansion(raw, stored)
    check_expansion(channel_bytes * max((point.stored.width for point in points), default=0), stored)


def _check_size(parts: Mapping[str, Part], nbytes: int) -> None:
    if nbytes <= FREE_BYTES:  # the size of the parts does not matter
        return
    for part in parts.values():
        part.check_size()
    check_expansion(nbytes, sum(part.size for part in parts.values()))


def require_same_ids(first: np.ndarray[Any, Any] | None, other: np.ndarray[Any, Any], key: str) -> np.ndarray[Any, Any]:
    """Return the ids of the first column, which is ``other`` if ``first`` is ``None``.

    The others are compared one by one, and not kept: a sample may have thousands of columns.

    Raises:
        IntegrityError: two columns of a sample differ.
    """
    if first is not None and not np.array_equal(first, other):
        raise IntegrityError(
            f"sample {head(key, 80)!a}: expected columns of the same token ids, got different token ids"
        )
    return other if first is None else first


def points_of(columns: Sequence[SampleColumn]) -> dict[str, PointColumns]:
    """Name of each point → its columns, in the order of the sample's columns."""
    found: dict[str, list[SampleColumn]] = {}
    for column in columns:
        found.setdefault(column.first.segment.point, []).append(column)
    return {name: PointColumns(own) for name, own in found.items()}


def unpacked(states: Any, point: StoredPoint) -> Any:
    """Reshape rows ``[n, L, width]`` to ``[n, L, heads, dim]`` if they consist of heads."""
    return states.reshape(*states.shape[:2], point.heads, point.width // point.heads) if point.heads else states
