"""Disables AMX in torch and vLLM on machines that have it.

With AMX, kernels of vLLM 0.32's CPU build compute wrong states of linear attention, and end a rank's process with an
illegal instruction (two tensor-parallel ranks). Some virtual machines also pass the ``amx_*`` flags on without CPUID
leaf 0x1D, which describes the tiles. There the first bf16 product of oneDNN ends the process.
"""

from __future__ import annotations

import os
from pathlib import Path

_CAP = "AVX512_CORE_FP16"  # oneDNN's name of the instruction sets below AMX
_MARK = "HSX_AMX_CAPPED"


def has_amx(cpuinfo: str) -> bool:
    """Whether ``cpuinfo`` (the text of ``/proc/cpuinfo``) has AMX's flags."""
    return " amx_tile" in cpuinfo


def avoid_amx() -> None:
    """Disable AMX in this process and its children. Call this before the first matrix product."""
    if _MARK not in os.environ:
        path = Path("/proc/cpuinfo")
        if not (path.exists() and has_amx(path.read_text())):
            return
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", _CAP)
        os.environ[_MARK] = "1"
    import torch

    # vLLM's kernels ignore oneDNN's cap, and call this function.
    torch.cpu._is_amx_tile_supported = lambda: False
