"""A full disk: proven samples stay, no half-written file stays, and with more space the run continues."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
APART = ["unshare", "--user", "--map-root-user", "--mount"]


def may_mount() -> bool:
    """Whether this machine allows a user to make a mount namespace (containers often do not)."""
    try:
        return subprocess.run([*APART, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not may_mount(), reason="the kernel gives no mount namespace; test_pool_faults has a file's limit")
@pytest.mark.parametrize(
    "part_bytes", [500_000, 3_000_000], ids=["parts of one sample", "parts of five, past the page cache"]
)
def test_a_disk_that_is_full(tmp_path, part_bytes):
    argv = [*APART, sys.executable, "-m", "tests.unit.writers.on_a_small_disk", str(tmp_path), str(part_bytes)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fatal"]
    assert all("Free some space" in reason for reason in found["fatal"])
    assert 0 < found["proven"] < 24
    assert found["broken_files"] == []
    assert found["as_sent"]
    assert found["lost_later"] == []
    assert found["proven_later"] == 24
    assert found["as_sent_later"]
