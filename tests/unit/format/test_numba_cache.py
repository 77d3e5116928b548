"""numba unpickles its cache: a folder that another user can write is not used."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numba
import pytest
from numba.core import caching

from hsx_dist.format.codecs import huffman


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder of this user that other users can enter: pytest's own are private."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize("mode", [0o1777, 0o770, 0o757, 0o730])
def test_a_given_folder_that_others_can_write_is_no_cache(
    public: Path, monkeypatch: pytest.MonkeyPatch, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = public / "numba"
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder))
    assert huffman._caches()
    folder.chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert not huffman._caches()
    assert "which another user can write or replace" in caplog.text


def test_the_folder_that_numba_makes_is_checked_too(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = public / "numba"
    folder.mkdir(mode=0o755)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder))
    before = os.umask(0o002)
    try:
        assert not huffman._caches()
        folder.chmod(0o700)  # nobody else can enter it
        assert huffman._caches()
    finally:
        os.umask(before)


def test_the_users_own_cache_is_checked_too(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [caching.UserWideCacheLocator])
    monkeypatch.setenv("XDG_CACHE_HOME", str(public / "xdg"))
    assert huffman._caches()
    (public / "xdg").chmod(0o775)  # members of the group can put another folder in the place of numba's
    assert not huffman._caches()


@pytest.mark.slow
def test_a_folder_that_all_users_can_write_is_no_cache(public: Path) -> None:
    folder = public / "numba"
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
    assert "expected a cache of numba that only this user can write" in done.stderr
