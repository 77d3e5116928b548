"""Rows put straight into the cache lie where vLLM's own writing puts them."""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.models.extract_hidden_states import basic_cache

from hsx_dist.connector.cache_writes import flat_rows, write_rows

BLOCKS, LAYERS, BLOCK, HIDDEN = 7, 3, 4, 8


def empty(order: str, padding: int = 0) -> torch.Tensor:
    """A cache in which rows that nobody wrote can be told; ``padding``: rows between two blocks."""
    per_block = (LAYERS * BLOCK + padding) * HIDDEN
    memory = torch.full((BLOCKS * per_block,), -1.0)
    inner = (BLOCK * HIDDEN, HIDDEN) if order == "LTH" else (HIDDEN, LAYERS * HIDDEN)
    return memory.as_strided((BLOCKS, LAYERS, BLOCK, HIDDEN), (per_block, *inner, 1))


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("order", ["LTH", "TLH"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_as_vllm_does(order: str, padding: int, dtype: torch.dtype) -> None:
    ours, theirs = empty(order, padding), empty(order, padding)
    slots = (torch.randperm((BLOCKS - 1) * BLOCK)[:17] + BLOCK).to(dtype)
    layers = [torch.randn(len(slots), HIDDEN) for _ in range(LAYERS)]
    write_rows(ours, slots, layers)
    basic_cache(torch.stack(layers, dim=1), theirs, slots.long())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_padding_goes_to_the_block_that_is_nobodys() -> None:
    cache = empty("LTH")
    slots = torch.tensor([9, -1, -1])
    write_rows(cache, slots, [torch.ones(3, HIDDEN)] * LAYERS)
    assert (cache[2, :, 1] == 1).all()
    cache[2, :, 1] = -1
    assert (cache[1:] == -1).all()


def test_rows_between_which_something_else_lies() -> None:
    odd = torch.zeros(4 * 100).as_strided((2, 2, 4, HIDDEN), (100, 48, 11, 1))
    with pytest.raises(ValueError, match="multiples of the rows' length 8"):
        flat_rows(odd)
