"""Another connector for vLLM's ``MultiConnector``: it offers all tokens of each prompt, and writes no hidden states."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA


class NoMetadata(KVConnectorMetadata): ...


class LoadingConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._late = bool(self._kv_transfer_config.kv_connector_extra_config.get("async"))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = request.num_tokens - 1 - num_computed_tokens
        return tokens, self._late and tokens > 0

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        return False, None

    request_finished_all_groups = request_finished

    def build_connector_meta(self, scheduler_output: Any) -> NoMetadata:  # noqa: ARG002
        return NoMetadata()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...
    def start_load_kv(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...
