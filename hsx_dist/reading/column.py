"""One column of a sample: one shard of one point, for all tokens, in the segments that its receipts prove."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hsx_dist.errors import FormatError, IntegrityError
from hsx_dist.format.container import Part, SegmentInfo
from hsx_dist.format.container_read import Empty, new_states
from hsx_dist.format.expansion import check_expansion
from hsx_dist.format.loss import Loss
from hsx_dist.format.segments import SegmentProof
from hsx_dist.page import Segment, token_hash

#: Name of the attached array that says which tokens count in training.
LOSS_MASK = "loss_mask"


class ColumnRows(NamedTuple):
    """``states``: carrier ``[n, L, H]``; ``token_ids``: int64 ``[n]``; ``mask``: the attached loss mask, whole."""

    states: np.ndarray[Any, Any]
    token_ids: np.ndarray[Any, Any]
    mask: np.ndarray[Any, Any] | None


class SampleColumn:
    """The segments of one column, in token order. Nothing is fetched before it is asked for."""

    def __init__(
        self, key: str, segments: Sequence[tuple[str, SegmentProof]], open_part: Callable[[str], Part], url: str
    ):
        """``segments``: as ``SampleRecord.segments``; without a ``token_hash`` for an object without a receipt."""
        self.key = key
        self.segments = tuple(segments)
        self._open = open_part
        self._url = url.rstrip("/")
        self._infos: dict[int, SegmentInfo] = {}

    def __len__(self) -> int:
        return len(self.segments)

    @property
    def first(self) -> SegmentInfo:
        """What its first segment says: point, layers, dtype, width."""
        return self.info(0)

    def part(self, i: int) -> tuple[Part, int]:
        """The part in which the ``i``-th segment lies, and its slot there; checked as ``info`` does."""
        self.info(i)
        name, proof = self.segments[i]
        return self._open(name), proof.slot

    def info(self, i: int) -> SegmentInfo:
        """What the ``i``-th segment says. ``IntegrityError``: its part says other things than its receipt."""
        info = self._infos.get(i)
        if info is None:
            part, proof = self.segments[i]
            found = self._open(part).segments
            if proof.slot >= len(found) or not agrees(found[proof.slot], proof):
                raise IntegrityError(
                    f"{self._url}/{part}: expected {proof.segment} at place {proof.slot}, as its receipt says, "
                    f"got {found[proof.slot].segment if proof.slot < len(found) else 'nothing'}"
                )
            info = self._infos[i] = found[proof.slot]
            if i and not _is_of_one_column(info, self.first):
                raise FormatError(f"{self.key}: expected segments of {self.first}, got {info}")
        return info

    def token_ids(self) -> np.ndarray[Any, Any]:
        """int64 ``[T]``."""
        return np.concatenate([self._ids(i) for i in range(len(self))])

    def loss(self) -> dict[int, Loss]:
        """Layer id → the worst segment's, which none of the others exceeds."""
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
    ) -> ColumnRows:
        """Tokens ``[start, stop)``; into ``out``, a carrier array ``[n, L, H]``, where it is given.

        ``masked``: fetch the loss mask too, where the first segment is read and has one.
        """
        first = self.first
        if layers is None and first.layer_ids:
            layers = first.layer_ids  # one order, should segments have several
        spans = [proof.segment for _, proof in self.segments]
        within = [i for i, s in enumerate(spans) if s.start < stop and start < s.stop]
        within = within or [0]  # no tokens: an empty array of the right shape
        ids, mask = [], None
        if len(within) > 1 and out is None:
            num_layers = first.num_layers if layers is None else len(layers)
            self.check_size(within, (stop - start) * num_layers * first.row_bytes)
            out = (empty or new_states)((stop - start, num_layers, first.hidden_size), first.dtype)
        for i in within:
            s, (part, slot) = spans[i], self.part(i)
            a, b = max(start, s.start), max(min(stop, s.stop), max(start, s.start))
            states, own, attached = part.load(
                slot,
                layers=layers,
                tokens=(a - s.start, b - s.start) if a < b else (0, 0),
                out=None if out is None else out[a - start : b - start],
                attached=(LOSS_MASK,) if masked and i == 0 else (),
                empty=empty,
            )
            mask = attached.get(LOSS_MASK, mask)
            self._check_ids(i, own)
            ids.append(own[a - s.start : b - s.start])
        return ColumnRows(states if out is None else out, np.concatenate(ids), mask)

    def check_size(self, segments: Iterable[int], nbytes: int) -> None:
        """Refuse to allocate ``nbytes`` for states of which nothing is fetched yet: receipts may claim any number of
        tokens."""
        _check_size(self.parts(segments), nbytes)

    def parts(self, segments: Iterable[int]) -> dict[str, Part]:
        """By name, those that hold these segments."""
        return {name: self._open(name) for name in (self.segments[i][0] for i in segments)}

    def _ids(self, i: int) -> np.ndarray[Any, Any]:
        part, slot = self.part(i)
        ids = part.token_ids(slot)
        self._check_ids(i, ids)
        return ids

    def _check_ids(self, i: int, ids: np.ndarray[Any, Any]) -> None:
        part, proof = self.segments[i]
        if proof.token_hash and token_hash(ids) != proof.token_hash:
            raise IntegrityError(
                f"{self._url}/{part}: expected token ids of hash {proof.token_hash} for {self.key!r}, as its "
                f"receipt says, got {token_hash(ids)}"
            )


