"""A linear probe in twenty lines: predict from a layer's states whether the token's id is even. Chance is 0.5.

python -m examples.linear_probe RUN LAYER
"""

import sys

import torch
from torch.nn.functional import cross_entropy, layer_norm

from hsx_dist import HiddenStatesDataset, TokenBatches, open_run


def train_probe(run: str, layer: int, epochs: int = 20) -> float:
    """Accuracy of the probe on held-out samples."""
    train, val = (
        HiddenStatesDataset(open_run(run).select(split=split, val_fraction=0.2), layers=[layer], shuffle=True)
        for split in ("train", "val")
    )
    probe = torch.nn.Linear(open_run(run).at(0).hidden_size, 2)
    optimizer = torch.optim.AdamW(probe.parameters(), lr=0.01)
    features = lambda x: layer_norm(x.float(), x.shape[-1:])  # noqa: E731
    for _ in range(epochs):
        for batch in TokenBatches(train, 512):
            optimizer.zero_grad()
            cross_entropy(probe(features(batch["hidden_states"])), batch["input_ids"] % 2).backward()
            optimizer.step()
    right = [(probe(features(b["hidden_states"])).argmax(-1) == b["input_ids"] % 2) for b in TokenBatches(val, 512)]
    return float(torch.cat(right).float().mean())


if __name__ == "__main__":
    print(f"accuracy {train_probe(sys.argv[1], int(sys.argv[2])):.3f}")
