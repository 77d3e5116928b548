"""A GPU's defaults on a CPU: the V2 model runner with asynchronous scheduling (``tests.harness.gpu_defaults``).

``make matrix`` runs both runners, with and without asynchronous scheduling, and with two tensor-parallel ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.harness.gpu_defaults import gpu_defaults


def test_exact_numbers_with_the_v2_runner_and_asynchronous_scheduling(tmp_path):
    """One engine: chunked prefill, prefix hits, generated tokens, preemption."""
    tests = ["test_exact_numbers.py", "-k", "not constant and not direct"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=Path(__file__).parent,
        env={**os.environ, **gpu_defaults(tmp_path / "plugins")},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert "8 passed" in done.stdout
