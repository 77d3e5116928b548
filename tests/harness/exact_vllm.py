"""The model of ``tests.harness.exact_model`` in vLLM's terms. Imported by vLLM alone, when it loads that model.

It is built like vLLM's models (``SupportsEagle3``, auxiliary hidden states, paged attention). Only its arithmetic
differs: every number is known in advance.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.interfaces import EagleModelMixin, SupportsEagle3

from tests.harness.exact_model import RANK_STEP, UNREDUCED


class ExactLayer(nn.Module):
    """One attention over the token ids of the request so far."""

    def __init__(self, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.heads = config.num_attention_heads // get_tensor_model_parallel_world_size()
        self.head_dim = config.head_dim
        self.attn = Attention(
            self.heads,
            self.head_dim,
            scale=1.0,
            num_kv_heads=self.heads,
            cache_config=vllm_config.cache_config,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """Sum of the token ids up to each row, float32 ``[T, 1]``. ``token``: the ids in the model's dtype, ``[T, 1]``.

        All scores are equal, so attention returns the mean of the values. The mean times the number of values, rounded,
        is the exact sum.
        """
        value = token.expand(-1, self.heads * self.head_dim).contiguous()
        zero = torch.zeros_like(value)
        mean = self.attn(zero, zero, value)[:, :1].float()
        return torch.round(mean * (positions[:, None].float() + 1))


class ExactModel(nn.Module, EagleModelMixin):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.fields: list[str] = config.hsx_fields
        self.hidden_size = config.hidden_size
        self.dtype = vllm_config.model_config.dtype
        self.start_layer, self.end_layer = 0, config.num_hidden_layers
        self.layers = nn.ModuleList(
            ExactLayer(vllm_config, f"{prefix}.layers.{i}") for i in range(config.num_hidden_layers)
        )

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Any:
        token = input_ids[:, None].float()
        context = torch.zeros_like(token)
        aux: list[torch.Tensor] = []
        self._maybe_add_hidden_state(aux, 0, self.stream(0, positions, token, context), None)
        for i, layer in enumerate(self.layers):
            context = layer(positions, token.to(self.dtype))
            self._maybe_add_hidden_state(aux, i + 1, self.stream(i + 1, positions, token, context), None)
        # The head needs the token, also if the captured stream has other fields.
        last = token.to(self.dtype).expand(-1, self.hidden_size).contiguous()
        return (last, aux) if aux else last

    def stream(self, layer: int, positions: torch.Tensor, token: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """The stream that enters ``layer``: the model's dtype, ``[T, H]``."""
        channel = torch.arange(self.hidden_size, device=token.device, dtype=torch.float32)
        values = {
            "layer": torch.full_like(token, layer),
            "position": positions[:, None].float(),
            "token": token,
            "context": context,
            "rank": get_tensor_model_parallel_rank() * torch.where(token == UNREDUCED, 1 / RANK_STEP, RANK_STEP),
            "channel": channel[None, :],
        }
        out = torch.empty(token.shape[0], self.hidden_size, device=token.device, dtype=torch.float32)
        for i, field in enumerate(self.fields):
            part = values[field]
            step = len(self.fields)
            out[:, i::step] = part[:, i::step] if field == "channel" else part
        return out.to(self.dtype)


class HsxExactForCausalLM(nn.Module, SupportsEagle3):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.vocab_size = vllm_config.model_config.hf_config.vocab_size
        self.hidden_size = vllm_config.model_config.hf_config.hidden_size
        self.model = ExactModel(vllm_config=vllm_config, prefix=f"{prefix}.model" if prefix else "model")

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids[:, None].to(self.model.dtype).expand(-1, self.hidden_size)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: object | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        if input_ids is None or inputs_embeds is not None or intermediate_tensors is not None:
            raise ValueError("expected token ids in one pipeline stage, got embeddings or another stage's tensors")
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """One-hot: the token after a row is its own plus one. ``[T, vocab_size]``."""
        following = (hidden_states[:, 0].long() + 1) % self.vocab_size
        return nn.functional.one_hot(following, self.vocab_size).float()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for _ in weights:  # the model has no weights; the file holds a scalar because the loader requires a file
            pass
        return set()
