"""Train a small sparse autoencoder on one layer of a run. It keeps the k largest features of each token (TopK).

python -m examples.train_sae RUN LAYER

Also trains on states with each channel shuffled among tokens, as a baseline. A shuffled channel keeps its distribution
and loses its relations to other channels, so the difference in loss comes from structure.
"""

import sys
from itertools import islice

import torch

from hsx_dist import HiddenStatesDataset, TokenBatches, open_run
from hsx_dist.reading.statistics import compute_statistics, read_statistics, store_statistics


class TopKAutoencoder(torch.nn.Module):
    """Maps ``[B, H]`` to ``[B, H]`` through ``features`` features, of which at most ``k`` are not zero."""

    def __init__(self, width: int, features: int, k: int):
        super().__init__()
        self.encoder = torch.nn.Linear(width, features)
        self.decoder = torch.nn.Linear(features, width)
        self.k = k
        with torch.no_grad():
            self.encoder.weight.copy_(self.decoder.weight.T)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        top = self.encoder(x - self.decoder.bias).relu().topk(self.k, dim=-1)
        return self.decoder(torch.zeros(len(x), self.encoder.out_features).scatter(-1, top.indices, top.values))


def train_sae(
    run: str,
    layer: int,
    *,
    steps: int = 300,
    batch: int = 256,
    features: int = 1024,
    k: int = 16,
    shuffled: bool = False,
) -> list[float]:
    """Unexplained share of the states' variance at each step. 1 is no better than the mean."""
    opened = open_run(run)
    if layer not in read_statistics(opened).layers:
        store_statistics(opened, compute_statistics(opened, [layer], skip_first=1))
    data = HiddenStatesDataset(opened, layers=[layer], tokens=slice(1, None), shuffle=True, repeat=True)
    batches = TokenBatches(data, batch, buffer_tokens=16 * batch, scaling="standard")
    torch.manual_seed(0)
    model = TopKAutoencoder(opened.at(0).hidden_size, features, k)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for rows in islice(batches, steps):
        x = rows["hidden_states"]
        if shuffled:
            x = torch.gather(x, 0, torch.rand_like(x).argsort(0))
        loss = ((model(x) - x) ** 2).sum() / ((x - x.mean(0)) ** 2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    for name, shuffled in (("states", False), ("shuffled channels", True)):
        losses = train_sae(sys.argv[1], int(sys.argv[2]), shuffled=shuffled)
        print(f"{name}: unexplained variance {losses[0]:.3f} at first, {sum(losses[-20:]) / 20:.3f} at the end")
