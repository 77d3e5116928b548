"""Messages that vLLM carries to the worker halves at each step, and back to the scheduler half once per engine."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from hsx_dist.connector.columns import CapturedPoint
from hsx_dist.connector.step import Step


@dataclass(slots=True)
class StepMetadata(Step, KVConnectorMetadata):
    """A ``Step`` as a subclass of vLLM's ``KVConnectorMetadata``, which vLLM requires."""


@dataclass(slots=True)
class CapturedMetadata(KVConnectorHandshakeMetadata):
    """The points that a worker rank captures by taps. vLLM passes them to the scheduler half before the first
    request."""

    points: tuple[CapturedPoint, ...]
