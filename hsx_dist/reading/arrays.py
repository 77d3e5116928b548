"""Convert carrier arrays to arrays for users: torch tensors of the stored dtype, or numpy arrays."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

import numpy as np

from hsx_dist.errors import ConfigError, install_extra

#: ``auto``: torch if it is installed.
Framework = Literal["auto", "torch", "numpy"]


def resolve_framework(framework: str) -> Literal["torch", "numpy"]:
    """Return ``torch`` or ``numpy``. ``ConfigError``: the name is unknown, or torch is not installed."""
    if framework not in ("auto", "torch", "numpy"):
        raise ConfigError(f"framework: expected 'auto', 'torch' or 'numpy', got {framework!r}. Use one of these")
    installed = framework != "numpy" and importlib.util.find_spec("torch") is not None
    if framework == "torch" and not installed:
        raise ConfigError(
            f"framework: expected torch to be installed, got no torch. {install_extra('torch')}, or use 'numpy'"
        )
    return "torch" if installed else "numpy"


def to_states(carrier: np.ndarray[Any, Any], dtype: str, framework: str) -> Any:
    """States in their stored dtype, without a copy. numpy has no bfloat16: it gets an exact copy in float32."""
    if resolve_framework(framework) == "torch":
        import torch

        return torch.from_numpy(carrier).view(getattr(torch, dtype))
    if dtype == "bfloat16":
        wide = carrier.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return carrier.view(np.dtype(dtype))


def to_ids(ids: np.ndarray[Any, Any], framework: str) -> Any:
    """Token ids, int64."""
    if resolve_framework(framework) == "torch":
        import torch

        return torch.from_numpy(ids)
    return ids
