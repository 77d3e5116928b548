"""Checks that a replica's engine has the model, tokenizer and dtype of the run."""

from __future__ import annotations

import os
from typing import Any

from hsx_dist.errors import EngineError
from hsx_dist.fleet.tasks import EngineSpec
from hsx_dist.inputs.encode import load_tokenizer
from hsx_dist.models.weights import folder_weights
from hsx_dist.tokenizers import template_hash, tokenizer_hash


def load_same_tokenizer(spec: EngineSpec) -> Any:
    """Load the tokenizer. Raises ``EngineError`` unless the model's files here are those on the driver's machine."""
    require_files(spec)
    tokenizer = load_tokenizer(spec.model, revision=spec.revision, engine_kwargs=spec.engine_kwargs)
    if spec.tokenizer not in (None, (tokenizer_hash(tokenizer), template_hash(tokenizer))):
        raise EngineError(
            f"model: expected the driver's tokenizer and chat template of {spec.model} on {os.uname().nodename}, got "
            "others. Copy one version of the model to all nodes"
        )
    return tokenizer


def require_files(spec: EngineSpec) -> None:
    """Raise ``EngineError`` unless the model's folders here have the files of the driver's machine."""
    for folder, expected in spec.files.items():
        load_format = spec.engine_kwargs.get("load_format", "auto") if folder == spec.model else "auto"
        if (found := folder_weights(folder, load_format)) != expected:
            raise EngineError(
                f"model: expected the files of the driver's {folder} on {os.uname().nodename}, got "
                f"{'no folder' if found is None else 'other files'}. Copy one version of the model to all nodes"
            )


def require_dtype(spec: EngineSpec, dtype: Any) -> None:
    """Raise ``EngineError`` unless the engine computes in the run's dtype.

    With ``dtype="auto"`` vLLM's choice depends on the device: an older GPU gets float16 for a bfloat16 checkpoint."""
    found = str(dtype).removeprefix("torch.")
    if spec.dtype not in (None, found):
        raise EngineError(
            f"engine_kwargs.dtype: expected states in {spec.dtype} on every node, got an engine that computes in "
            f"{found} on {os.uname().nodename}. Set engine_kwargs.dtype, and choose a new output if the run has samples"
        )
