"""The points that an engine captures, and the columns of a sample made from them. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hsx_dist.page import HIDDEN_STATES


@dataclass(frozen=True, slots=True)
class CapturedPoint:
    """A point in the cache of one rank.

    Attributes:
        layers: layer ids, in the order of the cache's layer axis.
        width: length of this rank's row.
        dtype: torch's name.
        head: length of a head, if a row consists of heads; else 0.
        shard: index of the part of the row that this rank stores; None: an earlier rank has the same numbers.
        shards: number of parts of the whole row. With one, every rank has the row, and the sample's owner stores it.
    """

    name: str
    layers: tuple[int, ...]
    width: int
    dtype: str
    head: int = 0
    shard: int | None = 0
    shards: int = 1


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a sample, before it is copied. ``layers``: entries of the cache's layer axis, in this order; None:
    all."""

    point: str = HIDDEN_STATES
    layers: tuple[int, ...] | None = None
    shard: int = 0
    shards: int = 1


#: Columns of a sample that has only hidden states, with all captured layers.
ONE_COLUMN = (Column(),)


def columns_of(chosen: Mapping[str, tuple[int, ...]], captured: Iterable[CapturedPoint]) -> tuple[Column, ...]:
    """Return the columns of a sample, in the order of ``captured``.

    Args:
        chosen: for each point its layer ids, all of them captured.
        captured: the points of any rank: name, layers and shards are the same on all ranks.
    """
    columns = []
    for point in captured:
        if point.name not in chosen:
            continue
        wanted = chosen[point.name]
        layers = None if wanted == point.layers else tuple(point.layers.index(layer) for layer in wanted)
        columns += [Column(point.name, layers, shard, point.shards) for shard in range(point.shards)]
    return tuple(columns)
