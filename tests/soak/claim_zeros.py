"""Runs of many samples of zeros, each stored in about a hundred bytes, and every command and batch of them."""

from __future__ import annotations

import random
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from hsx_dist.format.codecs import resolve_codec
from hsx_dist.reading.collate import pack, pad
from hsx_dist.reading.datasets import HiddenStatesDataset
from hsx_dist.reading.packed import PackedContexts
from hsx_dist.reading.token_batches import TokenBatches
from hsx_dist.store.local import LocalStore
from hsx_dist.testing.samples import RandomSample
from tests.harness import runs as testing_runs
from tests.soak.claim_commands import run_command
from tests.soak.claim_kinds import Read
from tests.soak.claim_texts import commands

#: Bytes of all decoded samples. Readers hold a few at once.
TOTAL = 192 << 20
EXPORTERS = ("routing", "specforge-dflash", "topk-logprobs")  # saelens maps its files, which the limit would count


def zeros(rng: random.Random, folder: Path) -> list[Read]:
    """Samples of zeros. One of them may have other tokens and channels, so that a batch cannot have all."""
    run = LocalStore(folder / "run")
    codec = resolve_codec(rng.choice(["zstd", "split"]))
    count = 1 << rng.randrange(4, 8)
    values = TOTAL // count // 2
    layers = 1 << rng.randrange(6)
    tokens = 1 << rng.randrange(max((values // layers).bit_length() - 2, 1))
    samples = [_zeros(f"k{i}", tokens, layers, values // layers // tokens) for i in range(count)]
    if rng.random() < 0.3:
        samples += [_zeros("long", 4096, layers, 1), _zeros("wide", 1, layers, min(values, 1 << 20) // layers)]
    testing_runs.store_run(run, samples, per_part=rng.choice([1, 20]), codec=codec, version=1)
    out = str(folder / "exported")
    data = partial(HiddenStatesDataset, run.url)
    batch: Any = count // 8
    return [
        *commands(folder),
        *(partial(run_command, ["export", run.url, out + to, "--to", to, "--num-layers", "99"]) for to in EXPORTERS),
        lambda: pad(list(islice(data(), batch))),
        lambda: pack(list(islice(data(), batch))),
        lambda: list(islice(PackedContexts(data(), 1, 8), 2)),
        lambda: list(islice(TokenBatches(data(), 4), 3)),
    ]


def _zeros(key: str, tokens: int, layers: int, width: int) -> RandomSample:
    values = np.broadcast_to(np.zeros((), np.uint16), (tokens, layers, width))
    chunk = max(1, min(tokens, (8 << 20) // (width * 2)))
    return RandomSample(key, values, np.arange(tokens), tuple(range(1, layers + 1)), "bfloat16", chunk)
