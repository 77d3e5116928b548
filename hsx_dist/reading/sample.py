"""One sample: its tokens, its layers, and any part of them, whatever the number of objects it lies in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hsx_dist.errors import ConfigError, FormatError, IntegrityError
from hsx_dist.format.container import Part
from hsx_dist.format.container_read import Empty
from hsx_dist.format.loss import Loss
from hsx_dist.format.segments import SegmentProof
from hsx_dist.page import HIDDEN_STATES, Segment, token_hash
from hsx_dist.reading.arrays import Framework, to_ids, to_states
from hsx_dist.reading.column import (
    LOSS_MASK,
    PointColumns,
    SampleColumn,
    StoredPoint,
    check_columns,
    is_mean,
    points_of,
    require_same_ids,
    unpacked,
)

#: Tokens wanted: a slice (step 1) or ``(start, stop)``; negative numbers count from the sample's end.
Tokens = slice | tuple[int, int]
#: Ids of layers in the order wanted, of all points; or point → its own.
Layers = Sequence[int] | Mapping[str, Sequence[int]]


class Sample:
    """One request's hidden states, or other points of the model, and its token ids. Nothing is fetched before it is
    asked for."""

    def __init__(
        self, key: str, segments: Sequence[tuple[str, SegmentProof]], open_part: Callable[[str], Part], url: str
    ):
        """``segments``: as ``SampleRecord.segments``; without a ``token_hash`` for an object without a receipt."""
        self.key = key
        self.num_tokens = segments[-1][1].segment.stop
        self._segments = tuple(segments)
        self._open = open_part
        self._url = url.rstrip("/")
        columns: dict[int, list[tuple[str, SegmentProof]]] = {}
        for part, proof in segments:
            columns.setdefault(proof.segment.column, []).append((part, proof))
        self._columns = [SampleColumn(key, columns[i], open_part, url) for i in sorted(columns)]
        self._points: dict[str, PointColumns] | None = None

    def __repr__(self) -> str:
        return f"Sample({self.key!r}, {self.num_tokens} tokens, {self.uri})"

    @property
    def uri(self) -> str:
        """The objects that it lies in, separated by blanks."""
        return " ".join(f"{self._url}/{part}" for part in dict.fromkeys(part for part, _ in self._segments))

    @property
    def points(self) -> dict[str, StoredPoint]:
        """The points that are stored, by name: layers, width, heads, dtype. Of hidden states alone ``hidden_states``.

        Reads the headers of all parts in which the sample lies. ``IntegrityError``: a shard of a point is missing.
        """
        return {name: point.stored for name, point in self._by_point().items()}

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """vLLM's ids of the stored layers of hidden states: 0 the embeddings, k what enters layer k, N the last output
        before the final norm. Empty for a file that vLLM itself wrote, which does not tell them. ``ConfigError``, as
        of ``dtype`` and ``hidden_size``: the sample has other points alone."""
        return self._hidden.layers

    @property
    def dtype(self) -> str:
        """``bfloat16``, ``float16`` or ``float32``: of the hidden states."""
        return self._hidden.dtype

    @property
    def hidden_size(self) -> int:
        return self._point(HIDDEN_STATES).stored.width

    @property
    def chunk_tokens(self) -> int:
        """Tokens that are decoded together: ranges that begin at multiples of it decode nothing twice."""
        return self._columns[0].first.chunk_tokens

    @property
    def about(self) -> dict[str, Any]:
        """What the object says of where it comes from: model, revision, versions, …"""
        return self._open(self._segments[0][0]).about

    @property
    def loss(self) -> dict[int, Loss]:
        """Layer id → what a lossy codec lost of hidden states, measured when it was written; empty where nothing was
        lost.

        Of a sample in several segments the worst one's, which none of its parts exceeds.
        """
        return self._point(HIDDEN_STATES).columns[0].loss()

    def attached(self) -> dict[str, np.ndarray[Any, Any]]:
        """The small arrays that were stored with the sample, by name; numpy, of the sample as a whole: ``loss_mask``
        (uint8 ``[T]``), with a selection by it ``positions`` (int32 ``[T]``: where the tokens stood), with a mean
        ``request_token_ids`` (int32: over which), and what users attached. Errors as ``load``'s."""
        part, slot = self._columns[0].part(0)
        return part.attached(slot)

    @property
    def metadata(self) -> dict[str, Any]:
        """The columns of the input row that were asked for (``input.metadata``), as JSON values."""
        found = self.meta.get("metadata")
        return dict(found) if isinstance(found, dict) else {}

    @property
    def meta(self) -> dict[str, Any]:
        """What its producer said of this sample.

        ``tokens`` (which of the request's tokens these are, where not all: ``start``, ``step``; or ``loss_mask``; or
        ``mean``; and ``of``, their number), ``metadata``,
        ``prompt_tokens``, ``multimodal`` (what vLLM calls the images or sounds behind placeholder tokens),
        ``finish_reason`` (``abort``), ``expires`` (seconds since the epoch), and ``bad``: for each
        segment with non-finite rows or all-zero layers, its tokens, how many of what, and the ``point`` where it is not
        the hidden states.
        """
        bad = [
            {"start": s.start, "stop": s.stop, **_point_of(s), **s.meta["bad"]}
            for column in self._columns
            for s in (column.info(i).segment for i in range(len(column)))
            if isinstance(s.meta.get("bad"), dict)
        ]
        first = {k: v for k, v in self._columns[0].first.segment.meta.items() if k != "bad"}
        return {**first, "bad": bad} if bad else first

    def token_ids(self, framework: Framework = "auto") -> Any:
        """Token ids, int64 ``[T]``."""
        return to_ids(self._columns[0].token_ids(), framework)

    def load(
        self,
        layers: Layers | None = None,
        tokens: Tokens | None = None,
        framework: Framework = "auto",
        *,
        points: Sequence[str] | None = None,
        loss_mask: bool = True,
        empty: Empty | None = None,
    ) -> dict[str, Any]:
        """Fetch, check and decode.

        Args:
            layers: ids of layers in the order wanted, which each of the ``points`` has; or a mapping from points to
                their layers; ``None``, or a point that the mapping lacks: all, as stored.
            tokens: a slice or ``(start, stop)``; negative numbers count from the end.
            framework: ``torch`` (the true dtype), ``numpy`` (bf16 as float32, which is exact), ``auto``: torch where
                it is installed.
            points: names of points (``Sample.points``); ``None``: the hidden states, in their own form.
            loss_mask: whether a mask that the sample has is fetched, too.
            empty: ``empty(shape, dtype)`` is the memory for the states, a carrier array; default: fresh.

        Returns:
            ``hidden_states`` ``[n, L, H]``, ``token_ids`` int64 ``[n]``, ``layer_ids`` int64 ``[L]``, ``key``,
            ``meta``; and ``loss_mask`` int64 ``[n]``, 0 or 1, where the sample has one. With ``points``, instead of
            ``hidden_states``: ``points``, name → ``[n, L, heads, dim]`` where rows are made of heads, else
            ``[n, L, width]``; and ``layer_ids`` is name → int64 ``[L]``.

        Raises:
            ConfigError: there is no such point or layer; the tokens are no range.
            FormatError: stored bytes are not what they must be; ``IntegrityError``: they changed.
        """
        if isinstance(layers, (int, str)):
            raise ConfigError(f"layers: expected a list of layer ids such as [15], came {layers!r}; put it into a list")
        if points is not None and (isinstance(points, str) or not points):
            raise ConfigError(f"points: expected a list of names such as ['q'], got {points!r}. Name at least one")
        start, stop = self._span(tokens)
        names = [HIDDEN_STATES] if points is None else list(dict.fromkeys(points))
        of = {name: self._point(name) for name in names}
        for name in points or ():
            self._require_layers(name, layers_of(layers, name))
        if sum(len(point.columns) for point in of.values()) > 1:
            check_columns([(point, layers_of(layers, name)) for name, point in of.items()], stop - start)
        states, layer_ids, ids, mask = {}, {}, [], None
        for name, point in of.items():
            wanted = layers_of(layers, name)
            rows = point.load(wanted, start, stop, masked=loss_mask, empty=empty)
            mask = mask if rows.mask is None else rows.mask
            states[name] = unpacked(to_states(rows.states, point.stored.dtype, framework), point.stored)
            layer_ids[name] = to_ids(np.array(point.stored.layers if wanted is None else wanted, np.int64), framework)
            ids.append(rows.token_ids)
        require_same_ids(ids, self.key)
        one = points is None
        found = {
            **({HIDDEN_STATES: states[HIDDEN_STATES]} if one else {"points": states}),
            "token_ids": to_ids(ids[0], framework),
            "layer_ids": layer_ids[HIDDEN_STATES] if one else layer_ids,
            "key": self.key,
            "meta": self.meta,
        }
        if loss_mask:  # it lies with the first piece, also where only later ones are wanted
            whole = self.loss_mask() if mask is None else self._mask({LOSS_MASK: mask})
            if whole is not None:
                found[LOSS_MASK] = to_ids(whole[start:stop], framework)
        return found

    def point(self, name: str, layer: int, tokens: Tokens | None = None, framework: Framework = "auto") -> Any:
        """One layer of a point: ``[n, heads, dim]`` where its rows are made of heads, else ``[n, width]``."""
        return self.load([layer], tokens, framework, points=[name], loss_mask=False)["points"][name][:, 0]

    def loss_mask(self) -> np.ndarray[Any, Any] | None:
        """Which tokens count in training: int64 ``[T]``, numpy; ``None``, without a request, where there is none."""
        part, slot = self._columns[0].part(0)
        return self._mask(part.attached(slot, (LOSS_MASK,))) if LOSS_MASK in part.attached_names(slot) else None

    def check(self) -> None:
        """Read the token ids of all columns: do its segments make one sample?

        Raises:
            FormatError: segments of a column differ in point, layers, dtype or width.
            IntegrityError: a shard is missing; columns have other token ids; these are not the ones of the receipts.
        """
        _ = self.points
        first = self._columns[0].token_ids()
        for column in self._columns[1:]:
            require_same_ids([first, column.token_ids()], self.key)
        told, found = {proof.sample_hash for _, proof in self._segments} - {""}, token_hash(first)
        if not told <= {found} and not is_mean(self._columns[0].first.segment):
            raise IntegrityError(
                f"{self.key[:80]!a}: expected token ids of hash {min(told)}, as receipts say of the sample, got {found}"
            )

    def _mask(self, attached: Mapping[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any] | None:
        if LOSS_MASK not in attached:
            return None
        mask = attached[LOSS_MASK]
        if mask.shape != (self.num_tokens,):
            raise FormatError(f"{self.key}: expected a loss mask of {self.num_tokens} tokens, got shape {mask.shape}")
        return (mask != 0).astype(np.int64)

    def load_carrier(
        self, layers: Sequence[int] | None = None, tokens: Tokens | None = None, point: str = HIDDEN_STATES
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """States as their bits (unsigned integers of the dtype's width, ``[n, L, width]``), and token ids."""
        if point != HIDDEN_STATES:
            self._require_layers(point, layers)
        rows = self._point(point).load(layers, *self._span(tokens))
        return rows.states, rows.token_ids

    def layer(self, layer_id: int, tokens: Tokens | None = None, framework: Framework = "auto") -> Any:
        """One layer: ``[n, H]``."""
        return self.load([layer_id], tokens, framework)["hidden_states"][:, 0]

    @property
    def _hidden(self) -> StoredPoint:
        return self._point(HIDDEN_STATES).stored

    def _by_point(self) -> dict[str, PointColumns]:
        if self._points is None:
            self._points = points_of(self._columns)
        return self._points

    def _require_layers(self, name: str, layers: Sequence[int] | None) -> None:
        stored = self._point(name).stored.layers
        missing = sorted(set(layers or ()) - set(stored))
        if missing:
            raise ConfigError(
                f"layers: {missing} of point {name!r} are not stored; stored are {', '.join(map(str, stored))}. Name "
                f"each point's own: layers={{{name!r}: [...]}}"
            )

    def _point(self, name: str) -> PointColumns:
        found = self._by_point().get(name)
        if found is None:
            stored = ", ".join(self._by_point())
            what = "no hidden states" if name == HIDDEN_STATES else f"no point {name!r}"
            raise ConfigError(f"{self.key}: expected points among {stored}, got {what}. Load points=[…] of these")
        return found

    def _span(self, tokens: Tokens | None) -> tuple[int, int]:
        wanted = slice(None) if tokens is None else tokens if isinstance(tokens, slice) else slice(*tokens)
        start, stop, step = wanted.indices(self.num_tokens)
        if step != 1:
            raise ConfigError(f"tokens: expected consecutive ones, got a step of {step}")
        return start, max(start, stop)


def layers_of(layers: Layers | None, point: str) -> Sequence[int] | None:
    """What ``layers`` asks for of ``point``; ``None``: all, as stored."""
    return layers.get(point) if isinstance(layers, Mapping) else layers


def _point_of(s: Segment) -> dict[str, str]:
    return {} if s.point == HIDDEN_STATES else {"point": s.point}
