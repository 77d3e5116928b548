"""Distribute these tests on a machine of two cores: ``pytest -n 2 --dist loadfile``. A file's engine starts once."""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

#: Files that take minutes, longest first. A long file that begins last would leave a core idle.
_LONG = ("test_resume", "test_nodes_of_a_run")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _LONG.index(item.path.stem) if item.path.stem in _LONG else len(_LONG))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # by number of tests, the files that take longest would be last
    return LoadFileScheduling(config, log)
