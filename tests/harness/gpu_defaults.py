"""A GPU's defaults on vLLM's CPU build: the V2 model runner and asynchronous scheduling.

Triton's interpreter runs the V2 runner's kernels, slowly. vLLM's CPU platform turns asynchronous scheduling off; a
plugin turns it on again. Loading this module imports neither torch, Triton nor vLLM.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from tests.harness.exact_model import write_plugin

V2, AHEAD = "VLLM_USE_V2_MODEL_RUNNER", "HSX_TESTING_SCHEDULE_AHEAD"


def gpu_defaults(folder: Path, *, v2: bool = True, ahead: bool = True) -> dict[str, str]:
    """Write plugins into ``folder``, and return the environment variables that make processes use them.

    Set the variables before a process imports vLLM. ``check_defaults`` checks that its engines use them.

    Args:
        folder: a folder that outlives the processes.
        v2: run the V2 model runner, else V1.
        ahead: schedule asynchronously, else schedule each step after the last one.
    """
    variables = {V2: str(int(v2)), AHEAD: str(int(ahead)), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    path = ""
    if v2:
        target = "tests.harness.interpreted_triton"
        path = write_plugin(folder, "hsx_interpreted_triton", target, group="triton.backends", entry="cpu")
        # Dynamo cannot trace an interpreted kernel.
        variables |= {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    if ahead:
        path = write_plugin(folder, "hsx_schedule_ahead", f"{__name__}:schedule_ahead")
    return variables | {"PYTHONPATH": os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))}


def schedule_ahead() -> None:
    """Make vLLM's CPU platform schedule asynchronously in this process."""
    from vllm.platforms.cpu import CpuPlatform

    theirs = CpuPlatform.check_and_update_config
    if getattr(theirs, "hsx", False):
        return  # vLLM may call a plugin more than once

    @functools.wraps(theirs)
    def check_and_update_config(vllm_config: Any) -> None:
        theirs(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    check_and_update_config.hsx = True  # type: ignore[attr-defined]
    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)


def check_defaults(vllm_config: Any) -> None:
    """Check that an engine has the runner and the scheduling that this process's variables select.

    Raises:
        AssertionError: the engine has another runner or another scheduling.
    """
    has = {V2: vllm_config.use_v2_model_runner, AHEAD: vllm_config.scheduler_config.async_scheduling}
    for variable, value in has.items():
        wanted = os.environ.get(variable, "0") == "1"
        assert bool(value) == wanted, f"{variable}: expected {wanted}, got {value}"
