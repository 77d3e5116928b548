"""Every family's final norm and logits, against the classes of transformers, with tiny random models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hsx_dist.errors import ConfigError
from hsx_dist.model_parts.end_rules import END_RULES, end_rule
from hsx_dist.model_parts.model_end import ModelEnd
from hsx_dist.reading import Run
from hsx_dist.testing.samples import random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import store_run

#: Used if a family's configuration has the member. No value is a default, which could hide a wrong rule.
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "intermediate_size_mlp": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "topk_group": 1,
    "n_group": 1,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 16,
    "rms_norm_eps": 0.05,
    "logits_scaling": 3.0,
    "final_logit_softcapping": 2.0,
}
#: Families that derive the head size, or refuse another.
HEADS = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite"}


def tiny(family: str) -> Any:
    """A random model of two layers. The final norm changes its input."""
    kind = CONFIG_MAPPING[family]
    usual = kind()
    names = dir(usual)
    sizes = {name: value for name, value in SMALL.items() if name in names}
    if "head_dim" in names and family not in HEADS:
        sizes["head_dim"] = 16
    if family == "mimo_v2_flash":
        sizes["num_attention_heads"] = 4  # a multiple of the key heads
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**sizes), attn_implementation="eager").float().eval()
    norm, head = model.model.norm, model.get_output_embeddings()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, len(norm.weight)).bfloat16())
        head.weight.mul_(5)
    return model


@pytest.mark.parametrize("family", sorted(END_RULES))
def test_norm_and_log_probabilities_equal_those_of_the_model(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    last: list[torch.Tensor] = []
    model.model.layers[-1].register_forward_hook(
        lambda _, __, out: last.append(out if torch.is_tensor(out) else out[0])
    )
    with torch.inference_mode():
        logits = model(input_ids=torch.arange(3, 15)[None], use_cache=False).logits[0].float()
    model.save_pretrained(tmp_path)
    end = ModelEnd(None, str(tmp_path))
    got = torch.cat(list(end.logits(last[0][0])))
    torch.testing.assert_close(got, logits, atol=1e-5, rtol=1e-5)
    ids, logprobs = end.top_k(last[0][0], 5)
    right = torch.log_softmax(logits, -1)
    torch.testing.assert_close(logprobs, right.topk(5).values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(right.gather(1, ids), logprobs, atol=1e-5, rtol=1e-5)
    x = torch.randn(50, 32).bfloat16()
    with torch.inference_mode():
        assert torch.equal(end.norm(x), model.model.norm.bfloat16()(x))


@pytest.mark.parametrize("family", ["gemma3n_text", "cohere2_moe", "falcon_h1", "deepseek_v4", "gemma9", None])
def test_model_families_without_a_tested_end_are_refused(family: str | None) -> None:
    with pytest.raises(ConfigError, match=f"got model_type {family!r}. Export to vllm or speculators"):
        end_rule("m", family)


def test_a_head_under_another_name_is_not_replaced_by_the_embeddings(tmp_path: Path) -> None:
    """A quantized head has other tensors. Logits of the embeddings would be wrong without an error."""
    tensors = {"model.norm.weight": torch.ones(8), "model.embed_tokens.weight": torch.ones(4, 8)}
    save_file({**tensors, "lm_head.weight_packed": torch.ones(4, 2)}, tmp_path / "model.safetensors")
    config = {"model_type": "qwen2", "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert next(iter(ModelEnd(None, str(tmp_path)).logits(torch.ones(1, 8)))).shape == (1, 4)
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):
        next(iter(ModelEnd(None, str(tmp_path)).logits(torch.ones(1, 8))))


@pytest.mark.parametrize("argument", ["hf_overrides", "hf_config_path"])
def test_a_run_with_another_configuration_than_its_models_is_refused(argument: str) -> None:
    store = MemoryStore()
    meaning = {"model": "builtin:smollm2-135m-instruct", "layers": [2], "engine_kwargs": {argument: "x"}}
    store_run(store, [random_sample("a", 3, layer_ids=(2,))], info={"meaning": meaning})
    with pytest.raises(ConfigError, match=f"expected a run with its model's unchanged configuration, got .*{argument}"):
        ModelEnd(Run(store))
