"""Real configurations of vLLM engines, without starting the engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def engine_config(model: Path, layer_ids: Sequence[int], **arguments: Any) -> Any:
    """vLLM's configuration of an engine that captures ``layer_ids`` of ``model``."""
    from vllm.engine.arg_utils import EngineArgs

    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
    }
    return EngineArgs(str(model), max_model_len=128, speculative_config=speculative, **arguments).create_engine_config()
