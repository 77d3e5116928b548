"""Connectors for ``kv_connector_module_path`` in benchmarks.

``NullConnector`` does nothing. ``ReferenceConnector`` is vLLM's own. ``BothConnector`` is ours, in an engine with taps
and vLLM's extraction.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
import vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector as example
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.platforms import current_platform

from hsx_dist.connector.connector import HiddenStatesConnector
from hsx_dist.vllm_patches.no_drafts import never_draft, uses_v1_runner


class _Undrafted:
    """Disables drafts on the V1 runner, as our connector does. Otherwise each decoded token is computed twice."""

    _vllm_config: Any

    def on_new_request(self, request: Any) -> None:
        if uses_v1_runner(self._vllm_config):
            never_draft(request)


class NullConnector(_Undrafted, KVConnectorBase_V1, SupportsHMA):
    """Copies nothing out of the cache. The remaining cost is vLLM's own, for writing states into the cache."""

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:  # noqa: ARG002
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ARG002
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:  # noqa: ARG002
        return False, None


class _Event:
    """A ``torch.cuda.Event`` for a device whose copies are synchronous."""

    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Stream:
    def wait_event(self, event: Any) -> None:
        pass


class _CpuCuda:
    Event = _Event
    Stream = _Stream

    @staticmethod
    def stream(_: Any) -> Any:
        return nullcontext()


class _CpuTorch:
    """torch without pinned memory and streams, for vLLM's connector on a CPU."""

    cuda = _CpuCuda

    @staticmethod
    def empty_like(tensor: torch.Tensor, *, device: str, pin_memory: bool) -> torch.Tensor:  # noqa: ARG004
        return torch.empty_like(tensor, device=device)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class ReferenceConnector(_Undrafted, example.ExampleHiddenStatesConnector):
    """vLLM's own connector. On a CPU its module uses ``_CpuTorch``, and the CPU's only cache layout."""

    def __init__(self, *args: Any, **kwargs: Any):
        if current_platform.is_cpu():
            example.torch = _CpuTorch()
        super().__init__(*args, **kwargs)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return None if current_platform.is_cpu() else super().get_required_kvcache_layout(vllm_config)

    @property
    def pending(self) -> int:
        """Number of requests, in the scheduler's or the worker's half, whose file is not yet written."""
        return len(self._pending_saves) + len(self._req_futures) + len(self._req_copy_events)


class BothConnector(_Undrafted, HiddenStatesConnector):
    """Our connector, which ships states captured by taps, in an engine that also has vLLM's extraction.

    Our connector refuses taps in an engine with a drafter, so its configuration is passed without the drafter.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any):
        seen = copy.copy(vllm_config)
        seen.speculative_config = None
        super().__init__(seen, *args, **kwargs)

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        HiddenStatesConnector.on_new_request(self, request)
