"""Train a draft head for speculative decoding on a run's hidden states, or on states computed on the fly.

    python -m examples.train_draft RUN --model MODEL [--on-the-fly] [--steps 60]

The head is a minimal EAGLE draft (Li et al. 2024, https://arxiv.org/abs/2401.15077). Its input is the last layer's
state at token t and the embedding of token t + 1. It predicts the last layer's state at token t + 1. The model's norm
and head turn that state into logits of the next token. The run needs only layer N, the last.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from hsx_dist import HiddenStatesDataset, open_run
from hsx_dist.models.builtin import resolve_model
from hsx_dist.reading.collate import pad


class DraftHead(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * hidden_size, hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)

    def forward(self, states: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """States ``[B, T, H]`` of tokens t, embeddings ``[B, T, H]`` of tokens t + 1 → states of tokens t + 1."""
        return states + self.out(nn.functional.silu(self.mix(torch.cat([states, embeddings], -1))))


def from_run(url: str, last: int, batch_size: int) -> Iterator[dict[str, Any]]:
    dataset = HiddenStatesDataset(url, layers=[last], max_tokens=128, shuffle=True, seed=0, repeat=True)
    return iter(DataLoader(dataset, batch_size=batch_size, collate_fn=pad))


def on_the_fly(model: Any, batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same batches with states recomputed by transformers."""
    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
    for batch in batches:
        before_norm.clear()
        with torch.inference_mode():
            model(batch["input_ids"], attention_mask=batch["attention_mask"].long())
        yield {**batch, "hidden_states": before_norm[0][:, :, None].clone()}


def train(model: Any, batches: Iterator[dict[str, Any]], steps: int) -> list[float]:
    """Train a new head. Returns the loss of each step."""
    torch.manual_seed(0)
    head = DraftHead(model.config.hidden_size)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    embed, norm, lm_head = model.get_input_embeddings(), model.model.norm, model.lm_head
    losses = []
    for _ in range(steps):
        batch = next(batches)
        states, ids = batch["hidden_states"][:, :, 0].float(), batch["input_ids"]
        with torch.no_grad():
            embeddings = embed(ids[:, 1:]).float()
        guess = head(states[:, :-2], embeddings[:, :-1])
        valid = batch["attention_mask"][:, 2:] & batch["loss_mask"][:, 2:]
        logits = lm_head(norm(guess.to(lm_head.weight.dtype))).float()
        loss = nn.functional.cross_entropy(logits[valid], ids[:, 2:][valid])
        loss = loss + nn.functional.smooth_l1_loss(guess[valid], states[:, 1:-1][valid])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="path or URL of a run that has the last layer")
    parser.add_argument(
        "--model", required=True, help="folder or id of the run's model, or builtin:smollm2-135m-instruct"
    )
    parser.add_argument("--on-the-fly", action="store_true", help="recompute the states with transformers")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=4)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(resolve_model(args.model), dtype=torch.float32)
    model = model.eval().requires_grad_(False)
    batches = from_run(args.run, model.config.num_hidden_layers, args.batch_size)
    if args.on_the_fly:
        batches = on_the_fly(model, batches)
    losses = train(model, batches, args.steps)
    tenth = max(1, len(losses) // 10)
    print(f"{len(open_run(args.run))} samples; loss {sum(losses[:tenth]) / tenth:.3f} at first, ", end="")
    print(f"{sum(losses[-tenth:]) / tenth:.3f} at last")


if __name__ == "__main__":
    main()
