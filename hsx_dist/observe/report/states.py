"""Numbers about the states of a few samples: norms, channels that stand out, and similarity of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from hsx_dist.page import HIDDEN_STATES
from hsx_dist.reading import Run, Sample
from hsx_dist.reading.stored import read_stored

T = TypeVar("T")
#: Limit of the bytes of states, as float32, in memory at once. Of a longer sample, only the first tokens are read.
HELD_BYTES = 128 << 20
#: Bytes of states, as float32, that are computed with at once. Results between take several times as much memory.
_BLOCK_BYTES = 8 << 20
#: Bytes of each layer's channel: its sum, mean and ratio, and the copy that a median takes; all float64.
_SUM_BYTES = 32
#: Tokens of a sample that are shown one by one.
TOKENS_SHOWN = 96
#: Number of channels that are shown.
CHANNELS_SHOWN = 16
#: Limit of the layers that are compared and drawn. Of more, which no model has, evenly spaced ones are used.
MOST_LAYERS = 256


@dataclass(frozen=True, slots=True)
class TokenNorms:
    """One sample token by token. ``norms``: Euclidean, float64 ``[T, L]``; ``token_ids``: int64 ``[T]``."""

    key: str
    num_tokens: int
    token_ids: np.ndarray[Any, Any]
    norms: np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class StateNumbers:
    """Numbers over the tokens of the samples that were read; ``L`` layers, ``H`` channels."""

    layer_ids: tuple[int, ...]
    dtype: str
    hidden_size: int
    samples: int
    tokens: int
    norms: np.ndarray[Any, Any]  # float64 [5, L]: 1st, 25th, 50th, 75th, 99th percentile, first tokens left out
    first_token: np.ndarray[Any, Any]  # float64 [L]: median norm of samples' first tokens
    channels: np.ndarray[Any, Any]  # int64 [C]: those that stand out most in some layer
    outliers: np.ndarray[Any, Any]  # float64 [C, L]: their mean magnitude over the median channel's
    similarity: np.ndarray[Any, Any]  # float64 [L, L]: mean cosine of the same token's states
    chosen: list[TokenNorms]


def spread(items: Sequence[T], n: int) -> list[T]:
    """Return ``n`` items, evenly spread over ``items``, including the first and the last."""
    if len(items) <= n:
        return list(items)
    return [items[round(i * (len(items) - 1) / max(n - 1, 1))] for i in range(n)]


def gather_states(run: Run, keys: Sequence[str], chosen: Sequence[str]) -> StateNumbers | None:
    """Read the samples ``keys`` for the numbers, and ``chosen`` token by token.

    Returns None if no sample has hidden states, or if the numbers of each layer and channel would exceed
    ``HELD_BYTES``. Leaves out samples whose parts are not stored any more, and samples whose layers or width differ
    from the first one's (a request may choose its layers).

    Raises:
        SampleNotFound: the run has no sample of a chosen key.
        StoreError, FormatError: something cannot be read.
    """
    keys = list(dict.fromkeys([*chosen, *keys]))
    samples = [run[key] for key in keys]
    facts = read_stored(samples, lambda s: (s.layer_ids, s.hidden_size, s.dtype) if HIDDEN_STATES in s.points else None)
    first = next(filter(None, facts), None)
    if first is None:
        return None
    every_layer, hidden, dtype = first
    layers = tuple(spread(every_layer, MOST_LAYERS))
    if not layers or len(layers) * hidden * _SUM_BYTES > HELD_BYTES:
        return None
    sums = _Sums(layers, hidden)
    shown: list[TokenNorms] = []

    def read(sample: Sample) -> tuple[Sample, np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
        if HIDDEN_STATES not in sample.points or (sample.layer_ids, sample.hidden_size) != (every_layer, hidden):
            return None
        states, ids = _load(sample, layers, len(samples))
        return sample, sums.add(states), ids  # not the states, which would be held until the next are read

    for sample, norm, ids in filter(None, read_stored(samples, read)):
        key = sample.key
        if key in chosen:
            shown.append(TokenNorms(key, sample.num_tokens, ids[:TOKENS_SHOWN], norm[:TOKENS_SHOWN].astype(np.float64)))
    if not sums.begins:
        return None
    return sums.numbers(dtype, sorted(shown, key=lambda s: list(chosen).index(s.key)))


class _Sums:
    """Sums over the added samples, from which ``StateNumbers`` are computed."""

    def __init__(self, layers: tuple[int, ...], hidden: int):
        self._layers, self._hidden = layers, hidden
        self.begins: list[np.ndarray[Any, Any]] = []  # norms of first tokens
        self._norms: list[np.ndarray[Any, Any]] = []
        self._magnitude = np.zeros((len(layers), hidden))
        self._cosines = np.zeros((len(layers), len(layers)))
        self._tokens = 0

    def add(self, states: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Add a sample's states. Return their norms ``[T, L]``."""
        # The first token of nearly every model is a sink whose norm is a hundred times the others'.
        first = _norms(states[:1])
        self.begins.append(first[0])
        step = max(_BLOCK_BYTES // states[0].nbytes, 1)
        return np.concatenate([first, *(self._add(states[at : at + step]) for at in range(1, len(states), step))])

    def _add(self, states: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Add some tokens' states. Return their norms."""
        norm = _norms(states)
        rest = np.isfinite(norm).all(axis=1)  # other rows are only shown
        self._norms.append(norm[rest])
        states = states[rest]
        self._magnitude += np.abs(states).sum(axis=0, dtype=np.float64)
        unit = states / np.maximum(norm[rest], 1e-30)[:, :, None]
        # One product per block, [L, T * H] by [T * H, L]: a product per token would hold [T, L, L] at once.
        flat = unit.transpose(1, 0, 2).reshape(len(self._layers), -1)
        self._cosines += flat @ flat.T
        self._tokens += len(states)
        return norm

    def numbers(self, dtype: str, chosen: list[TokenNorms]) -> StateNumbers:
        tokens = max(self._tokens, 1)
        every = np.concatenate(self._norms) if self._tokens else np.zeros((1, len(self._layers)))
        channels, outliers = _outliers(self._magnitude / tokens)
        return StateNumbers(
            layer_ids=self._layers,
            dtype=dtype,
            hidden_size=self._hidden,
            samples=len(self.begins),
            tokens=self._tokens,
            norms=np.percentile(every, [1, 25, 50, 75, 99], axis=0),
            first_token=np.median(np.stack(self.begins), axis=0),
            channels=channels,
            outliers=outliers,
            similarity=self._cosines / tokens,
            chosen=chosen,
        )


def _norms(states: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with np.errstate(over="ignore", invalid="ignore"):  # of rows that are not finite
        norm: np.ndarray[Any, Any] = np.linalg.norm(states, axis=2)
    return norm


def _load(sample: Sample, layers: Sequence[int], samples: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """float32 ``[T, L, H]`` and int64 ``[T]`` of the sample's first tokens. The norms of ``samples`` are held."""
    token_bytes = len(layers) * 4 * max(sample.hidden_size, samples)
    data = sample.load(layers, tokens=(0, max(HELD_BYTES // token_bytes, 1)), framework="numpy")
    return np.asarray(data["hidden_states"], np.float32), data["token_ids"]


def _outliers(mean: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Channels, int64 ``[C]``, and their mean magnitude over that of the layer's median channel, float64 ``[C, L]``."""
    ratio = mean / np.maximum(np.median(mean, axis=1, keepdims=True), 1e-30)  # [L, H]
    most = np.argsort(-ratio.max(axis=0), kind="stable")[:CHANNELS_SHOWN]
    return most, ratio[:, most].T
