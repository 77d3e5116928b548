from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from hsx_dist.config import InputConfig
from hsx_dist.inputs import rows
from hsx_dist.inputs.listing import find_input
from hsx_dist.inputs.records import RecordBatch, read_batches


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read every input in this process, where limits can be lowered and memory can be measured."""

    def read(config: InputConfig, _: Any, columns: Sequence[str], needed: Sequence[str]) -> Iterator[RecordBatch]:
        return read_batches(find_input(config), columns, needed)

    monkeypatch.setattr(rows, "read_in_child", read)
