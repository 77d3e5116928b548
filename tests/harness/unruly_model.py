"""A slow tiny Llama that kills its process at one token, for tests of the faults that a run must survive.

Its configuration is a stock Llama's with two more fields; transformers reads it as a Llama and computes the same
states. Every forward pass sleeps ``hsx_step_seconds``, or ``SLOW_STEP_SECONDS`` while the file exists that the
environment variable ``SLOW`` names: a test holds a run back until it has interrupted it. A batch with the token
``hsx_poison_token`` kills the process with SIGKILL, like the kernel's OOM killer. Loading this module imports neither
torch nor vLLM.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hsx_dist.models.tiny import tiny_llama
from tests.harness.exact_model import write_plugin

ARCHITECTURE = "LlamaForCausalLM"
SLOW, SLOW_STEP_SECONDS = "HSX_TEST_SLOW", 1.5


def unruly_llama(path: Path, *, step_seconds: float, poison_token: int, **arguments: Any) -> Path:
    """Write the model's folder to ``path``; ``arguments`` are ``tiny_llama``'s."""
    tiny_llama(path, **arguments)
    config = json.loads((path / "config.json").read_text())
    config |= {"hsx_step_seconds": step_seconds, "hsx_poison_token": poison_token}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    return path


def write_unruly_plugin(folder: Path) -> str:
    """Write the plugin that registers the model into ``folder``. Returns the ``PYTHONPATH`` of its processes.

    The model replaces vLLM's Llama. A Llama without the two fields behaves as before.
    """
    return write_plugin(folder, "hsx_unruly_model", f"{__name__}:register")


def register() -> None:
    """Replace vLLM's Llama by this model in this process."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, "tests.harness.unruly_vllm:UnrulyLlama")
