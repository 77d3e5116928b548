"""Models whose cache is no Llama's: a sliding window beside full attention, and MLA; random weights, real engines.

What is stored is held against what the model's layers were given in the engine itself: that kernels compute what
transformers computes is theirs to prove, and vLLM's MLA on a CPU does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hsx_dist
from hsx_dist.connector.flush import flush
from hsx_dist.isa import avoid_broken_amx
from hsx_dist.testing.models import write_tiny_tokenizer

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # the usual 0.02 leaves every layer's output almost equal to its input
}


def sliding_window(vocab_size: int) -> Any:
    """Every other layer sees 64 tokens only."""
    from transformers import MinistralConfig, MinistralForCausalLM

    kinds = ["sliding_attention", "full_attention"] * 2
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    return MinistralForCausalLM(
        MinistralConfig(vocab_size=vocab_size, sliding_window=64, layer_types=kinds, **heads, **SIZES)
    )


def latent_attention(vocab_size: int) -> Any:
    """DeepSeek-V2 with dense layers. The latent's size is the one that vLLM's CPU kernel is compiled for."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": None}
    heads |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 4}
    return DeepseekV2ForCausalLM(DeepseekV2Config(vocab_size=vocab_size, **heads, **experts, **SIZES))


@pytest.mark.parametrize(
    ("make", "layers", "groups", "arguments"),
    [
        # vLLM runs a Ministral as the Llama that it is but for its window.
        (sliding_window, (0, 2, 4), 3, {"hf_overrides": {"architectures": ["LlamaForCausalLM"]}}),
        # Not layer 0, where vLLM adds a residual that is not there yet. One group of one kind holds all, a CPU takes
        # prompts whole.
        (latent_attention, (1, 2, 4), 1, {"max_num_batched_tokens": 512, "attention_backend": "CPU_MLA"}),
    ],
    ids=["sliding window", "MLA"],
)
def test_hidden_states_are_found_among_caches_of_other_kinds(
    make: Callable[[int], Any], layers: tuple[int, ...], groups: int, arguments: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    avoid_broken_amx()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM
    from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

    model = tmp_path / "model"
    model.mkdir()
    size = write_tiny_tokenizer(model, 512, 512)
    torch.manual_seed(0)
    make(size).save_pretrained(model)
    llm = LLM(
        str(model),
        dtype="float32",
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
        (seen,) = llm.apply_model(partial(watch, layers=layers))
        for batch in (prompts, *([p] for p in prompts)):
            for rows in seen.values():
                rows.clear()
            llm.reset_prefix_cache()
            for prompt, path in zip(batch, generate(llm, batch), strict=True):
                stored = hsx_dist.load_hidden_states(path, framework="torch")
                assert stored["token_ids"].tolist() == prompt
                check(stored["hidden_states"], [torch.cat(seen[layer]) for layer in layers], alone=len(batch) == 1)
    finally:
        llm.llm_engine.engine_core.shutdown()


def check(states: torch.Tensor, seen: list[torch.Tensor], *, alone: bool) -> None:
    """``states`` ``[T, L, H]`` are rows of what each layer was given, ``seen`` ``[N, H]``: of one and the same batch
    position for all layers, and in order where there was one prompt alone."""
    if alone:
        assert torch.equal(states, torch.stack(seen, 1)[: len(states)])
        return
    deep = [i for i, rows in enumerate(seen) if len(rows.unique(dim=0)) == len(rows)]
    assert deep  # embeddings of one token are alike, what attention has mixed is not
    at = (states[:, None, deep[0]] == seen[deep[0]][None]).all(-1).int().argmax(1)
    assert len(at.unique()) == len(at)
    for i, rows in enumerate(seen):
        assert torch.equal(states[:, i], rows[at])


def generate(llm: Any, prompts: list[list[int]]) -> list[str]:
    from vllm import SamplingParams

    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(max_tokens=1), use_tqdm=False)
    flush(llm)
    return [output.kv_transfer_params["hidden_states_path"] for output in outputs]


def watch(model: Any, layers: Sequence[int]) -> dict[int, list[torch.Tensor]]:
    """By layer id what from now on enters that layer, or, of the last one, the final norm: ``[n, H]`` a step."""
    seen: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
    inner = model.model
    for layer in layers:
        module = inner.layers[layer] if layer < len(inner.layers) else inner.norm

        def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], layer: int = layer) -> None:
            given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.is_floating_point()]
            seen[layer].append(sum(given[1:], given[0]).clone())  # the stream comes in two addends

        module.register_forward_pre_hook(note, with_kwargs=True)
    return seen
