"""Tokens a second of prefill of one engine: without capture, with vLLM's extraction, or with taps.

    python -m benchmarks.gpu.prefill SINK [--batches 1,2,4] [--seconds 5] [--small]

Sinks:

- ``none``: no extraction.
- ``vllm``: vLLM's own connector, to disk. ``file`` and ``taps``: ours, to disk, with vLLM's extraction or with taps.
- ``discard``: as ``file``, to an S3 server that discards bytes.
- All states of the model, nothing stored, as in DMI's comparison: ``null`` (vLLM's extraction into its cache),
  ``taps-cache`` (taps into the cache), ``taps-sink`` (taps, copied to host memory).

Batches of prompts run one after another; the time ends when all samples are stored. The model has the shape of Qwen3-4B
and random weights: speed does not depend on weights, and nothing is downloaded. ``--small`` uses
``benchmarks.thin_model``, for a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import thin_model
from benchmarks.engine import target
from benchmarks.engine_cell import Cell, CellSpec
from benchmarks.engine_loads import KINDS, TAPS
from hsx_dist.jobs.kit.outcomes import claim

SINKS = {
    "none": "no extraction",
    "vllm": "vLLM's own connector, to disk",
    "file": "ours, to disk",
    "taps": "taps, to disk",
    "discard": "ours, to an S3 server that discards",
    "null": "all states: vLLM's extraction alone",
    "taps-cache": "all states: taps alone",
    "taps-sink": "all states: taps, to host memory",
}
#: Sinks that capture all states.
ALL_STATES = ("null", "taps-cache", "taps-sink")
#: Batch sizes and prompt length of DMI's published comparison: prefill of Qwen3-4B (arXiv 2605.11093).
BATCHES = (1, 2, 4, 8, 16, 32)
PROMPT = 512
CAPTURED = (2, 18, 33, 36)
HIDDEN, VOCAB = 2560, 151936


def qwen3_4b_shape(path: Path) -> Path:
    """Write a configuration without weights. vLLM makes random weights (``load_format="dummy"``)."""
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 9728,
        "num_hidden_layers": CAPTURED[-1],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": VOCAB,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def spec(sink: str, folder: Path, output: str, options: dict[str, Any] | None, most: int, *, small: bool) -> CellSpec:
    model = thin_model.thin_model(folder / "model") if small else qwen3_4b_shape(folder / "model")
    layers = tuple(range(CAPTURED[-1] + 1)) if sink in ALL_STATES else CAPTURED
    if small:
        layers = thin_model.CAPTURED
    return CellSpec(
        model=str(model),
        layers=layers,
        hidden=thin_model.HIDDEN if small else HIDDEN,
        vocab=thin_model.VOCAB if small else VOCAB,
        prompt_tokens=PROMPT,
        output_tokens=1,
        concurrency=most,
        seconds=0.0,
        sink=KINDS.get(sink, "store"),
        source="taps" if sink in TAPS else "cache",
        capture={"points": {"hidden_states": list(layers)}},
        output=output,
        storage_options=options,
        made_up_weights=not small,
        compiled=not small,
        # More tokens than all requests have crash the dummy run of vLLM 0.32.
        step_tokens=2048 if small else min(16384, most * PROMPT),
    )


def measure(cell: Cell, batch: int, seconds: float) -> float:
    """Tokens a second until all samples are stored. Batches start for ``seconds``, and at least two run."""
    cell.batch(batch)  # compiles new shapes
    cell.flush()
    sent, start = 0, time.monotonic()
    while sent < 2 * batch or time.monotonic() - start < seconds:
        cell.batch(batch)
        sent += batch
    cell.flush()
    took = time.monotonic() - start
    cell.clear()
    return sent * cell.spec.sample_tokens / took


def run(sink: str, batches: Sequence[int], seconds: float, *, small: bool) -> dict[str, Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from hsx_dist.isa import avoid_amx

    avoid_amx()
    with tempfile.TemporaryDirectory(prefix="hsx-prefill-") as folder:
        place = Path(folder)
        with target(sink, place) as (output, options, _):
            cell = Cell(spec(sink, place, output, options, max(batches), small=small))
            found = {str(batch): measure(cell, batch, seconds) for batch in batches}
            cell.check()
            cell.engine.engine_core.shutdown()
    shape = f"hidden size {cell.spec.hidden}, {len(cell.spec.layers)} layers captured, prompts of {PROMPT} tokens"
    model = "A thin model for CPUs" if small else "Qwen3-4B's shape with random weights"
    return {"tokens_per_s": found, "load": f"{model}: {shape}, {seconds:g} s a batch size."}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sink", choices=sorted(SINKS))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    found = run(args.sink, [int(b) for b in args.batches.split(",")], args.seconds, small=args.small)
    best = max(found["tokens_per_s"].values())
    claim("passed", f"up to {best:,.0f} tokens/s; every sample that was sent is stored", found)
    os._exit(0)  # vLLM's threads take seconds to end


if __name__ == "__main__":
    main()
