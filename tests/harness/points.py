"""Samples of several points, in the form of a run or of an object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hsx_dist.format.codecs import resolve_codec
from hsx_dist.page import token_hash
from hsx_dist.reading.run import Run
from hsx_dist.store import Store
from hsx_dist.testing.samples import RandomSample, random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import RunWriter, Stored, write_v1_run

HEAD = 8


@dataclass(frozen=True)
class PointSample:
    """``points``: name → whole rows, carrier ``[T, L, width]``. ``columns``: the stored columns, in order."""

    key: str
    token_ids: np.ndarray[Any, Any]
    points: dict[str, np.ndarray[Any, Any]]
    columns: tuple[tuple[RandomSample, dict[str, Any]], ...]

    def segments(self, row: int, cuts: Sequence[Sequence[int]] = ()) -> list[Stored]:
        """All segments for ``RunWriter.put``. ``cuts``: the tokens at which each column is cut."""
        found: list[Stored] = []
        for i, (sample, column) in enumerate(self.columns):
            facts = column | {"columns": len(self.columns), "sample_hash": token_hash(self.token_ids)}
            of = cuts[i] if i < len(cuts) else ()
            found += [(sample, replace(segment, **facts), row) for segment in sample.segments(*of)]
        return found


def point_sample(key: str, tokens: int = 37, *, hidden: bool = False, seed: int = 0, odd: bool = True) -> PointSample:
    """``q`` of two shards (layers 3, 7), ``mlp_out`` (layer 7), ``topk_ids`` (layers 3, 7), and hidden states.
    ``odd`` as in ``random_sample``."""
    q = [
        random_sample(key, tokens, layer_ids=(3, 7), hidden_size=w, seed=seed + i, odd=odd)
        for i, w in enumerate((16, 32))
    ]
    out = random_sample(key, tokens, layer_ids=(7,), hidden_size=24, dtype="float32", seed=seed, odd=odd)
    ids = np.random.default_rng(seed).integers(0, 128, (tokens, 2, 4)).astype(np.uint32)
    states = random_sample(key, tokens, layer_ids=(2, 30), hidden_size=24, seed=seed, odd=odd)
    columns = [
        (q[1], {"point": "q", "shard": 1, "shards": 2, "head": HEAD}),  # ranks may be stored in any order
        (out, {"point": "mlp_out"}),
        (q[0], {"point": "q", "shard": 0, "shards": 2, "head": HEAD}),
        (replace(q[0], states=ids, dtype="int32"), {"point": "topk_ids"}),
        *([(states, {"point": "hidden_states"})] if hidden else []),
    ]
    same = tuple(
        (replace(sample, token_ids=q[0].token_ids), column | {"column": i})
        for i, (sample, column) in enumerate(columns)
    )
    rows = {"q": np.concatenate([q[0].states, q[1].states], -1), "mlp_out": out.states, "topk_ids": ids}
    return PointSample(key, q[0].token_ids, rows | ({"hidden_states": states.states} if hidden else {}), same)


def computed_sample(
    key: str,
    token_ids: Sequence[int],
    rows: Mapping[tuple[str, int], Any],
    layers: Mapping[str, Sequence[int]],
    head: int | None = None,
) -> PointSample:
    """A model's rows as points of float32 (router choices: int32).

    Args:
        rows: as ``HookedModel.rows``.
        layers: the layers of each stored point.
        head: length of a head, for points that consist of heads.
    """
    ids = np.array(token_ids)
    dtypes = {name: "int32" if name == "topk_ids" else "float32" for name in layers}
    points = {
        name: np.stack([np.asarray(rows[name, layer], dtypes[name]) for layer in of], 1).view(np.uint32)
        for name, of in layers.items()
    }
    facts = {name: {"head": head} if name in ("q", "k", "v", "q_norm", "k_norm", "z") else {} for name in layers}
    columns = tuple(
        (RandomSample(key, points[name], ids, tuple(of), dtypes[name], 16), {"point": name, "column": i, **facts[name]})
        for i, (name, of) in enumerate(layers.items())
    )
    return PointSample(key, ids, points, columns)


def run_of(
    *parts: Sequence[Stored],
    codec: str = "split",
    store: Store | None = None,
    layers: Sequence[int] = (),
    about: Mapping[str, Any] | None = None,
    meaning: Mapping[str, Any] | None = None,
) -> Run:
    """Store a run of version 1. Each part has the given segments."""
    store = store or MemoryStore()
    write_v1_run(
        store, {"meaning": {**({"layers": list(layers)} if layers else {}), **(meaning or {})}, "settings": {}}
    )
    writer = RunWriter(store, resolve_codec(codec), about=about)
    for part in parts:
        writer.put(part)
    return Run(store)
