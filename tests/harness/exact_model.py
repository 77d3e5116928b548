"""A model whose hidden states are known numbers, run by vLLM like any other model.

The stream that enters layer k holds, at token t of a request, in channel j, the field ``fields[j % len(fields)]``:

- ``layer``: k (vLLM's layer id: 0 for the embeddings, N for the last layer's output).
- ``position``: t.
- ``token``: the token's id.
- ``context``: the sum of the request's token ids 0..t, computed by layer k-1's *real attention over the KV cache*.
  It is 0 at k = 0.
- ``rank``: the tensor-parallel rank that computed the value, times ``RANK_STEP``. The connector accepts so small a
  difference. At the token ``UNREDUCED`` the rank is divided by ``RANK_STEP`` instead, like an unreduced partial sum.
- ``channel``: j.

So a swapped layer, row, request, rank or channel changes a number. A wrong cache behind a chunk, a prefix hit or a
resumed request does too. The values are small integers: exact in float32, and in bfloat16 up to 256 (there without
``context``). The next token is always the last one plus one.

Loading this module imports neither torch nor vLLM; the model itself is ``tests.harness.exact_vllm``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hsx_dist.models.tiny import write_tiny_tokenizer

#: The folder with ``tests``.
ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = "HsxExactForCausalLM"
FIELDS = ("layer", "position", "token", "context", "rank", "channel")
#: Difference between ranks: exact in bfloat16 and small compared with the other fields.
RANK_STEP = 2.0**-6
#: A token id at which ranks differ as much as partial sums do.
UNREDUCED = 2
#: The smallest head size for which vLLM's CPU attention has a kernel.
HEAD_DIM = 32


def exact_model(
    path: Path,
    *,
    layers: int = 4,
    heads: int = 2,
    fields: Sequence[str] = FIELDS,
    max_positions: int = 256,
    dtype: str = "float32",
) -> Path:
    """Write the model's folder (configuration, tokenizer, weights of one unused scalar) to ``path``, and return it.

    The hidden size is ``heads * 32``; the vocabulary has 512 tokens.

    Raises:
        ValueError: an unknown field, or ``context`` in another dtype than float32, where it would be rounded.
    """
    import torch
    from safetensors.torch import save_file

    unknown = sorted(set(fields) - set(FIELDS))
    if unknown or not fields:
        raise ValueError(f"expected fields among {FIELDS}, got {tuple(fields)}")
    if "context" in fields and dtype != "float32":
        raise ValueError(f"expected float32 for the field 'context', whose sums are large, got {dtype}")
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    vocab = write_tiny_tokenizer(path, 512, max_positions)
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",  # vLLM and transformers read a configuration they know; the architecture is ours
        "hidden_size": heads * HEAD_DIM,
        "head_dim": HEAD_DIM,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": layers,
        "intermediate_size": HEAD_DIM,
        "max_position_embeddings": max_positions,
        "vocab_size": vocab,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "dtype": dtype,
        "torch_dtype": dtype,
        "tie_word_embeddings": False,
        "hsx_fields": list(fields),
    }
    (path / "config.json").write_text(json.dumps(config, indent=2))
    save_file({"unused": torch.zeros(1)}, path / "model.safetensors", metadata={"format": "pt"})
    return path


def expected_states(
    token_ids: Sequence[int],
    layer_ids: Sequence[int],
    hidden_size: int,
    *,
    fields: Sequence[str] = FIELDS,
    rank: int = 0,
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The hidden states that the model computes for one request, float32 ``[T, L, H]``."""
    ids = np.asarray(token_ids, dtype=np.float32)[:, None, None]
    layer = np.asarray(layer_ids, dtype=np.float32)[None, :, None]
    channel = np.arange(hidden_size, dtype=np.float32)[None, None, :]
    values: dict[str, np.ndarray[Any, Any]] = {
        "layer": layer,
        "position": np.arange(len(ids), dtype=np.float32)[:, None, None],
        "token": ids,
        "context": np.cumsum(ids, axis=0) * (layer > 0),
        "rank": rank * np.where(ids == UNREDUCED, np.float32(1 / RANK_STEP), np.float32(RANK_STEP)),
        "channel": channel,
    }
    shape = (len(ids), len(layer_ids), hidden_size)
    out = np.empty(shape, dtype=np.float32)
    for i, field in enumerate(fields):
        out[:, :, i :: len(fields)] = np.broadcast_to(values[field], shape)[:, :, i :: len(fields)]
    return out


def next_tokens(last: int, count: int, vocab: int = 512) -> list[int]:
    """The tokens that the model generates greedily after a prompt that ends with the token ``last``."""
    return [(last + 1 + i) % vocab for i in range(count)]


def register() -> None:
    """Register the architecture with this process's vLLM."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, "tests.harness.exact_vllm:HsxExactForCausalLM")


def write_plugin(
    folder: Path, name: str, target: str, *, group: str = "vllm.general_plugins", entry: str | None = None
) -> str:
    """Write the metadata of a distribution ``name`` with one entry point to ``folder``.

    Returns the paths to put in front of ``PYTHONPATH``. Processes with that path find the entry point ``target``
    (``module:name``, of this repository or installed) in ``group`` under the name ``entry`` (default: ``name``). vLLM
    calls its plugins in every process.
    """
    info = Path(folder) / f"{name}-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry or name} = {target}\n")
    return os.pathsep.join([str(folder), str(ROOT)])


@contextmanager
def registered(folder: Path) -> Iterator[None]:
    """Register the architecture with vLLM in this process and in every process that starts in the ``with`` block.

    Writes a plugin into ``folder``, and adds the folder to this process's search path and to ``PYTHONPATH``. Until the
    block ends, the plugin works like an installed one.
    """
    path = write_plugin(folder, "hsx_exact_model", f"{__name__}:register")
    before = os.environ.get("PYTHONPATH")
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([path, *([before] if before else [])])
    try:
        register()  # this process may have loaded its plugins already
        yield
    finally:
        sys.path.remove(str(folder))
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
