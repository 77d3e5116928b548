"""A million tokens of points, from an engine through a run to a data set. All are counted and many are compared.

    .venv/bin/python -m tests.soak.points [--tokens 1000000]

A tiny model on the CPU. Each token must occur once in an epoch of the data set and once in its token batches, with the
ids of its prompt. Every hundredth sample is compared with transformers.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import hsx_dist
from hsx_dist.connector import plugin
from hsx_dist.models.tiny import write_tiny_tokenizer
from hsx_dist.reading.verify import verify_run
from hsx_dist.store import open_store
from tests.harness.hooked_model import HookedModel, tiny_model, worst_row

CAPTURE: dict[str, Any] = {"points": {"hidden_states": [0, -1], "q": [2], "mlp_out": [1, 3]}}
LAYERS = {"q": [2], "mlp_out": [3, 1]}
COMPARED = 100
TOLERANCE = 2e-5  # relative to a row's norm


def check(passed: bool, what: str) -> None:
    """Raise ``SystemExit`` with the message, unless the condition is true."""
    if not passed:
        raise SystemExit(what)


def compare(item: dict[str, Any], hooked: HookedModel) -> None:
    right = hooked.rows(item["input_ids"].tolist())
    for name, layers in LAYERS.items():
        for at, layer in enumerate(layers):
            error = worst_row(item[name][:, at], right[name, layer])
            check(error < TOLERANCE, f"{item['key']}: {name} of layer {layer} differs by {error:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    args = parser.parse_args()
    plugin.register()
    rng, rows, total = np.random.default_rng(0), {}, 0
    while total < args.tokens:
        rows[f"row-{len(rows):06d}"] = ids = rng.integers(0, 512, int(rng.integers(1, 250))).tolist()
        total += len(ids)
    with tempfile.TemporaryDirectory(prefix="hsx-points-") as name:
        folder = Path(name)
        write_tiny_tokenizer(tiny_model("llama", folder / "model"), 512, 512)
        begin = time.monotonic()
        run = hsx_dist.extract(
            [{"id": key, "token_ids": ids} for key, ids in rows.items()],
            model=str(folder / "model"),
            output=folder / "run",
            engine_kwargs={"dtype": "float32", "enforce_eager": True, "block_size": 32, "max_model_len": 256},
            source="taps",
            capture=CAPTURE,
        )
        seconds = time.monotonic() - begin
        check(verify_run(open_store(str(folder / "run"))).ok, "hsx verify found problems")
        hooked, seen = HookedModel(folder / "model"), set()
        data = hsx_dist.HiddenStatesDataset(run, points=list(LAYERS), layers=LAYERS, shuffle=True, framework="torch")
        for number, item in enumerate(data):
            check(item["input_ids"].tolist() == rows[item["key"]], f"{item['key']}: token ids differ from the prompt's")
            check(item["key"] not in seen, f"{item['key']}: given twice")
            seen.add(item["key"])
            if number % COMPARED == 0:
                compare(item, hooked)
        check(len(seen) == len(rows), f"expected {len(rows)} samples, got {len(seen)}")
        counted = np.zeros(512, np.int64)
        for batch in hsx_dist.TokenBatches(data, 4096):
            check(batch["q"].shape[1:] == (4, 32), f"expected batches of [*, 4, 32], got {tuple(batch['q'].shape)}")
            counted += np.bincount(batch["input_ids"].numpy(), minlength=512)
        sent = np.bincount(np.concatenate([np.array(ids) for ids in rows.values()]), minlength=512)
        check(bool((counted == sent).all()), f"expected {total} tokens in batches, got {counted.sum()}")
    print(f"{len(rows)} samples, {total} tokens of {', '.join(CAPTURE['points'])}: each once, {total / seconds:,.0f}/s")


if __name__ == "__main__":
    main()
