"""The reference for stored states: transformers on the same token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from hsx_dist.isa import avoid_amx
from hsx_dist.jobs.check import final_norm


class Oracle:
    """A model in transformers. Its last layer is compared after the final norm, as transformers returns only that."""

    def __init__(self, model: str | Path, dtype: torch.dtype = torch.float32):
        avoid_amx()
        from transformers import AutoModel

        self.model = AutoModel.from_pretrained(str(model), dtype=dtype).eval()
        self.norm = final_norm(self.model)
        self.last = self.model.config.num_hidden_layers

    @torch.inference_mode()
    def errors(
        self, token_ids: Sequence[int], states: torch.Tensor, layer_ids: Sequence[int]
    ) -> Mapping[int, tuple[float, float]]:
        """(relative error of the whole layer, of its worst row) by layer id. ``states``: ``[T, L, H]``."""
        theirs = self.model(torch.tensor([list(token_ids)]), output_hidden_states=True, use_cache=False).hidden_states
        found = {}
        for i, layer in enumerate(layer_ids):
            ours = self.norm(states[:, i]) if layer == self.last else states[:, i]
            a, b = ours.double(), theirs[layer][0].double()
            rows = (a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-30)  # transformers embeds a padding token as zeros
            found[layer] = (float((a - b).norm() / b.norm()), float(rows.max()))
        return found

    def assert_equal(self, token_ids: Sequence[int], states: torch.Tensor, layer_ids: Sequence[int]) -> None:
        """Float32 on both sides: every row of every layer within 1e-3."""
        assert states.shape[:2] == (len(token_ids), len(layer_ids))
        worst = {layer: row for layer, (_, row) in self.errors(token_ids, states, layer_ids).items()}
        assert all(error < 1e-3 for error in worst.values()), worst
