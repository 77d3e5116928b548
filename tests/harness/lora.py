"""A LoRA adapter with random weights, in PEFT's file format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def write_adapter(model: Path, folder: Path) -> tuple[Path, Path]:
    """A random LoRA adapter of ``model``, and the model with the adapter merged."""
    merged, adapter = folder / "merged", folder / "adapter"
    shutil.copytree(model, merged)
    adapter.mkdir()
    weights, low_rank = load_file(merged / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(3)
    for name in [n for n in weights if n.endswith(("q_proj.weight", "v_proj.weight", "down_proj.weight"))]:
        out, into = weights[name].shape
        a, b = torch.randn(4, into, generator=generator) * 0.2, torch.randn(out, 4, generator=generator) * 0.2
        weights[name] += 2 * b @ a
        module = f"base_model.model.{name.removesuffix('.weight')}"
        low_rank |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    save_file(low_rank, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "bias": "none", "task_type": "CAUSAL_LM"}))
    return adapter, merged
