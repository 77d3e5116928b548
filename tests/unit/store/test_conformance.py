from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from hsx_dist.store import Store, open_store
from hsx_dist.store.local import LocalStore
from hsx_dist.store.obstore import ObstoreStore
from hsx_dist.store.retry import RetryStore
from hsx_dist.testing.store_suite import StoreSuite


class TestLocalStore(StoreSuite):
    racers = 16

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "made" / "by the first put")


class TestOpenedFile(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(f"file://{tmp_path}/run")


class TestFileThroughObstore(StoreSuite):
    racers = 16
    has_conditional_deletes = has_conditional_puts = False

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return RetryStore(ObstoreStore(f"file://{tmp_path}/made/by the first put"))


class TestMemory(StoreSuite):
    racers = 16
    has_conditional_deletes = has_conditional_puts = False

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        name = f"/hsx-{uuid.uuid4().hex}"
        yield open_store(f"memory:/{name}/run")
        fs = fsspec.filesystem("memory")
        for path in [p for p in fs.store if p.startswith(name)]:
            del fs.store[path]
