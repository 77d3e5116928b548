"""Processes load no shared libraries from their working folder."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hsx_dist.library_path import search_no_working_folder

NAME = "LD_LIBRARY_PATH"


@pytest.mark.parametrize(
    ("before", "after"), [(None, "/dev/null"), ("", "/dev/null"), (":/a::/b;", "/a:/b"), ("/a", "/a")]
)
def test_no_entry_is_empty(before: str | None, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, before or "")
    if before is None:
        monkeypatch.delenv(NAME)
    search_no_working_folder()
    assert os.environ[NAME] == after


def test_an_import_of_cv2_adds_no_empty_entry() -> None:
    """vLLM imports cv2, which puts its folder and a colon before the variable."""
    code = (
        "import os; from hsx_dist.library_path import search_no_working_folder; search_no_working_folder(); "
        f"import cv2; print(os.environ['{NAME}'])"
    )
    env = {name: value for name, value in os.environ.items() if name != NAME}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    entries = done.stdout.strip().split(":")
    assert "/dev/null" in entries
    assert all(entries)
