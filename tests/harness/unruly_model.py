"""A tiny Llama that takes its time, and dies of one token: what a run must survive, at a pace that a test can meet.

Its configuration is a stock Llama's (transformers reads it as one, and computes the same states) with two fields more:
``hsx_step_seconds`` is slept in every forward pass, and ``hsx_poison_token`` in a batch kills the process as the kernel
kills one that is out of memory. Loading this module imports neither torch nor vLLM.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hsx_dist.models.tiny import tiny_llama
from tests.harness.exact_model import write_plugin

ARCHITECTURE = "LlamaForCausalLM"


def unruly_llama(path: Path, *, step_seconds: float, poison_token: int, **arguments: Any) -> Path:
    """Write the model's folder to ``path``; ``arguments`` are ``tiny_llama``'s."""
    tiny_llama(path, **arguments)
    config = json.loads((path / "config.json").read_text())
    config |= {"hsx_step_seconds": step_seconds, "hsx_poison_token": poison_token}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    return path


def write_unruly_plugin(folder: Path) -> str:
    """Write the plugin that makes the model unruly into ``folder``. Returns the ``PYTHONPATH`` of its processes.

    It takes the place of vLLM's own Llama; other Llamas behave.
    """
    return write_plugin(folder, "hsx_unruly_model", f"{__name__}:register")


def register() -> None:
    """Put the model in the place of this process's vLLM's Llama."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, "tests.harness.unruly_vllm:UnrulyLlama")