def agrees(info: SegmentInfo, proof: SegmentProof) -> bool:
    """Whether a part says the same of a segment as its receipt, which does not name the point."""
    said, proven = ((s.id, s.columns, s.start, s.stop, s.total) for s in (info.segment, proof.segment))
    return said == proven


def is_mean(segment: Segment) -> bool:
    """Whether the sample is the mean over a request's tokens. Its receipt has the hash of the request's ids."""
    tokens = segment.meta.get("tokens")
    return isinstance(tokens, dict) and "mean" in tokens


def _is_of_one_column(info: SegmentInfo, first: SegmentInfo) -> bool:
    one, other = (
        (x.segment.point, x.segment.shard, x.segment.shards, x.segment.head, x.dtype, x.hidden_size, set(x.layer_ids))
        for x in (info, first)
    )
    return one == other


@dataclass(frozen=True)
class StoredPoint:
    """A point as a sample has it.

    Attributes:
        layers: ids in stored order: decoder layers; of ``hidden_states`` vLLM's layer ids.
        width: elements of a row, of all shards.
        heads: how many heads a row is made of; 0: it is not.
        dtype: ``bfloat16``, ``float16``, ``float32``, or ``int32`` for ids.
    """

    layers: tuple[int, ...]
    width: int
    heads: int
    dtype: str


class PointColumns:
    """The columns of one point, by shard: its rows are theirs, one behind the other."""

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
                f"{self.columns[0].key}: expected the shards of point {first.segment.point!r}, each once and with the "
                f"same layers, got {[str(x.segment) for x in infos][:4]}"
            )
        width = sum(x.hidden_size for x in infos)
        heads = width // first.segment.head if first.segment.head else 0
        self.stored = StoredPoint(first.layer_ids, width, heads, first.dtype)

    def load(
        self, layers: Sequence[int] | None, start: int, stop: int, *, masked: bool = False, empty: Empty | None = None
    ) -> ColumnRows:
        """As ``SampleColumn.load``, with whole rows: carrier ``[n, L, width]``.

        Raises:
            IntegrityError: shards have other token ids.
        """
        if len(self.columns) == 1:
            return self.columns[0].load(layers, start, stop, masked=masked, empty=empty)
        layers = self.stored.layers if layers is None else layers
        first = self.columns[0].first
        shape = (stop - start, len(layers), self.stored.width)
        out, at = (empty or new_states)(shape, first.dtype), 0
        found = []
        for column in self.columns:
            width = column.first.hidden_size
            found.append(column.load(layers, start, stop, masked=masked, out=out[:, :, at : at + width]))
            at += width
        require_same_ids([rows.token_ids for rows in found], self.columns[0].key)
        return ColumnRows(out, found[0].token_ids, next((r.mask for r in found if r.mask is not None), None))


def check_columns(points: Iterable[tuple[PointColumns, Sequence[int] | None]], tokens: int) -> None:
    """``FormatError`` instead of the memory for ``tokens`` tokens of all columns of ``points``, where these claim too
    much. Each point comes with its layers, ``None``: all. Taken together: each column may claim as much as its part,
    and thousands may lie in one part."""
    parts: dict[str, Part] = {}
    nbytes = 0
    for point, layers in points:
        for column in point.columns:
            parts |= column.parts(range(len(column)))
            nbytes += tokens * len(point.stored.layers if layers is None else layers) * column.first.row_bytes
    _check_size(parts, nbytes)


def _check_size(parts: Mapping[str, Part], nbytes: int) -> None:
    for part in parts.values():
        part.check_size()
    check_expansion(nbytes, sum(part.size for part in parts.values()))


def require_same_ids(ids: Sequence[np.ndarray[Any, Any]], key: str) -> None:
    """``IntegrityError`` when columns of a sample are of other tokens than the first."""
    if not all(np.array_equal(ids[0], other) for other in ids[1:]):
        raise IntegrityError(f"{key}: expected columns of the same token ids, got different ones")


def points_of(columns: Sequence[SampleColumn]) -> dict[str, PointColumns]:
    """Name → the columns of each point, in the order of the sample's columns."""
    found: dict[str, list[SampleColumn]] = {}
    for column in columns:
        found.setdefault(column.first.segment.point, []).append(column)
    return {name: PointColumns(own) for name, own in found.items()}


def unpacked(states: Any, point: StoredPoint) -> Any:
    """Rows ``[n, L, width]`` as ``[n, L, heads, dim]``, where they are made of heads."""
    return states.reshape(*states.shape[:2], point.heads, point.width // point.heads) if point.heads else states
