"""Real hidden states: SmolLM2-135M-Instruct on the demo's prompts, each prompt once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.provenance import ROOT
from hsx_dist.page import CARRIER

LAYERS = (2, 15, 27, 30)


def smollm2_states(dtype: str, tokens: int) -> np.ndarray[Any, Any]:
    """Layer-major states ``[L, T, H]`` of ``LAYERS`` in the carrier of ``dtype``; T is at most ``tokens``.

    For bf16 the model runs in bf16, for other dtypes in float32. The last layer is taken before the norm.
    """
    import torch

    from hsx_dist.isa import avoid_amx
    from hsx_dist.models.builtin import smollm2

    avoid_amx()
    from transformers import AutoModel, AutoTokenizer

    folder = smollm2()
    model = AutoModel.from_pretrained(folder, dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before_norm: list[Any] = []
    model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
    found, have = [], 0
    for ids in distinct_prompts(tokenizer):
        before_norm.clear()
        with torch.inference_mode():
            streams = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
        rows = torch.stack([before_norm[0][0] if k == LAYERS[-1] else streams[k][0] for k in LAYERS])
        found.append(rows.to(getattr(torch, dtype)).view(torch.uint8).numpy().view(CARRIER[dtype]))
        have += len(ids)
        if have >= tokens:
            break
    return np.ascontiguousarray(np.concatenate(found, axis=1)[:, :tokens])


def distinct_prompts(tokenizer: Any) -> Iterator[tuple[int, ...]]:
    """Token ids of the demo's prompts, at most 2,048 each, without duplicates: these would raise every ratio."""
    seen = set()
    for line in (ROOT / "configs" / "demo" / "prompts.jsonl").read_text().splitlines():
        ids = tuple(_token_ids(json.loads(line), tokenizer))[:2048]
        if ids and ids not in seen:
            seen.add(ids)
            yield ids


def _token_ids(row: dict[str, Any], tokenizer: Any) -> list[int]:
    if "messages" in row:
        return list(tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False))
    return list(row["token_ids"] if "token_ids" in row else tokenizer(row["text"])["input_ids"])
