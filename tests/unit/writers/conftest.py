from __future__ import annotations

from pathlib import Path

import pytest

from hsx_dist.format.runs import take_attempt
from hsx_dist.store.local import LocalStore
from tests.harness.runs import write_v1_run


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A run whose first attempt has begun."""
    store = LocalStore(tmp_path)
    write_v1_run(store, {})
    assert take_attempt(store, {}) == 1
    return store
