"""What the scheduler half tells the worker halves. ``StepMetadata`` is what vLLM carries of it; this needs no vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hsx_dist.connector.columns import ONE_COLUMN, Column


@dataclass(slots=True)
class Save:
    """One finished request whose states lie in ``block_ids``, held until its owner has copied them."""

    request_id: str  # vLLM's
    key: str
    token_ids: np.ndarray[Any, Any]  # int64 [T]: the tokens to store
    block_ids: np.ndarray[Any, Any]  # int64: the cache blocks of the request, from its first
    owner: int  # counts the ranks that store, modulo their number: ``Ranks.owns``
    row: int | None = None  # the input row, as the driver counts
    #: Where the tokens stand in the request: a range, or int64 ``[T]``; None: all from the first.
    positions: range | np.ndarray[Any, Any] | None = None
    #: All of the sample's columns, and which of them (by number) this rank copies; None: all.
    columns: tuple[Column, ...] = ONE_COLUMN
    copied: tuple[int, ...] | None = None
    #: ``Segment.sample_hash`` where not all tokens are stored; empty: that of the stored ones.
    sample_hash: str = ""
    meta: dict[str, Any] = field(default_factory=dict)  # ``Segment.meta``
    metadata: str = ""  # ``Segment.metadata``
    #: What ``Expect`` and ``Skip`` call the request: ``RequestParams.id``; empty: the same as vLLM's.
    id: str = ""
    name: str = ""  # ``Segment.name``: the object's, where the client chose a path
    attached: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)  # ``Segment.attached``
    #: Over so many tokens, from the request's first, the mean is stored as one float32 row; 0: the tokens' own rows.
    mean_of: int = 0


@dataclass(slots=True, frozen=True)
class Expect:
    """A request that was scheduled for the first time: where its sample will lie, and which rank will store it
    (``Ranks.owns``)."""

    request_id: str  # ``RequestParams.id``
    name: str
    owner: int
    chosen: bool = False  # the client chose the name, and may use it again
    request: str = ""  # its hash (``format.identity``), where the client chose the name


@dataclass(slots=True, frozen=True)
class Skip:
    """A finished request of which nothing is stored."""

    request_id: str  # ``RequestParams.id``
    key: str
    name: str
    owner: int
    reason: str
    #: The client did not ask for it, or it is not the first time: no failure to tell.
    quiet: bool = False
    #: Its key stands for another sample already.
    conflict: bool = False
    request: str = ""  # as in ``Expect``
    #: The numbers of the columns that would have been copied, and how many the sample would have.
    columns: tuple[int, ...] = (0,)
    of: int = 1


@dataclass(slots=True)
class Step:
    """What there is to say of one step of the engine."""

    saves: list[Save] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    expected: list[Expect] = field(default_factory=list)
    #: The step schedules no tokens: a worker may wait a moment for the ring instead of letting the engine spin.
    idle: bool = False
