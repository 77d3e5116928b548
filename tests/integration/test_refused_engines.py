"""Engines that would store wrong states do not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from hsx_dist.errors import ConfigError

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_an_engine_that_captures_a_layer_that_the_model_does_not_have(
    tiny_model_path: Path, tmp_path: Path, monkeypatch
):
    """vLLM alone starts, and stores the states of layer 1 as those of layer 99, too."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with pytest.raises(ConfigError, match=r"layer ids from 0 to 4 .*, got \[1, 99\]"):
        LLM(
            str(tiny_model_path),
            max_model_len=128,
            enforce_eager=True,
            dtype="float32",
            block_size=32,
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 99]}},
            },
            kv_transfer_config={
                "kv_connector": "HiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
            },
        )
    # The refused engine leaves its groups of ranks in this process. The next engine here would use them, and a model
    # with experts would find no group for these.
    cleanup_dist_env_and_memory()
