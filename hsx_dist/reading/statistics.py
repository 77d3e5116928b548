"""Statistics that ``hsx stats`` stores with a run: moments, maxima and norms of each layer, for scaling and reports.

The computation streams: memory is a few arrays of the hidden size for each layer. All sums are float64. Blocks are
joined by the parallel update of Chan, Golub and LeVeque (1979). It avoids the cancellation of a difference of sums of
squares.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hsx_dist.errors import ConfigError, FormatError
from hsx_dist.format.json_objects import (
    MAX_JSON_BYTES,
    check_members,
    count,
    dump_json,
    find_json,
    number,
    parse_json,
    text,
)
from hsx_dist.format.markers import OBJECTS_OF_A_RUN
from hsx_dist.format.names import statistics_name
from hsx_dist.format.part_request import layer_list
from hsx_dist.logger import get_logger
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.reading.run import Run
from hsx_dist.store import Store
from hsx_dist.text import printable

log = get_logger(__name__)

_Array = np.ndarray[Any, Any]
#: Number of values that are converted to float64 at once: 256 rows of a hidden size of 4096.
_VALUES = 1 << 20
#: Above this the object would exceed the limit for JSON objects: a channel is three float64 in base64.
_MOST_CHANNELS = (MAX_JSON_BYTES - 4096) // 32
#: Limit of layers times channels of a point, whose arrays take 24 bytes each. 128 layers of 65,536 channels.
_MOST_VALUES = 1 << 23
_ARRAYS = ("mean", "variance", "absmax")
_NUMBERS = ("mean_norm", "rms_norm", "max_norm")
_COUNTS = ("layer", "tokens", "samples", "non_finite", "skip_first", "hidden_size")


def _norm(value: Any) -> str | None:
    """Check a number or a norm, which may be larger than a number of another object."""
    return None if type(value) is float and math.isfinite(value) else number(value)


_CHECKS = {
    **dict.fromkeys(("run", "point", *_ARRAYS), text),
    **dict.fromkeys(_NUMBERS, _norm),
    **dict.fromkeys(_COUNTS, count),
}


@dataclass(frozen=True)
class LayerStatistics:
    """Statistics of one layer of ``point``, over ``tokens`` tokens of ``samples`` samples. H: length of a row.

    - ``mean``, ``variance`` (of the population), ``absmax`` (largest absolute value): float64 ``[H]``, by channel.
    - ``mean_norm``, ``rms_norm``, ``max_norm``: of the tokens' Euclidean norms.
    - ``non_finite``: number of tokens that were skipped because a value was not finite.
    - ``skip_first``: number of tokens that were skipped at the start of each sample.

    Example:
        >>> from hsx_dist.reading.statistics import compute_statistics
        >>> own = compute_statistics(run, [15], skip_first=1).layers[15]
        >>> own.mean.shape, own.tokens, own.norm_factor * own.mean_norm
        ((576,), 63, 24.0...)
    """

    layer: int
    tokens: int
    samples: int
    non_finite: int
    skip_first: int
    mean: _Array
    variance: _Array
    absmax: _Array
    mean_norm: float
    rms_norm: float
    max_norm: float
    point: str = HIDDEN_STATES

    @property
    def norm_factor(self) -> float:
        """Factor that scales states to a mean norm of sqrt(H), as SAELens' ``expected_average_only_in``.

        1 if all states are zero.
        """
        return math.sqrt(len(self.mean)) / self.mean_norm if self.mean_norm > np.finfo(np.float32).tiny else 1.0


@dataclass(frozen=True)
class RunStatistics:
    """``LayerStatistics`` of one point by layer id: ``layers``.

    Example:
        >>> from hsx_dist.reading.statistics import RunStatistics, compute_statistics
        >>> both = RunStatistics({**compute_statistics(run, [2]).layers, **compute_statistics(run, [15]).layers})
    """

    layers: Mapping[int, LayerStatistics]


class _Moments:
    """Running statistics of the rows of one layer."""

    def __init__(self, hidden_size: int):
        self.tokens = self.non_finite = 0
        self.mean, self.squares, self.absmax = (np.zeros(hidden_size) for _ in range(3))
        self.norms = self.norm_squares = self.max_norm = 0.0

    def add(self, rows: _Array) -> None:
        """``rows``: ``[n, H]`` of any float dtype."""
        step = max(1, _VALUES // rows.shape[1])
        for start in range(0, len(rows), step):
            with np.errstate(invalid="ignore"):  # a signalling NaN
                x = rows[start : start + step].astype(np.float64)
            finite = np.isfinite(x).all(axis=1)
            if not finite.all():
                self.non_finite += int((~finite).sum())
                x = x[finite]
            if len(x):
                self._join(x)

    def _join(self, x: _Array) -> None:
        n, before = len(x), self.tokens
        mean = x.mean(axis=0)
        delta = mean - self.mean
        self.tokens = before + n
        self.squares += ((x - mean) ** 2).sum(axis=0) + delta**2 * (before * n / self.tokens)
        self.mean += delta * (n / self.tokens)
        np.maximum(self.absmax, np.abs(x).max(axis=0), out=self.absmax)
        norm_squares = (x**2).sum(axis=1)
        norms = np.sqrt(norm_squares)
        self.norms += float(norms.sum())
        self.norm_squares += float(norm_squares.sum())
        self.max_norm = max(self.max_norm, float(norms.max()))

    def done(self, layer: int, samples: int, skip_first: int, point: str = HIDDEN_STATES) -> LayerStatistics:
        n = self.tokens
        if n == 0:
            raise ConfigError(f"layer {layer}: expected tokens with finite states, got none. Choose another layer")
        self.squares /= n  # in place: all layers are in memory
        return LayerStatistics(
            *(layer, n, samples, self.non_finite, skip_first, self.mean, self.squares, self.absmax),
            *(self.norms / n, math.sqrt(self.norm_squares / n), self.max_norm, point),
        )


def compute_statistics(
    run: Run,
    layers: Sequence[int] | None = None,
    *,
    max_tokens: int | None = None,
    skip_first: int = 0,
    seed: int = 0,
    point: str = HIDDEN_STATES,
) -> RunStatistics:
    """Compute statistics of ``layers`` (``None``: all) of ``point``.

    Rows that consist of heads become ``[heads * dim]``.

    Args:
        run: an open run.
        max_tokens: number of tokens to read, of random samples. ``None``: all.
        skip_first: number of tokens to skip at the start of each sample. The first token's norm is often a hundred
            times that of the others. A trainer that drops the first token must not scale by it.
        seed: seed for the choice of samples.

    Raises:
        ConfigError: a layer or the point is not in the run, the point is ids, no token is left, or layers times
            elements of a row exceed 2^23.
        FormatError, NotFound: a part is damaged or missing, or rows have more than 130,944 elements.

    Example:
        >>> from hsx_dist.reading.statistics import compute_statistics
        >>> compute_statistics(run, [2, 15], skip_first=1).layers.keys()
        dict_keys([2, 15])
    """
    from hsx_dist.reading.datasets import HiddenStatesDataset  # imports torch, which reading statistics does not need

    if skip_first < 0 or (max_tokens is not None and max_tokens < 1):
        raise ConfigError(
            f"expected max_tokens of at least 1 and skip_first of at least 0, got {max_tokens} and {skip_first}. "
            "Correct them"
        )
    ids = _layers_of(run, point) if layers is None else layer_list(layers)
    if not ids:
        raise ConfigError(f"{run.url}: expected layers of {point}, got none. Name those that are stored (--layers)")
    data = HiddenStatesDataset(
        run,
        points=None if point == HIDDEN_STATES else [point],
        layers=ids,  # by id, since samples may store them in another order
        tokens=slice(skip_first, None),
        shuffle=max_tokens is not None,
        seed=seed,
        rank=0,
        world_size=1,
        loss_mask="off",
        framework="numpy",
        prefetch_bytes=64 << 20,  # the computation is slower than the reads
    )
    samples, left = 0, math.inf if max_tokens is None else max_tokens
    moments: list[_Moments] = []
    for item in data:
        states = _rows_of(item, point, run)[: int(min(left, len(item[point])))]
        width = states.shape[2]
        if len(ids) * width > _MOST_VALUES:
            raise ConfigError(
                f"{run.url}: {point}: expected at most {_MOST_VALUES} channels of all layers, got {len(ids)} layers of "
                f"{width}. Name fewer layers (--layers)"
            )
        moments = moments or [_Moments(width) for _ in ids]
        if width != len(moments[0].mean):
            raise FormatError(
                f"{run.url}: expected rows of {len(moments[0].mean)} elements, as in other samples, got {width} in "
                f"{item['key']!r}. Its part is of another model"
            )
        for k, own in enumerate(moments):
            own.add(states[:, k])
        samples, left = samples + 1, left - len(states)
        del item, states  # before the next sample is read
        if left <= 0:
            break
    if not moments:
        raise ConfigError(f"{run.url}: expected samples, got a run without any. Start the extraction first")
    return RunStatistics(
        {layer: m.done(layer, samples, skip_first, point) for layer, m in zip(ids, moments, strict=True)}
    )


def _layers_of(run: Run, point: str) -> tuple[int, ...]:
    """The layers of ``point``. If ``run.json`` does not list those of hidden states, the layers of the first sample."""
    return run.layers_of(point) or (run.at(0).layer_ids if len(run) else ())


def _rows_of(item: Mapping[str, Any], point: str, run: Run) -> _Array:
    """Rows ``[T, L, width]`` of an item, with heads concatenated."""
    rows = item[point]
    if rows.dtype == np.int32:
        raise ConfigError(f"{run.url}: expected a point of numbers, got the ids {point}. Name another point")
    rows = rows.reshape(*rows.shape[:2], -1) if rows.ndim > 3 else rows
    if not 0 < rows.shape[2] <= _MOST_CHANNELS:
        raise FormatError(
            f"{run.url}: expected rows of 1 to {_MOST_CHANNELS} elements, got {rows.shape[2]} in {item['key']!r}. Name "
            "another point"
        )
    return rows  # type: ignore[no-any-return]


def store_statistics(run: Run, statistics: RunStatistics) -> None:
    """Store ``statistics`` with the run, one object for each layer. Replaces earlier statistics of these layers.

    Logs a warning if the earlier ones are over more tokens. States of ``TokenBatches`` with ``scaling`` are refused
    after a change.

    Raises:
        RunError: the run was removed after it was opened.
        FormatError: no reader would accept an array or a number. Nothing of its layer is stored.
        StoreError: the store failed.

    Example:
        >>> from hsx_dist.reading.statistics import compute_statistics, store_statistics
        >>> store_statistics(run, compute_statistics(run, [15], skip_first=1))
    """
    with run.place.reading():
        for own in statistics.layers.values():
            arrays = {name: base64.b64encode(getattr(own, name).astype("<f8").tobytes()).decode() for name in _ARRAYS}
            numbers = {name: getattr(own, name) for name in (*_COUNTS[:-1], *_NUMBERS)}
            body = {"run": run.id, "point": own.point, **numbers, "hidden_size": len(own.mean), **arrays}
            name, stored = statistics_name(own.layer, own.point), dump_json(body)
            parsed = parse_json(stored, floats=True)  # as a reader does
            check_members(parsed, _CHECKS, name)
            _parse(parsed, own.point, name)
            _warn_of_fewer(run, own)
            run.store.put(name, [stored])


def _warn_of_fewer(run: Run, own: LayerStatistics) -> None:
    try:
        earlier = _read(run.store, statistics_name(own.layer, own.point), run.id)
    except FormatError:  # ``own`` replaces the damaged object
        return
    if earlier is not None and earlier.tokens > own.tokens:
        log.warning(
            "statistics replaced by those of fewer tokens: point=%s layer=%d tokens=%d before=%d",
            *(own.point, own.layer, own.tokens, earlier.tokens),
        )


def read_statistics(run: Run, layers: Sequence[int] | None = None, *, point: str = HIDDEN_STATES) -> RunStatistics:
    """Read the stored statistics of ``layers`` (``None``: the run's) of ``point``. Layers without any are omitted.

    Raises:
        ConfigError: as ``Run.layers_of``.
        FormatError: an object is damaged.
        StoreError: the store failed.

    Example:
        >>> from hsx_dist.reading.statistics import read_statistics
        >>> norms = {layer: own.mean_norm for layer, own in read_statistics(run).layers.items()}
    """
    found = {}
    for layer in _layers_of(run, point) if layers is None else layer_list(layers):
        own = _read(run.store, statistics_name(layer, point), run.id)
        if own is not None:
            found[layer] = own
    return RunStatistics(found)


def stored_statistics(run: Run) -> Iterator[LayerStatistics]:
    """The stored statistics of all layers of all points, in the order of the objects' names.

    Raises:
        FormatError: an object is damaged.
    """
    for name in _names(run.store):
        own = _read(run.store, name, run.id)
        if own is not None:
            yield own


def damaged_statistics(store: Store) -> Iterator[tuple[str, str]]:
    """Name and error of each damaged statistics object in a run's ``store``."""
    for name in _names(store):
        try:
            _read(store, name)
        except FormatError as e:
            yield name, str(e)


def _names(store: Store) -> Iterator[str]:
    """Names of the objects that ``hsx stats`` stored. Other programs' objects in the folder are ignored."""
    found = OBJECTS_OF_A_RUN["statistics/"]
    return (info.name for info in store.list("statistics/") if found.fullmatch(info.name) is not None)


def _read(store: Store, name: str, run_id: str | None = None) -> LayerStatistics | None:
    """Read the object ``name``. ``None`` if it does not exist, or is of another run than ``run_id``.

    Raises:
        FormatError: the object is damaged, or its layer or point differs from its name.
    """
    body, where = find_json(store, name, _CHECKS), f"{store.url}/{name}"
    if body is None or (run_id is not None and body.get("run") != run_id):
        return None
    point, _, layer = name.removeprefix("statistics/").removesuffix(".json").rpartition("-")
    point = point or HIDDEN_STATES
    told = body.get("point", point), body.get("layer")
    if told != (point, int(layer)):
        raise FormatError(
            f"{where}: expected statistics of {point} at layer {int(layer)}, got those of {printable(told[0], 64)} at "
            f"layer {told[1]}. Run `hsx stats` again"
        )
    return _parse(body, point, where)


def _parse(body: Mapping[str, Any], point: str, where: str) -> LayerStatistics:
    try:
        arrays: dict[str, Any] = {
            name: np.frombuffer(base64.b64decode(body[name], validate=True), "<f8") for name in _ARRAYS
        }
        own = LayerStatistics(**arrays, **{name: body[name] for name in (*_COUNTS[:-1], *_NUMBERS)}, point=point)
        fine = all(len(a) == body["hidden_size"] > 0 and np.isfinite(a).all() for a in arrays.values())
        fine &= bool((own.variance >= 0).all() and (own.absmax >= 0).all()) and min(body[n] for n in _NUMBERS) >= 0
    except (KeyError, ValueError, binascii.Error) as e:
        raise FormatError(f"{where}: expected statistics of a layer, got {e!r}. Run `hsx stats` again") from e
    if not fine:
        raise FormatError(
            f"{where}: expected finite arrays of one length and no negative variance or norm, got invalid values. Run "
            "`hsx stats` again"
        )
    return own
