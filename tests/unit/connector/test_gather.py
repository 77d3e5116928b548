from __future__ import annotations

import pytest
import torch

from hsx_dist.connector.gather import cache_order, gather, page_shape

BLOCKS, LAYERS, BLOCK, HIDDEN = 11, 3, 4, 8


def cache_view(order: str, dtype: torch.dtype, pad: int = 0) -> torch.Tensor:
    """A view [blocks, layers, block, hidden] over memory of either order, each block followed by ``pad`` elements."""
    size = LAYERS * BLOCK * HIDDEN + pad
    memory = torch.arange(BLOCKS * size, dtype=torch.float32).to(dtype)
    inner = (BLOCK * HIDDEN, HIDDEN) if order == "LTH" else (HIDDEN, LAYERS * HIDDEN)
    return memory.as_strided((BLOCKS, LAYERS, BLOCK, HIDDEN), (size, *inner, 1))


@pytest.mark.parametrize("order", ["LTH", "TLH"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("pad", [0, 16])
def test_gathers_the_rows_of_each_block_in_order(order, dtype, pad):
    cache = cache_view(order, dtype, pad)
    assert cache_order(cache) == order
    ids = torch.tensor([7, 0, 10, 3])
    out = torch.empty(page_shape(cache, 4, order), dtype=dtype)
    gather(cache, ids, out, order)
    expected = cache[ids].permute(1, 0, 2, 3).reshape(LAYERS, 4 * BLOCK, HIDDEN)
    assert torch.equal(out if order == "LTH" else out.permute(1, 0, 2), expected)


def test_one_layer_and_one_token_a_block_are_read_either_way():
    for shape in [(5, 1, 4, 8), (5, 3, 1, 8), (5, 1, 1, 8)]:
        cache = torch.randn(shape)
        order = cache_order(cache)
        out = torch.empty(page_shape(cache, 2, order))
        gather(cache, torch.tensor([4, 1]), out, order)
        got = out if order == "LTH" else out.permute(1, 0, 2)
        assert torch.equal(got, cache[[4, 1]].permute(1, 0, 2, 3).reshape(shape[1], -1, 8))


def test_an_unknown_layout_is_refused_with_its_strides():
    cache = torch.randn(BLOCKS, LAYERS, HIDDEN, BLOCK).transpose(2, 3)
    with pytest.raises(ValueError, match="strides"):
        cache_order(cache)
