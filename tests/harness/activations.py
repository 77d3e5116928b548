"""A tiny model's activations by transformers, in memory and as a run. Tests compare trainers' losses on both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from hsx_dist import open_run
from hsx_dist.models.tiny import tiny_llama
from hsx_dist.reading.run import Run
from hsx_dist.store import open_store
from hsx_dist.testing.samples import RandomSample
from tests.harness.runs import store_run

LAYERS, NUM_LAYERS, HIDDEN, VOCAB, TOKENS, SAMPLES = (2, 4, 5, 8), 8, 64, 512, 24, 4
#: Ids of the auxiliary layers, counted by their output: entry k+1 of transformers' ``hidden_states`` leaves layer k.
AFTER = [1, 3, 4]


def load_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def write_model(folder: Path) -> Path:
    """Write a tiny Llama whose final norm is not the identity: a state on its wrong side gives another loss."""
    tiny_llama(folder, layers=NUM_LAYERS, kv_heads=2)
    model = load_model(folder)
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.linspace(0.5, 2, HIDDEN))
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Activations:
    """Activations of S samples of T tokens.

    - ``input_ids``, ``loss_mask``: int64 ``[S, T]``.
    - ``aux``: float32 ``[S, T, 3H]``.
    - ``before_norm``, ``after_norm``: the last state, float32 ``[S, T, H]``.
    - ``layers``: the stored layers, float32 ``[S, T, L, H]``.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux: torch.Tensor
    before_norm: torch.Tensor
    after_norm: torch.Tensor
    layers: torch.Tensor
    layer_ids: tuple[int, ...] = LAYERS

    def last_alone(self) -> Activations:
        """Copy with the last layer as the only stored one."""
        return replace(self, layers=self.layers[:, :, -1:], layer_ids=LAYERS[-1:])


def compute(folder: Path) -> Activations:
    """Compute random tokens' activations with transformers. Each sample's mask begins at another token."""
    torch.manual_seed(0)
    model = load_model(folder).eval()
    ids = torch.randint(3, VOCAB, (SAMPLES, TOKENS))
    mask = (torch.arange(TOKENS) >= torch.tensor([[3], [5], [7], [9]])).long()
    last: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states
    layers = torch.stack([*(hidden[k] for k in LAYERS[:-1]), last[0]], 2)
    return Activations(ids, mask, torch.cat([hidden[k + 1] for k in AFTER], -1), last[0], hidden[-1], layers)


def store(made: Activations, folder: Path) -> Run:
    """Store the activations as a run in ``folder``, and open it."""
    ids = made.input_ids.numpy()
    samples = [
        RandomSample(f"s{i}", states.contiguous().numpy().view(np.uint32), ids[i], made.layer_ids, "float32", 8)
        for i, states in enumerate(made.layers)
    ]
    masks = {s.key: {"loss_mask": made.loss_mask[i].numpy().astype(np.int8)} for i, s in enumerate(samples)}
    root = open_store(str(folder))
    store_run(root, samples, per_part=3, attached=lambda s: masks[s.key], about={"num_hidden_layers": NUM_LAYERS})
    return open_run(root.url)
