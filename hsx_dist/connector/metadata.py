"""What vLLM carries from the scheduler half to the worker halves, once a step, and back, once an engine."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from hsx_dist.connector.columns import CapturedPoint
from hsx_dist.connector.step import Step


@dataclass(slots=True)
class StepMetadata(Step, KVConnectorMetadata):
    """A step as vLLM wants it, which takes any subclass of its own."""


@dataclass(slots=True)
class CapturedMetadata(KVConnectorHandshakeMetadata):
    """What a worker rank captures by taps. vLLM hands it to the scheduler half before the first request."""

    points: tuple[CapturedPoint, ...]
