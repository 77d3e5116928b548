"""``tests.harness.gpu_defaults``: the defaults of a process with its variables."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.harness.gpu_defaults import check_defaults, gpu_defaults

PROBE = """
from vllm.plugins import load_general_plugins
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from types import SimpleNamespace
load_general_plugins()
print(HAS_TRITON, hasattr(type(current_platform).check_and_update_config, "hsx"))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("v2", "ahead"), [pytest.param(False, True, marks=pytest.mark.soak), (True, False)])
def test_a_process_has_triton_for_the_v2_runner_and_schedules_ahead_as_asked(tmp_path, v2, ahead):
    env = {**os.environ, **gpu_defaults(tmp_path, v2=v2, ahead=ahead)}
    done = subprocess.run([sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{v2} {ahead}"


def test_an_engine_of_another_runner_or_scheduling_is_noticed(tmp_path, monkeypatch):
    def config(v2: bool, ahead: bool):
        return SimpleNamespace(use_v2_model_runner=v2, scheduler_config=SimpleNamespace(async_scheduling=ahead))

    check_defaults(config(False, False))  # no variables: a CPU's defaults
    for name, value in gpu_defaults(tmp_path, v2=True, ahead=True).items():
        monkeypatch.setenv(name, value)
    check_defaults(config(True, True))
    for v2, ahead in ((False, True), (True, False)):
        with pytest.raises(AssertionError, match="expected True, got False"):
            check_defaults(config(v2, ahead))
