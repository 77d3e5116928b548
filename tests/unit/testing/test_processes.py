"""Child processes end with all their descendants, and report why they did not start."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hsx_dist.jobs.kit.process import StartFailed, child
from tests.harness.processes import free_ports


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_free_ports_differ_and_so_do_their_twins() -> None:
    ports = free_ports(20, twin=10000)
    assert len({*ports, *(p + 10000 for p in ports)}) == 40


def test_two_processes_with_the_same_seed_get_different_ports() -> None:
    """vLLM seeds ``random`` with 0 in each process that has an engine."""
    random.seed(0)
    mine = free_ports(50)
    code = "import random; from tests.harness.processes import free_ports; random.seed(0); print(*free_ports(50))"
    theirs = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert len(theirs) == 50
    assert not set(mine) & set(map(int, theirs))


def test_terminate_ends_what_left_the_group(tmp_path: Path) -> None:
    script = f"setsid sleep 60 & echo $! > {tmp_path}/pid; sleep 60"
    with child(["sh", "-c", script], log=tmp_path / "log") as running:
        running.wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "", 10)
        grandchild = int((tmp_path / "pid").read_text())
        time.sleep(0.1)
        assert is_running(grandchild)
        running.terminate(5)
    for _ in range(50):
        if not is_running(grandchild):
            break
        time.sleep(0.05)
    assert not is_running(grandchild)
    assert not is_running(running.pid)


def test_a_process_that_ends_early_shows_its_log(tmp_path: Path) -> None:
    broken = child(["sh", "-c", "echo no such disk; exit 3"], log=tmp_path / "log")
    with pytest.raises(StartFailed, match=r"(?s)ended with status 3.*no such disk"), broken as running:
        running.wait_until(lambda: False, 10)


def test_none_takes_a_variable_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSX_ONE", "1")
    with child(
        ["sh", "-c", "echo [$HSX_ONE$HSX_TWO]"], log=tmp_path / "log", env={"HSX_ONE": None, "HSX_TWO": "2"}
    ) as p:
        assert p.process.wait(10) == 0
    assert (tmp_path / "log").read_text() == "[2]\n"
    assert os.environ["HSX_ONE"] == "1"
