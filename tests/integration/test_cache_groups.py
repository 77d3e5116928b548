"""Models with other caches than Llama's: a sliding window or linear attention next to full attention, and MLA.

Random weights, real engines. The last layer, normed and projected, must give vLLM's log-probabilities. Except with MLA,
each layer is also compared with transformers. transformers' DeepSeek-V2 differs from vLLM's from the second token on,
in log-probabilities, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hsx_dist
from hsx_dist.connector.flush import flush
from hsx_dist.isa import avoid_amx
from hsx_dist.models.tiny import write_tiny_tokenizer
from tests.integration.oracle import Oracle

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # with the usual 0.02 every layer's output would almost equal its input
}


def sliding_window(vocab_size: int) -> Any:
    """Every second layer has a window of 64 tokens."""
    from transformers import MinistralConfig, MinistralForCausalLM

    kinds = ["sliding_attention", "full_attention"] * 2
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    return MinistralForCausalLM(
        MinistralConfig(vocab_size=vocab_size, sliding_window=64, layer_types=kinds, **heads, **SIZES)
    )


def latent_attention(vocab_size: int) -> Any:
    """DeepSeek-V2 with dense layers. vLLM's CPU kernel is compiled for this latent size only."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": None}
    heads |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 4}
    return DeepseekV2ForCausalLM(DeepseekV2Config(vocab_size=vocab_size, **heads, **experts, **SIZES))


def linear_attention(vocab_size: int) -> Any:
    """Qwen3-Next: three layers with gated delta nets, one with full attention. vLLM requires a layer with experts. Each
    token uses both experts, so that rounding cannot change the choice.
    """
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    heads |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    heads |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    experts = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    experts |= {"shared_expert_intermediate_size": 64, "mlp_only_layers": [0, 1, 2]}
    return Qwen3NextForCausalLM(Qwen3NextConfig(vocab_size=vocab_size, **heads, **experts, **SIZES))


@pytest.mark.parametrize(
    ("make", "dtype", "layers", "groups", "compared", "arguments"),
    [
        # vLLM runs a Ministral as a Llama with a sliding window.
        (sliding_window, "float32", (0, 2, 4), 3, True, {"hf_overrides": {"architectures": ["LlamaForCausalLM"]}}),
        # Without layer 0: vLLM adds a residual there that does not exist yet. There is one cache group of one kind, and
        # a CPU prefills whole prompts.
        (
            latent_attention,
            "float32",
            (1, 2, 4),
            1,
            False,
            {"max_num_batched_tokens": 512, "attention_backend": "CPU_MLA"},
        ),
        # On a CPU vLLM's gated delta nets run in bfloat16 only, and their prefix cache needs Triton.
        (linear_attention, "bfloat16", (0, 2, 4), 5, True, {"enable_prefix_caching": False}),
    ],
    ids=["sliding window", "MLA", "linear attention"],
)
def test_hidden_states_are_found_among_caches_of_other_kinds(
    make: Callable[[int], Any], dtype: str, layers: tuple[int, ...], groups: int, compared: bool,
    arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    import torch

    avoid_amx()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams
    from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

    model = tmp_path / "model"
    model.mkdir()
    size = write_tiny_tokenizer(model, 512, 512)
    torch.manual_seed(0)
    weights = make(size).eval()
    weights.save_pretrained(model)
    llm = LLM(
        str(model),
        dtype=dtype,
        max_model_len=256,
        enforce_eager=True,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
        },
        kv_transfer_config={
            "kv_connector": "HiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "states")},
        },
        **{"max_num_batched_tokens": 64, **arguments},
    )
    try:
        specs = [
            g.kv_cache_spec for g in llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
        ]
        assert len(specs) == groups
        assert sum(isinstance(s, HiddenStateCacheSpec) for s in specs) == (groups > 1)
        rng = np.random.default_rng(7)
        prompts = [rng.integers(3, 300, n).tolist() for n in (1, 33, 100, 255, 64)]
        told = SamplingParams(max_tokens=1, prompt_logprobs=3, logprobs=3)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], told, use_tqdm=False)
        flush(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
    oracle = Oracle(model, getattr(torch, dtype))
    # bfloat16's rounding changes up to 5 % of a layer and 37 % of a row. Another token's row differs by over 100 %.
    of_logprobs, of_layers, of_rows = (1e-3, 1e-3, 1e-3) if dtype == "float32" else (0.05, 0.1, 0.6)
    for prompt, output in zip(prompts, outputs, strict=True):
        data = hsx_dist.load_hidden_states(output.kv_transfer_params["hidden_states_path"], framework="torch")
        assert data["token_ids"].tolist() == prompt
        with torch.inference_mode():
            last = weights.lm_head(weights.model.norm(data["hidden_states"][:, -1].float())).log_softmax(-1)
        after = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]  # of the token after each row
        for row, theirs in zip(last, after, strict=True):
            for token, its in theirs.items():
                assert float(row[token]) == pytest.approx(its.logprob, abs=of_logprobs)
        if compared or len(prompt) == 1:
            errors = oracle.errors(prompt, data["hidden_states"], layers)
            assert all(layer < of_layers and row < of_rows for layer, row in errors.values()), errors
