"""The connection to a Ray cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from hsx_dist.jobs.connect import connect_ray


@pytest.mark.parametrize("address", [None, "", "local", "10.0.0.1:6379"])
def test_processes_of_a_local_cluster_do_not_search_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda address, **_: asked.append(address))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # "" is the working folder
    monkeypatch.chdir(tmp_path)
    for name in ("PYTHONSAFEPATH", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    connect_ray()
    assert asked == [address or "local"]
    assert os.environ.get("PYTHONSAFEPATH") == (None if address == "10.0.0.1:6379" else "1")
