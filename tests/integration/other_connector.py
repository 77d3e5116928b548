"""Another connector for vLLM's ``MultiConnector``: it keeps every finished request's blocks for a few steps.

Its ``get_finished_count`` is the base class's, None: vLLM waits for the reports of all ranks.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA


class OtherMetadata(KVConnectorMetadata):
    def __init__(self, finished: list[str]):
        self.finished = finished


class OtherConnector(KVConnectorBase_V1, SupportsHMA):
    STEPS = 3

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._finished: list[str] = []
        self._waiting: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:  # noqa: ARG002
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> OtherMetadata:  # noqa: ARG002
        told, self._finished = self._finished, []
        return OtherMetadata(told)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        self._finished.append(request.request_id)
        return True, {"other": "was here"}

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return bool(self._finished)

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        if self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            assert isinstance(metadata, OtherMetadata)
            self._waiting.update(dict.fromkeys(metadata.finished, self.STEPS))
        self._waiting = {r: n - 1 for r, n in self._waiting.items()}
        done = {r for r, n in self._waiting.items() if n <= 0}
        for r in done:
            del self._waiting[r]
        return done or None, None
