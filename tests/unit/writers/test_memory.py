from __future__ import annotations

import subprocess
import sys

import pytest

from hsx_dist.writers import memory

CODE = """
import resource, sys, numpy as np
from hsx_dist.writers.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory(1 << 30)
def part():
    for x in [np.empty(1 << 20, np.uint8) for _ in range(100)]:
        x[:] = 1
part()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
part()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(word: str) -> int:
    done = subprocess.run([sys.executable, "-c", CODE, word], capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout)


def test_memory_that_was_freed_is_not_faulted_in_again() -> None:
    assert faults("keep") < faults("default") / 10


def test_another_c_library_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: object())
    assert not memory.keep_freed_memory(1 << 20)
