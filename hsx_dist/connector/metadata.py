"""What the scheduler half tells the worker halves, once a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass(slots=True)
class Save:
    """One finished request whose states lie in ``block_ids``, held until its owner has copied them."""

    request_id: str
    key: str
    token_ids: np.ndarray[Any, Any]  # int64 [T]: the tokens to store, from the request's first
    block_ids: np.ndarray[Any, Any]  # int64 [ceil(T / block_size)]
    owner: int  # the tensor-parallel rank that copies, ships and reports
    row: int | None = None  # the input row, as the driver counts


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    saves: list[Save] = field(default_factory=list)
    #: (key, reason) of finished requests that have nothing whole to store.
    skipped: list[tuple[str, str]] = field(default_factory=list)
    #: The step schedules no tokens: a worker may wait a moment for the ring instead of letting the engine spin.
    idle: bool = False
