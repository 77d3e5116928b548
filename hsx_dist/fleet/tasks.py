"""What driver and replicas say to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hsx_dist.format.manifest import RowFate
from hsx_dist.inputs.encode import RowRules
from hsx_dist.inputs.rows import Row
from hsx_dist.observe.metrics import Series
from hsx_dist.writers.base import ABROAD_BYTES


@dataclass(frozen=True, slots=True)
class Task:
    """Rows for one replica: the unit of work that is handed out, and again when its replica dies.

    ``tries``: how often its rows were tried before. ``alone``: one row, on its last try; its replica is given nothing
    beside it, so that whatever happens is its doing.
    """

    number: int
    rows: tuple[Row, ...]
    tries: int = 0
    alone: bool = False


@dataclass(slots=True)
class TaskResult:
    """What became of a task's rows: each is in exactly one of ``shipped``, ``refused``, ``skipped``.

    ``shipped`` says only that the writers were handed everything; a receipt says that it is stored.
    """

    number: int
    shipped: list[str] = field(default_factory=list)
    refused: list[RowFate] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)  # (key, reason): worth another try
    tokens: int = 0
    #: What the replica has counted since its last answer.
    numbers: Mapping[Series, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What a replica needs to start its engine, and to ship what comes out of it."""

    model: str
    revision: str | None
    layers: tuple[int, ...]  # for vLLM's extraction; with ``capture`` they are in it
    engine_kwargs: Mapping[str, Any]
    sampling_params: Mapping[str, Any]
    chat_template_kwargs: Mapping[str, Any]
    vocab_size: int
    max_tokens: int  # the longest prompt that the engine takes
    output: str
    codec: str | Mapping[str, Any]
    layout: str
    segment_bytes: int
    page_bytes: int
    in_flight_bytes: int
    #: What taps capture (``taps.points.plan_capture``); None: ``layers``, by vLLM's extraction.
    capture: Mapping[str, Any] | None = None
    #: Ranks that ship, from 0; None: all of them, in turn.
    owners: int | None = None
    #: What each of them may have at other nodes' writers at once.
    abroad_bytes: int = ABROAD_BYTES
    rules: RowRules = field(default_factory=RowRules)
    #: What seeds are made of, with a row's key: the same for every attempt of a run. Empty: vLLM's own choice.
    seed: str = ""

    @property
    def ranks(self) -> int:
        """Worker ranks of one engine, each with a ring of its own."""
        return int(self.engine_kwargs.get("tensor_parallel_size", 1))
