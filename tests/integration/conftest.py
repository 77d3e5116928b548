"""Distribute these tests on a machine of two cores: ``pytest -n 2 --dist loadfile``."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).resolve().parents[2]


class _OneClusterAtATime(LoadFileScheduling):
    """A file's tests run in one process, so that its engine starts once. All files that start Ray run in one process:
    clusters take their workers' ports from the same range.
    """

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "Ray" if _starts_ray(file) else file


@cache
def _starts_ray(file: str) -> bool:
    return re.search(r"^\s*import ray$|\bray_(head|cluster)\b", (ROOT / file).read_text(), re.MULTILINE) is not None


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return _OneClusterAtATime(config, log) if config.getvalue("dist") == "loadfile" else None
