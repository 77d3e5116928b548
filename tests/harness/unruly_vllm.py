"""The model of ``tests.harness.unruly_model`` in vLLM's terms. Imported by vLLM alone, when it loads that model."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaForCausalLM

from tests.harness.unruly_model import SLOW, SLOW_STEP_SECONDS


class UnrulyLlama(LlamaForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **arguments: Any):
        super().__init__(vllm_config=vllm_config, prefix=prefix, **arguments)
        config = vllm_config.model_config.hf_config
        self._step_seconds: float = getattr(config, "hsx_step_seconds", 0.0)
        self._slow = Path(os.environ[SLOW]) if SLOW in os.environ else None
        self._poison: int | None = getattr(config, "hsx_poison_token", None)

    def forward(self, input_ids: torch.Tensor | None, *arguments: Any, **named: Any) -> Any:
        if self._poison is not None and input_ids is not None and bool((input_ids == self._poison).any()):
            os.kill(os.getpid(), signal.SIGKILL)
        held = self._slow is not None and self._slow.exists()
        time.sleep(SLOW_STEP_SECONDS if held else self._step_seconds)
        return super().forward(input_ids, *arguments, **named)
