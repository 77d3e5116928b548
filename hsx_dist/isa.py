"""Keeps torch and vLLM off AMX on machines that claim to have it and do not say what its tiles are like.

Some virtual machines pass the ``amx_*`` flags on and cut CPUID off below leaf 0x1D, which describes the tiles. oneDNN
then configures none, and the first bf16 product ends the process with an illegal instruction.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

#: CPUID leaf that describes AMX's tiles.
_TILE_LEAF = 0x1D
_CAP = "AVX512_CORE_FP16"  # oneDNN's name for all that comes before AMX
_MARK = "HSX_AMX_CAPPED"


def amx_is_broken(cpuinfo: str) -> bool:
    """Whether ``cpuinfo`` (the text of ``/proc/cpuinfo``) has AMX among its flags and no CPUID leaf to describe it."""
    level = re.search(r"^cpuid level\s*:\s*(\d+)$", cpuinfo, re.MULTILINE)
    return level is not None and " amx_tile" in cpuinfo and int(level.group(1)) < _TILE_LEAF


def avoid_broken_amx() -> None:
    """Take AMX away from this process and its children, where it is broken; call it before the first matrix product."""
    if _MARK not in os.environ:
        path = Path("/proc/cpuinfo")
        if not (path.exists() and amx_is_broken(path.read_text())):
            return
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", _CAP)
        os.environ[_MARK] = "1"
    import torch

    # vLLM's own kernels do not look at oneDNN's cap; this is what they ask.
    torch.cpu._is_amx_tile_supported = lambda: False
