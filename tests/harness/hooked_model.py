"""Every point of a model in float32, computed by transformers with hooks: the reference for the taps' rows.

The numbers come from Hugging Face's modules, not from vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn


def tiny_model(kind: str, path: Path) -> Path:
    """Write a random model of 5 layers to ``path``: ``llama``, ``qwen3``, ``qwen3_moe`` or ``mixtral``."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    }
    if kind == "mixtral":
        sizes |= {"num_local_experts": 8, "num_experts_per_tok": 2}
    if kind == "qwen3_moe":
        sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
        sizes |= {"decoder_sparse_step": 1, "mlp_only_layers": [1]}
    name = {"llama": "Llama", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral"}[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes))
        for parameter in model.parameters():
            if parameter.dim() == 1:  # weights of norms: if all were equal, a missing norm would not show
                parameter.data.copy_(1 + 0.2 * torch.randn_like(parameter))
        model.save_pretrained(path)
    return path


class HookedModel:
    """A transformers model with hooks at every point."""

    def __init__(self, path: Path):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        self._rows: dict[tuple[str, int], torch.Tensor] = {}
        decoder = self.model.model
        self._hook(decoder.embed_tokens, 0, out="embed")
        self._hook(decoder.norm, 0, into="resid_final", out="final_ln")
        for i, layer in enumerate(decoder.layers):
            attention = layer.self_attn
            self._hook(layer.input_layernorm, i, into="resid_pre", out="ln1")
            for name in "qkv":
                self._hook(getattr(attention, f"{name}_proj"), i, out=name)
            for name in ("q_norm", "k_norm"):
                if hasattr(attention, name):
                    self._hook(getattr(attention, name), i, out=name)
            self._hook(attention.o_proj, i, into="z", out="attn_out")
            self._hook(layer.post_attention_layernorm, i, into="resid_mid", out="ln2")
            mlp = getattr(layer, "mlp", None) or layer.block_sparse_moe
            self._hook(mlp, i, out="mlp_out")
            if hasattr(mlp, "down_proj"):
                self._hook(mlp.down_proj, i, into="mlp_post")
            else:
                mlp.gate.register_forward_hook(self._route(i, self.model.config.num_experts_per_tok))

    def _hook(self, module: nn.Module, layer: int, *, into: str | None = None, out: str | None = None) -> None:
        def hook(_: Any, args: Any, kwargs: Any, output: Any) -> None:
            if into:
                self._rows[into, layer] = (args[0] if args else kwargs["hidden_states"]).clone()
            if out:
                self._rows[out, layer] = (output[0] if isinstance(output, tuple) else output).clone()

        module.register_forward_hook(hook, with_kwargs=True)

    def _route(self, layer: int, top_k: int) -> Callable[..., None]:
        def hook(gate: Any, args: Any, out: Any) -> None:
            if isinstance(out, tuple):  # the router of transformers 5
                logits, weights, ids = out
            else:
                logits = out.reshape(-1, out.shape[-1])
                weights, ids = logits.softmax(-1).topk(top_k)
                weights = weights / weights.sum(-1, keepdim=True)
            rows = {"router_logits": logits, "topk_ids": ids, "topk_weights": weights}
            self._rows |= {(name, layer): x.clone() for name, x in rows.items()}

        return hook

    @torch.inference_mode()
    def rows(self, token_ids: Sequence[int]) -> dict[tuple[str, int], torch.Tensor]:
        """``[tokens, width]`` of each point and layer. The setting ``layers`` counts ``hidden_states``' layers."""
        self._rows.clear()
        self.model(torch.tensor([list(token_ids)]), use_cache=False)
        found = {key: value.reshape(len(token_ids), -1) for key, value in self._rows.items()}
        stream = {layer: rows for (point, layer), rows in found.items() if point == "resid_pre"}
        stream[len(stream)] = found["resid_final", 0]
        return found | {("hidden_states", layer): rows for layer, rows in stream.items()}


def worst_row(got: Any, right: torch.Tensor) -> float:
    """The largest distance between rows of ``got``, ``[tokens, ...]``, and ``right``, relative to ``right``'s norm."""
    got, right = torch.as_tensor(got).flatten(1).double(), right.double()
    assert got.shape == right.shape
    return float(((got - right).norm(dim=1) / right.norm(dim=1).clamp_min(1e-30)).max())
