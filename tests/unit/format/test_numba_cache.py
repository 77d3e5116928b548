"""numba unpickles its cache: a folder that another user can write is not used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_folder_that_all_users_can_write_is_no_cache(tmp_path: Path) -> None:
    folder = tmp_path / "numba"
    folder.mkdir()
    folder.chmod(0o1777)
    done = subprocess.run(
        [sys.executable, "-c", "from hsx_dist.format.codecs import huffman"],
        capture_output=True,
        text=True,
        env={**os.environ, "NUMBA_CACHE_DIR": str(folder)},
        timeout=300,
        check=True,
    )
    assert list(folder.iterdir()) == []
    assert "expected a folder that only this user can write" in done.stderr
