"""The scheduler half: judges what is whole, names it, holds its blocks, and tells the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hsx_dist.connector.metadata import Save, StepMetadata
from hsx_dist.connector.settings import ConnectorSettings
from hsx_dist.page import object_name

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class SchedulerHalf:
    """State of the connector in the scheduler's process."""

    def __init__(
        self,
        settings: ConnectorSettings,
        *,
        block_size: int,
        tensor_parallel_size: int,
        layer_ids: tuple[int, ...],
        dtype: str,
        hidden_size: int,
    ):
        self._settings = settings
        self._block_size = block_size
        self._tp = tensor_parallel_size
        self._layer_ids = layer_ids
        self._dtype = dtype
        self._hidden_size = hidden_size
        self._next = StepMetadata()
        self._sequence = 0
        #: Requests whose blocks we hold: told True, not yet reported by their owner.
        self._held: set[str] = set()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Called once a request, whatever its end. What is whole is decided by the tokens that were computed, never
        by the request's status: a stop string looks like a client that hung up."""
        params = request.kv_transfer_params or {}
        key = str(params.get("hidden_states_key") or request.request_id)
        tokens, reason = self._wanted(request, params)
        # Tokens of a step that is still in flight are counted as computed already; their states may not be written yet.
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        if reason is None and computed < len(tokens):
            reason = f"computed {max(computed, 0)} of {len(tokens)} tokens ({request.status.name})"
        blocks = -(-len(tokens) // self._block_size)
        if reason is None and len(block_ids) < blocks:
            reason = f"has {len(block_ids)} cache blocks of {blocks}"
        if reason is not None:
            self._next.skipped.append((key, reason))
            return False, None
        self._next.saves.append(
            Save(
                request_id=request.request_id,
                key=key,
                token_ids=tokens,
                block_ids=np.asarray(block_ids[:blocks], dtype=np.int64),
                owner=self._sequence % self._tp,
                row=params.get("hidden_states_row"),
            )
        )
        self._sequence += 1
        self._held.add(request.request_id)
        return True, self._answer(key, len(tokens))

    def _wanted(self, request: Request, params: dict[str, Any]) -> tuple[np.ndarray[Any, Any], str | None]:
        """The tokens whose states are wanted (int64), and why there are none."""
        prompt = request.prompt_token_ids
        if not prompt:
            return np.empty(0, np.int64), "the prompt came as embeddings: no token ids label its states"
        if params.get("include_output_tokens", self._settings.include_output_tokens):
            # The last token was sampled but never an input: it has no state.
            return np.asarray(request.all_token_ids[:-1], dtype=np.int64), None
        return np.asarray(prompt, dtype=np.int64), None

    def _answer(self, key: str, num_tokens: int) -> dict[str, Any]:
        base = self._settings.output.rstrip("/")
        one_object = self._settings.layout == "sample" and self._settings.via == "store"
        return {
            "hidden_states_path": f"{base}/{object_name(key)}.safetensors" if one_object else base,
            "hidden_states_key": key,
            "hidden_states_meta": {
                "shape": [num_tokens, len(self._layer_ids), self._hidden_size],
                "dtype": self._dtype,
                "layer_ids": list(self._layer_ids),
                "codec": self._settings.codec,
            },
        }

    def build_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        meta, self._next = self._next, StepMetadata()
        meta.idle = scheduler_output.total_num_scheduled_tokens == 0
        return meta

    def copies_done(self, request_ids: set[str]) -> None:
        self._held -= request_ids

    @property
    def holds_blocks(self) -> bool:
        """Blocks will come free without preempting anybody."""
        return bool(self._held)
