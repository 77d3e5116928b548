"""Messages from the scheduler half to the worker halves. vLLM carries them as ``StepMetadata``. Needs no vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hsx_dist.connector.columns import ONE_COLUMN, Column


@dataclass(slots=True)
class Save:
    """A finished request to store. Its cache blocks ``block_ids`` are held until its owner has copied the states."""

    request_id: str  # vLLM's
    key: str
    token_ids: np.ndarray[Any, Any]  # int64 [T]: the tokens to store
    block_ids: np.ndarray[Any, Any]  # int64: the cache blocks of the request, from its first
    owner: int  # modulo the number of storing ranks, it is the index of the rank: ``Ranks.owns``
    row: int | None = None  # the driver's number of the input row
    content: str = ""  # ``Segment.content``
    #: Positions of the tokens in the request: a range, or int64 ``[T]``; None: all from the first.
    positions: range | np.ndarray[Any, Any] | None = None
    #: All of the sample's columns, and which of them (by number) this rank copies; None: all.
    columns: tuple[Column, ...] = ONE_COLUMN
    copied: tuple[int, ...] | None = None
    #: ``Segment.sample_hash`` if not all tokens are stored; empty: the hash of the stored tokens.
    sample_hash: str = ""
    meta: dict[str, Any] = field(default_factory=dict)  # ``Segment.meta``
    metadata: str = ""  # ``Segment.metadata``
    #: ``RequestParams.id``, the id in ``Expect`` and ``Skip``; empty: the same as vLLM's.
    id: str = ""
    name: str = ""  # ``Segment.name``: the object's name, if the client chose a path
    attached: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)  # ``Segment.attached``
    #: Number of tokens, from the request's first, whose mean is stored as one float32 row; 0: a row per token.
    mean_of: int = 0


@dataclass(slots=True, frozen=True)
class Expect:
    """A request that was scheduled for the first time: its object's name, and the rank that stores it
    (``Ranks.owns``)."""

    request_id: str  # ``RequestParams.id``
    name: str
    owner: int
    chosen: bool = False  # the client chose the name, and may use it again
    request: str = ""  # the request's hash (``format.identity``), if the client chose the name


@dataclass(slots=True, frozen=True)
class Skip:
    """A finished request that stores nothing."""

    request_id: str  # ``RequestParams.id``
    key: str
    name: str
    owner: int
    reason: str
    #: The client asked for no states, or this is a repeated report: no failure marker is stored.
    quiet: bool = False
    #: The key already belongs to another sample.
    conflict: bool = False
    request: str = ""  # as in ``Expect``
    #: Numbers of the columns that this rank would have copied, and the sample's number of columns.
    columns: tuple[int, ...] = (0,)
    of: int = 1
    #: A fact of the row is the reason, so another try would store nothing either.
    final: bool = False


@dataclass(slots=True)
class Step:
    """The messages of one engine step."""

    saves: list[Save] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    expected: list[Expect] = field(default_factory=list)
    #: The step schedules no tokens: a worker may wait briefly for the ring, so that the engine does not spin.
    idle: bool = False
