"""A process that the modes of files apply to, also if the tests run as root."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

__all__ = ["OTHER", "as_a_user", "as_root"]

#: Number of a user that has no processes.
OTHER = 1234
#: Root passes every permission check by its capabilities. Without them it is a file's owner like any other user.
_WITHOUT_CAPABILITIES = """
import ctypes, os, sys
if os.geteuid() == 0 and ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()):
    raise OSError("capset failed")
"""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")


def as_a_user(code: str, *arguments: str) -> tuple[str, str]:
    """Run ``code`` in a process that permissions apply to. Returns (stdout, stderr)."""
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_CAPABILITIES + code, *arguments], capture_output=True, text=True, timeout=120
    )
    return done.stdout, done.stderr
