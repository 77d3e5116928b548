"""Items that are in memory together: never more than a number, nor more than the limit of bytes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hsx_dist.reading.groups import groups
from tests.harness.traced_memory import trace_memory


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("hsx_dist.reading.groups.GROUP_BYTES", 1 << 20)
    return 1 << 20


def item(nbytes: int) -> dict[str, Any]:
    return {"key": "a", "hidden_states": np.zeros(nbytes // 2, np.uint8), "input_ids": torch.zeros(nbytes // 16).long()}


@pytest.mark.parametrize(
    ("sizes", "most", "expected"),
    [
        ([16] * 5, 2, [2, 2, 1]),
        ([1 << 19] * 5, 64, [2, 2, 1]),
        ([16, 1 << 22, 1 << 22, 16, 16], 64, [1, 1, 1, 2]),
        ([1 << 22], 1, [1]),
        ([], 4, []),
    ],
)
def test_a_group_ends_by_number_and_by_bytes(sizes: list[int], most: int, expected: list[int]) -> None:
    assert [len(group) for group in groups(map(item, sizes), most)] == expected


@pytest.mark.traced
def test_one_group_and_the_next_item_are_in_memory(limit: int) -> None:
    def made() -> Iterator[dict[str, Any]]:
        for _ in range(32):
            yield {"hidden_states": np.zeros(limit // 4, np.uint8)}

    trace_memory()
    assert [len(group) for group in groups(made(), 64)] == [4] * 8
    assert tracemalloc.get_traced_memory()[1] < 1.5 * limit
