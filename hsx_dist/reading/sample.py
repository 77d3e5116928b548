"""One sample: its tokens, its layers, and any part of them. It may be stored in several objects."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from hsx_dist.errors import ConfigError, FormatError, IntegrityError
from hsx_dist.format.container import Part
from hsx_dist.format.container_read import Empty
from hsx_dist.format.loss import Loss
from hsx_dist.format.part_request import checked_layers, layer_list, point_list, token_range
from hsx_dist.format.part_source import within_memory
from hsx_dist.format.segments import SegmentProof
from hsx_dist.page import HIDDEN_STATES, token_hash
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
from hsx_dist.text import head

#: A range of tokens: a slice (step 1) or ``(start, stop)``. Negative numbers count from the sample's end.
Tokens = slice | tuple[int, int]
#: Layer ids in the order of the result, for all points; or a mapping from each point to its layer ids.
Layers = Sequence[int] | Mapping[str, Sequence[int]]


class Sample:
    """One request's hidden states, or other points of the model, and its token ids. Fetches data only on access.

    ``Run`` makes samples. L is the number of layers, H the hidden size.

    Attributes:
        key: the sample's key.
        num_tokens: number of its tokens, T.

    Example:
        >>> sample = open_run("runs/demo").at(0)
        >>> sample.layer_ids, sample.hidden_size, sample.dtype
        ((2, 15, 27, 30), 576, 'bfloat16')
        >>> list(sample.points), sample.loss, sample.meta, sample.metadata
        (['hidden_states'], {}, {}, {})
        >>> sample.uri, sample.chunk_tokens, sample.about["model"]
        ('...runs/demo/...safetensors', 16, 'builtin:smollm2-135m-instruct')
    """

    def __init__(self, key: str, segments: Sequence[SegmentProof], open_part: Callable[[str], Part], url: str):
        """``segments``: as ``SampleRecord.segments``. Those of an object without a receipt have no ``token_hash``."""
        self.key = key
        self.num_tokens = segments[-1].segment.stop
        self._segments = tuple(segments)
        self._open = open_part
        self._url = url.rstrip("/")
        columns: dict[int, list[SegmentProof]] = {}
        for proof in segments:
            columns.setdefault(proof.segment.column, []).append(proof)
        self._columns = [SampleColumn(key, columns[i], open_part, url) for i in sorted(columns)]
        self._points: dict[str, PointColumns] | None = None

    def __repr__(self) -> str:
        return f"Sample({self.key!r}, {self.num_tokens} tokens, {self.uri})"

    @property
    def uri(self) -> str:
        """URLs of the objects that store the sample, separated by blanks."""
        return " ".join(f"{self._url}/{part}" for part in dict.fromkeys(proof.part for proof in self._segments))

    @property
    def points(self) -> dict[str, StoredPoint]:
        """The stored points by name, with layers, width, heads and dtype. Hidden states are ``hidden_states``.

        Reads the headers of all parts that store the sample.

        Raises:
            IntegrityError: a shard of a point is missing.
        """
        return {name: point.stored for name, point in self._by_point().items()}

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """vLLM's ids of the stored layers of hidden states.

        Id 0 is the embeddings, k the input of layer k, N the last output before the final norm. Empty for a file that
        vLLM's own connector wrote: it does not record the ids.

        Raises:
            ConfigError: the sample has no hidden states. ``dtype`` and ``hidden_size`` raise it too.
        """
        return self._hidden.layers

    @property
    def dtype(self) -> str:
        """``bfloat16``, ``float16`` or ``float32``, the dtype of the hidden states."""
        return self._hidden.dtype

    @property
    def hidden_size(self) -> int:
        """H, the number of elements of one layer's row."""
        return self._point(HIDDEN_STATES).stored.width

    @property
    def chunk_tokens(self) -> int:
        """Number of tokens that are decoded together. Ranges that begin at its multiples decode nothing twice."""
        return self._columns[0].first.chunk_tokens

    @property
    def about(self) -> dict[str, Any]:
        """The object's record of its origin, such as model, revision and versions."""
        return self._open(self._segments[0].part).about

    @property
    def loss(self) -> dict[int, Loss]:
        """Layer id → error of a lossy codec in the hidden states, measured at writing. Empty if nothing was lost.

        For a sample in several segments it is the error of the worst segment.
        """
        return self._point(HIDDEN_STATES).columns[0].loss()

    @within_memory()
    def attached(self) -> dict[str, np.ndarray[Any, Any]]:
        """The small numpy arrays that were stored with the whole sample, by name. Raises as ``load``.

        - ``loss_mask``: uint8 ``[T]``.
        - ``positions``, if the tokens were selected by the loss mask: int32 ``[T]``, their positions in the request.
        - ``request_token_ids``, if the states are a mean: int32, the tokens that the mean was taken over.
        - Arrays that users attached.

        Example:
            >>> sorted(sample.attached())  # the demo's rows have no mask
            []
        """
        part, slot = self._columns[0].part(0)
        return part.attached(slot)

    @property
    def metadata(self) -> dict[str, Any]:
        """The columns of the input row that ``input.metadata`` names, as JSON values."""
        found = self._columns[0].first.segment.meta.get("metadata")
        return dict(found) if isinstance(found, dict) else {}

    @property
    def meta(self) -> dict[str, Any]:
        """The producer's facts about this sample. All members are optional.

        - ``tokens``: the selection, if not all tokens of the request are stored. ``start`` and ``step``; or
          ``loss_mask``; or ``mean``. ``of`` is the number of the request's tokens.
        - ``metadata``: as ``Sample.metadata``.
        - ``prompt_tokens``: the number of prompt tokens.
        - ``multimodal``: vLLM's identifiers of the images or sounds behind placeholder tokens.
        - ``finish_reason``: ``abort``.
        - ``expires``: seconds since the epoch.
        - ``bad``: an entry for each segment with non-finite rows or all-zero layers: its token range and the counts.
          ``point`` names the point unless it is the hidden states.
        """
        bad = [found for column in self._columns for found in column.findings()]
        first = {k: v for k, v in self._columns[0].first.segment.meta.items() if k != "bad"}
        return {**first, "bad": bad} if bad else first

    @within_memory()
    def token_ids(self, framework: Framework = "auto") -> Any:
        """Token ids, int64 ``[T]``. ``framework`` and errors: as ``load``.

        Example:
            >>> sample.token_ids("numpy").dtype
            dtype('int64')
        """
        return to_ids(self._columns[0].token_ids(), framework)

    @within_memory()
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
            layers: layer ids in the order of the result; each of the ``points`` must have them. Or a mapping from
                points to layer ids. ``None``, or a point that the mapping lacks: all layers, in stored order.
            tokens: a slice or ``(start, stop)``. Negative numbers count from the end.
            framework: ``torch`` (the stored dtype), ``numpy`` (bf16 as float32, which is exact), or ``auto``: torch if
                it is installed.
            points: names of points (``Sample.points``). ``None``: the hidden states.
            loss_mask: whether to fetch the sample's loss mask, if it has one.
            empty: ``empty(shape, dtype)`` returns the memory for the states, a carrier array. Default: new memory.

        Returns:
            ``hidden_states`` ``[n, L, H]``, ``token_ids`` int64 ``[n]``, ``layer_ids`` int64 ``[L]``, ``key``,
            ``meta``. A sample with a mask adds ``loss_mask`` int64 ``[n]``, 0 or 1.

            With the argument ``points``, the member ``points`` replaces ``hidden_states``. It maps each name to
            ``[n, L, heads, dim]`` if its rows consist of heads, else ``[n, L, width]``. ``layer_ids`` maps each name to
            int64 ``[L]``.

        Raises:
            ConfigError: there is no such point or layer, or ``tokens`` is not a range.
            FormatError: the stored bytes are not a valid part.
            IntegrityError: the stored bytes changed.
            StoreError: the store failed.

        Example:
            >>> sample.load(layers=[15], tokens=(0, 8))["hidden_states"].shape
            torch.Size([8, 1, 576])
        """
        layers = checked_layers(layers)
        start, stop = self.span(tokens)
        names = [HIDDEN_STATES] if points is None else list(dict.fromkeys(point_list(points)))
        of = {name: self._point(name) for name in names}
        for name in points or ():
            self._require_layers(name, layers_of(layers, name))
        _check_memory([(point, layers_of(layers, name)) for name, point in of.items()], stop - start)
        states, layer_ids = {}, {}
        ids: np.ndarray[Any, Any] | None = None
        attached: dict[str, np.ndarray[Any, Any]] = {}
        for name, point in of.items():
            wanted = layers_of(layers, name)
            rows = point.load(wanted, start, stop, masked=loss_mask, empty=empty)
            attached |= rows.attached
            states[name] = unpacked(to_states(rows.states, point.stored.dtype, framework), point.stored)
            layer_ids[name] = to_ids(np.array(point.stored.layers if wanted is None else wanted, np.int64), framework)
            ids = require_same_ids(ids, rows.token_ids, self.key)
        assert ids is not None, "there is at least one point"
        one = points is None
        found = {
            **({HIDDEN_STATES: states[HIDDEN_STATES]} if one else {"points": states}),
            "token_ids": to_ids(ids, framework),
            "layer_ids": layer_ids[HIDDEN_STATES] if one else layer_ids,
            "key": self.key,
            "meta": self.meta,
        }
        if loss_mask:  # stored with the first segment, also if only later segments are loaded
            mask = attached[LOSS_MASK] if LOSS_MASK in attached else self._mask()
            if mask is not None:
                self._check_mask(mask.shape)
                found[LOSS_MASK] = to_ids((mask[start:stop] != 0).astype(np.int64), framework)
        return found

    def point(self, name: str, layer: int, tokens: Tokens | None = None, framework: Framework = "auto") -> Any:
        """One layer of a point: ``[n, heads, dim]`` if its rows consist of heads, else ``[n, width]``.

        Other arguments and errors: as ``load``.

        Example:
            >>> sample.point("hidden_states", 15, tokens=(0, 8)).shape
            torch.Size([8, 576])
        """
        return self.load([layer], tokens, framework, points=[name], loss_mask=False)["points"][name][:, 0]

    @within_memory()
    def loss_mask(self) -> np.ndarray[Any, Any] | None:
        """The tokens that count in training: numpy int64 ``[T]``. ``None``, without a request, if there is no mask.

        Raises:
            FormatError: the mask has another length.

        Example:
            >>> print(sample.loss_mask())
            None
        """
        mask = self._mask()
        return None if mask is None else (mask != 0).astype(np.int64)

    @within_memory()
    def check(self) -> None:
        """Read the token ids of all columns and check that the segments are of one sample.

        Raises:
            FormatError: segments of a column differ in point, layers, dtype or width.
            IntegrityError: a shard is missing, or token ids differ between columns or from the receipts' hash.

        Example:
            >>> sample.check()
        """
        _ = self.points
        first = self._columns[0].token_ids()
        for column in self._columns[1:]:
            require_same_ids(first, column.token_ids(), self.key)
        told, found = {proof.sample_hash for proof in self._segments} - {""}, token_hash(first)
        if not told <= {found} and not is_mean(self._columns[0].first.segment.meta):
            raise IntegrityError(
                f"sample {head(self.key, 80)!a}: expected token ids of hash {min(told)}, as in its receipts, "
                f"got {found}"
            )

    def _mask(self) -> np.ndarray[Any, Any] | None:
        """The loss mask as stored, ``[T]``. Its shape is checked before it is fetched."""
        part, slot = self._columns[0].part(0)
        shape = part.attached_shape(slot, LOSS_MASK)
        if shape is None:
            return None
        self._check_mask(shape)
        return part.attached(slot, (LOSS_MASK,))[LOSS_MASK]

    def _check_mask(self, shape: tuple[int, ...]) -> None:
        if shape != (self.num_tokens,):
            raise FormatError(
                f"sample {head(self.key, 80)!a}: expected a loss mask of {self.num_tokens} tokens, got shape {shape}"
            )

    @within_memory()
    def load_carrier(
        self, layers: Sequence[int] | None = None, tokens: Tokens | None = None, point: str = HIDDEN_STATES
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """States as their bits, without conversion: numpy arrays also of bf16.

        Arguments and errors: as ``load``, for one ``point``.

        Returns:
            Unsigned integers of the dtype's width ``[n, L, width]``, and token ids int64 ``[n]``.

        Example:
            >>> bits, token_ids = sample.load_carrier([15], tokens=(0, 8))
            >>> bits.dtype, bits.shape
            (dtype('uint16'), (8, 1, 576))
        """
        if point != HIDDEN_STATES:
            self._require_layers(point, layers)
        columns, (start, stop) = self._point(point), self.span(tokens)
        _check_memory([(columns, layers)], stop - start)
        rows = columns.load(layers, start, stop)
        return rows.states, rows.token_ids

    def layer(self, layer_id: int, tokens: Tokens | None = None, framework: Framework = "auto") -> Any:
        """One layer of the hidden states: ``[n, H]``. Other arguments and errors: as ``load``.

        Example:
            >>> sample.layer(15, tokens=(0, 8)).shape
            torch.Size([8, 576])
        """
        return self.load([layer_id], tokens, framework)["hidden_states"][:, 0]

    def span(self, tokens: Tokens | None) -> tuple[int, int]:
        """The range ``(start, stop)`` of ``tokens``.

        Raises:
            ConfigError: it is no range, or has a step other than 1.

        Example:
            >>> start, stop = sample.span(slice(-8, None))
            >>> stop - start
            8
        """
        return token_range(tokens, self.num_tokens)

    @property
    def _hidden(self) -> StoredPoint:
        return self._point(HIDDEN_STATES).stored

    def _by_point(self) -> dict[str, PointColumns]:
        if self._points is None:
            self._points = points_of(self._columns)
        return self._points

    def _require_layers(self, name: str, layers: Sequence[int] | None) -> None:
        stored = self._point(name).stored.layers
        missing = [] if layers is None else sorted(set(layer_list(layers)) - set(stored))
        if missing:
            raise ConfigError(
                f"layers: expected layers of point {name!r} among {list(stored)}, got {missing}. Request stored layers "
                "only"
            )

    def _point(self, name: str) -> PointColumns:
        found = self._by_point().get(name)
        if found is None:
            stored = ", ".join(self._by_point())
            raise ConfigError(
                f"sample {head(self.key, 80)!a}: expected one of the points {head(stored, 1000)}, got "
                f"{head(name, 80)!r}. Request one of these"
            )
        return found


def load_bytes(
    sample: Sample,
    layers: Layers | None,
    tokens: Tokens | None,
    points: Sequence[str] | None = None,
    arrays: Collection[str] = (),
) -> int:
    """Maximum bytes of memory that ``sample.load`` takes in addition to the states. Reads only headers.

    A range within a chunk takes the whole chunk. ``arrays``: names of attached arrays that are loaded too, also the
    loss mask. They are loaded whole. Arguments and errors: as ``Sample.load``.
    """
    start, stop = sample.span(tokens)
    names = [HIDDEN_STATES] if points is None else points
    found = max(sample._point(name).load_bytes(layers_of(layers, name), start, stop) for name in names)
    attached = sample._columns[0].first.attached
    nbytes = sum(2 * attached[name].nbytes for name in arrays if name in attached)  # fetched and copied
    masks = 9 * sample.num_tokens if LOSS_MASK in arrays and LOSS_MASK in attached else 0  # bool and int64
    return found + nbytes + masks


def loss_tokens_of(sample: Sample) -> int:
    """Number of tokens that count in training. Takes 3 bytes of memory for each token. Errors: as ``Sample.load``."""
    mask = sample._mask()
    return sample.num_tokens if mask is None else int(np.count_nonzero(mask))


def columns_of(sample: Sample) -> Mapping[str, PointColumns]:
    """Name of each stored point → its columns. Raises as ``Sample.points``."""
    return sample._by_point()


def header_bytes_of(sample: Sample) -> int:
    """Bytes of the headers of all parts that hold the sample. Raises as ``Sample.load``."""
    parts: dict[str, Part] = {}
    for column in sample._columns:
        parts |= column.parts(range(len(column)))
    return sum(part.header_bytes for part in parts.values())


def attached_of(sample: Sample, names: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
    """As ``sample.attached()``, only these arrays. ``ConfigError``: the sample lacks one."""
    part, slot = sample._columns[0].part(0)
    stored = part.attached_names(slot)
    for name in names:
        if name not in stored:
            raise ConfigError(
                f"{sample.uri}: expected an attached array {name!r} of {sample.key!r}, got only "
                f"{head(str(sorted(stored)), 1000)}. Correct rename"
            )
    return part.attached(slot, names) if names else {}


def layers_of(layers: Layers | None, point: str) -> Sequence[int] | None:
    """The layer ids that ``layers`` requests for ``point``. ``None``: all, in stored order."""
    return layers.get(point) if isinstance(layers, Mapping) else layers


def _check_memory(points: Sequence[tuple[PointColumns, Sequence[int] | None]], tokens: int) -> None:
    """See ``check_columns``. A single column checks its memory when it has fetched its bytes."""
    if sum(len(point.columns) for point, _ in points) > 1:
        check_columns(points, tokens)
