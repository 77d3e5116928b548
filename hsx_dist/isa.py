"""Disables AMX in torch and vLLM on machines that report it without a description of its tiles.

Some virtual machines pass the ``amx_*`` flags on, but no CPUID leaf 0x1D, which describes the tiles. oneDNN then
configures no tiles, and the first bf16 product ends the process with an illegal instruction.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

#: CPUID leaf that describes AMX's tiles.
_TILE_LEAF = 0x1D
_CAP = "AVX512_CORE_FP16"  # oneDNN's name of the instruction sets below AMX
_MARK = "HSX_AMX_CAPPED"


def amx_is_broken(cpuinfo: str) -> bool:
    """Whether ``cpuinfo`` (the text of ``/proc/cpuinfo``) has AMX flags, but no CPUID leaf that describes AMX."""
    level = re.search(r"^cpuid level\s*:\s*(\d+)$", cpuinfo, re.MULTILINE)
    return level is not None and " amx_tile" in cpuinfo and int(level.group(1)) < _TILE_LEAF


def avoid_broken_amx() -> None:
    """Disable broken AMX in this process and its children. Call this before the first matrix product."""
    if _MARK not in os.environ:
        path = Path("/proc/cpuinfo")
        if not (path.exists() and amx_is_broken(path.read_text())):
            return
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", _CAP)
        os.environ[_MARK] = "1"
    import torch

    # vLLM's kernels ignore oneDNN's cap, and call this function.
    torch.cpu._is_amx_tile_supported = lambda: False
