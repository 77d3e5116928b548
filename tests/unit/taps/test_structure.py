"""Modules are found by their members. An unsuitable model is refused with an error that names the expected module."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from hsx_dist.errors import ConfigError
from hsx_dist.taps.structure import find_structure

HIDDEN, HEADS, KV_HEADS, DIM, INNER = 64, 4, 2, 32, 96


class RMSNorm(nn.LayerNorm):
    pass


class UnquantizedLinearMethod:
    pass


def module(**attributes: Any) -> Any:
    made = nn.Module()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def linear(into: int, out: int, **attributes: Any) -> Any:
    return module(
        input_size_per_partition=into,
        output_size=out,
        output_size_per_partition=out,
        reduce_results=True,
        quant_method=UnquantizedLinearMethod(),
        **attributes,
    )


def attention() -> Any:
    qkv = linear(HIDDEN, (HEADS + 2 * KV_HEADS) * DIM, num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=DIM)
    return module(qkv_proj=qkv, o_proj=linear(HEADS * DIM, HIDDEN), attn=module(sliding_window=None))


def dense() -> Any:
    return module(down_proj=linear(INNER, HIDDEN))


def moe() -> Any:
    router = SimpleNamespace(select_experts=lambda: None)
    experts = module(router=router, moe_config=SimpleNamespace(experts_per_token=2), is_monolithic=False)
    return module(gate=linear(HIDDEN, 8), experts=experts)


def layer(mlp: Callable[[], Any]) -> Any:
    norms = {name: RMSNorm(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")}
    return module(self_attn=attention(), mlp=mlp(), **norms)


def model(*mlps: Callable[[], Any]) -> Any:
    layers = nn.ModuleList(layer(mlp) for mlp in mlps or (dense, dense))
    return module(model=module(layers=layers, embed_tokens=nn.Module(), norm=RMSNorm(HIDDEN)))


def test_points_widths_and_columns() -> None:
    found = find_structure(model(dense, moe), HIDDEN)
    assert found.num_layers == 2
    assert found.has["mlp_post"] == {0}
    assert found.has["topk_ids"] == found.has["router_logits"] == {1}
    assert found.has["z"] == {0, 1}
    assert "q_norm" not in found.has
    reads = {point: layers[min(layers)] for point, layers in found.reads.items()}
    columns = {point: (r.start, r.width) for point, r in reads.items()}
    assert [columns[p] for p in "qkv"] == [(0, 128), (128, 64), (192, 64)]
    assert columns["mlp_post"] == (0, INNER)
    assert columns["topk_ids"] == (0, 2)
    assert reads["q"].head == DIM
    assert reads["attn_out"].head is None


def test_the_stream_after_the_last_layer_is_the_last_of_the_hidden_states() -> None:
    one = model()
    found = find_structure(one, HIDDEN)
    norms = [one.model.layers[0].input_layernorm, one.model.layers[1].input_layernorm, one.model.norm]
    assert {i: read.module for i, read in found.reads["hidden_states"].items()} == dict(enumerate(norms))
    assert found.has["resid_pre"] == {0, 1}


def test_embeddings_that_are_computed_before_the_model_are_no_point() -> None:
    found = find_structure(model(), HIDDEN, embeds_first=True)
    assert "embed" not in found.has  # presets omit it
    assert "no prompt embeddings" in found.refused["embed"]
    assert found.has["resid_pre"] == {0, 1}


def test_norms_of_heads_are_points() -> None:
    one = model()
    for each in one.model.layers:
        each.self_attn.q_norm, each.self_attn.k_norm = RMSNorm(DIM), RMSNorm(DIM)
    reads = find_structure(one, HIDDEN).reads
    assert (reads["q_norm"][1].width, reads["k_norm"][1].width) == (128, 64)
    for each in one.model.layers:  # OLMoE: over all heads, which several ranks gather
        each.self_attn.q_norm = RMSNorm(HEADS * DIM)
    found = find_structure(one, HIDDEN)
    assert "q_norm" not in found.reads
    assert "expected a norm of each head, 32 numbers, got one of (128,)" in found.refused["q_norm"]
    assert found.has["k_norm"] == {0, 1}


def _without(path: str) -> Callable[[Any], None]:
    def change(one: Any) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            one = one[int(parent)] if parent.isdigit() else getattr(one, parent)
        delattr(one, name)

    return change


def _set(path: str, value: Any) -> Callable[[Any], None]:
    def change(one: Any) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            one = one[int(parent)] if parent.isdigit() else getattr(one, parent)
        setattr(one, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("model.layers"), "one module with layers, got 0"),
        (_without("model.norm"), "a module norm"),
        (_without("model.layers.1.self_attn.qkv_proj"), "one attention module with qkv_proj, o_proj, attn in layer 1"),
        (_without("model.layers.0.input_layernorm"), "the norms input_layernorm and"),
        (_set("model.layers.0.post_feedforward_layernorm", RMSNorm(HIDDEN)), "the norms input_layernorm and"),
        (_set("model.layers.0.input_layernorm", RMSNorm(32)), "input_layernorm of 64 numbers"),
        (_set("model.layers.0.self_attn.qkv_proj.output_size_per_partition", 512), "qkv_proj's output of 256"),
        (_set("model.layers.1.self_attn.o_proj.input_size_per_partition", 64), "o_proj's input of 128 .* in layer 1"),
        (_set("model.layers.1.self_attn.attn.sliding_window", 128), "the same attention window"),
        (_without("model.layers.0.mlp.down_proj"), "one MLP module with down_proj or experts, gate"),
        (_set("model.layers.0.mlp.down_proj.output_size", 8), "down_proj's output of 64"),
        (_set("model.layers.1.mlp.down_proj.input_size_per_partition", 48), "mlp_post: 96 numbers a row"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(change: Callable[[Any], None], message: str) -> None:
    one = model()
    change(one)
    with pytest.raises(ConfigError, match=message):
        find_structure(one, HIDDEN)


@pytest.mark.parametrize("name", ["self_attn.o_proj", "mlp.down_proj"])
def test_partial_sums_are_refused_with_several_ranks(name: str) -> None:
    one = model()
    _set(f"model.layers.0.{name}.reduce_results", False)(one)
    find_structure(one, HIDDEN)
    with pytest.raises(ConfigError, match="with reduce_results in layer 0, got partial sums"):
        find_structure(one, HIDDEN, 2)


def test_partial_sums_of_experts_are_refused_with_several_ranks() -> None:
    """vLLM 0.32's experts return them for models that reduce inside the next norm."""
    assert not FusedMoEConfig.skip_final_all_reduce, "expected vLLM's name of the setting, and its default"
    one = model(dense, moe)
    find_structure(one, HIDDEN, 2)
    one.model.layers[1].mlp.experts.moe_config.skip_final_all_reduce = True
    find_structure(one, HIDDEN)
    with pytest.raises(ConfigError, match="experts with reduce_results in layer 1, got partial sums"):
        find_structure(one, HIDDEN, 2)


def test_points_that_cannot_be_read_have_a_reason() -> None:
    one = model(dense, moe)
    one.model.layers[0].mlp.down_proj.quant_method = object()
    one.model.layers[1].mlp.experts.is_monolithic = True
    found = find_structure(one, HIDDEN)
    assert found.refused.keys() == {"mlp_post", "topk_ids", "topk_weights"}
    assert not found.refused.keys() & found.has.keys()
