"""Messages between driver and replicas."""

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
    """Rows for one replica: the unit of work. If the replica dies, another one gets the rows.

    ``tries``: earlier tries of its rows. ``alone``: one row, on its last try or after its engines died. Its replica
    gets no other task, so that a crash is caused by this row.
    """

    number: int
    rows: tuple[Row, ...]
    tries: int = 0
    alone: bool = False


@dataclass(slots=True)
class TaskResult:
    """Outcomes of a task's rows: each is in exactly one of ``shipped``, ``refused``, ``skipped``.

    ``shipped`` means that the writers got all pages. Only a receipt proves that they are stored.
    """

    number: int
    shipped: list[str] = field(default_factory=list)
    refused: list[RowFate] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)  # (key, reason): the driver tries them again
    tokens: int = 0
    #: The replica's counters.
    numbers: Mapping[Series, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Settings with which a replica starts its engine and ships its pages."""

    model: str
    revision: str | None
    layers: tuple[int, ...]  # for vLLM's extraction; ``capture`` has its own layers
    engine_kwargs: Mapping[str, Any]
    sampling_params: Mapping[str, Any]
    chat_template_kwargs: Mapping[str, Any]
    vocab_size: int
    max_tokens: int  # of the longest prompt
    output: str
    codec: str | Mapping[str, Any]
    layout: str
    segment_bytes: int
    page_bytes: int
    in_flight_bytes: int
    #: Points for the taps (``taps.points.plan_capture``). None: ``layers``, by vLLM's extraction.
    capture: Mapping[str, Any] | None = None
    #: Number of ranks that ship, from rank 0. None: all ranks, in turn.
    owners: int | None = None
    #: Limit of unacknowledged bytes from one rank to writers on other nodes.
    abroad_bytes: int = ABROAD_BYTES
    rules: RowRules = field(default_factory=RowRules)
    #: Base of the sampling seeds, the same in every attempt of a run. A row's seed is derived from this seed and the
    #: row's key. Empty: vLLM chooses the seeds.
    seed: str = ""
    #: ``models.weights.folder_weights`` of the model's folders on the driver's machine, by path.
    files: Mapping[str, str] = field(default_factory=dict)
    #: ``tokenizer_hash`` and ``template_hash`` on the driver's machine. None: not compared.
    tokenizer: tuple[str, str | None] | None = None
    #: dtype of the states (``jobs.preflight.state_dtype``), the same in every attempt of a run. None: not compared.
    dtype: str | None = None

    @property
    def ranks(self) -> int:
        """Number of worker ranks of one engine. Each has a ring."""
        return int(self.engine_kwargs.get("tensor_parallel_size", 1))
