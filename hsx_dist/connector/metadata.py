"""What vLLM carries from the scheduler half to the worker halves, once a step."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from hsx_dist.connector.step import Step


@dataclass(slots=True)
class StepMetadata(Step, KVConnectorMetadata):
    """A step as vLLM wants it, which takes any subclass of its own."""
