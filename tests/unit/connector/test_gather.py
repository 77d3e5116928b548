from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsx_dist.connector.gather import block_runs, cache_order, page_shape, row_runs

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
    block_runs(cache, ids, order).copy_to(out)
    expected = cache[ids].permute(1, 0, 2, 3).reshape(LAYERS, 4 * BLOCK, HIDDEN)
    assert torch.equal(out if order == "LTH" else out.permute(1, 0, 2), expected)


@pytest.mark.parametrize("order", ["LTH", "TLH"])
def test_too_few_blocks_leave_no_earlier_bytes_in_a_page(order):
    cache = cache_view(order, torch.float32)
    out = torch.full(page_shape(cache, 3, order), 7.0)
    for ids in ([], [3], [3, 1], [3, 1, 4, 2]):
        runs = block_runs(cache, torch.tensor(ids, dtype=torch.int64), order)
        with pytest.raises(ValueError, match=f"expected blocks with {out.numel()} values, got {cache[ids].numel()}"):
            runs.copy_to(out)
    assert bool((out == 7).all())


def test_one_layer_and_one_token_a_block_are_read_either_way():
    for shape in [(5, 1, 4, 8), (5, 3, 1, 8), (5, 1, 1, 8)]:
        cache = torch.randn(shape)
        order = cache_order(cache)
        out = torch.empty(page_shape(cache, 2, order))
        block_runs(cache, torch.tensor([4, 1]), order).copy_to(out)
        got = out if order == "LTH" else out.permute(1, 0, 2)
        assert torch.equal(got, cache[[4, 1]].permute(1, 0, 2, 3).reshape(shape[1], -1, 8))


def test_an_unknown_layout_is_refused_with_its_strides():
    cache = torch.randn(BLOCKS, LAYERS, HIDDEN, BLOCK).transpose(2, 3)
    with pytest.raises(ValueError, match="strides"):
        cache_order(cache)


@st.composite
def caches(draw):
    """A view over numbered memory: any small shape, either order, padding after tokens, layers and blocks."""
    blocks, layers, block = draw(st.integers(1, 9)), draw(st.integers(1, 5)), draw(st.integers(1, 8))
    hidden = draw(st.sampled_from([1, 8, 24, 4096, 20_000]))  # the large ones are cut into runs
    if hidden > 24:
        blocks, layers, block = min(blocks, 3), min(layers, 2), min(block, 4)
    order = draw(st.sampled_from(["LTH", "TLH"]))
    pad_run, pad_block, offset = (draw(st.sampled_from([0, 0, 8, 13])) for _ in range(3))
    if order == "LTH":
        s_token, s_layer = hidden, block * hidden + pad_run
        s_block = layers * s_layer + pad_block
    else:
        s_layer, s_token = hidden, layers * hidden + pad_run
        s_block = block * s_token + pad_block
    # Memory ends with the last row: padding behind it must not be read.
    size = (blocks - 1) * s_block + (layers - 1) * s_layer + (block - 1) * s_token + hidden
    memory = torch.arange(offset + size, dtype=torch.int32)
    return memory.as_strided((blocks, layers, block, hidden), (s_block, s_layer, s_token, 1), offset)


def rows_of(cache: torch.Tensor) -> torch.Tensor:
    """``[L, slots, H]`` by plain indexing."""
    blocks, layers, block, hidden = cache.shape
    return cache.permute(1, 0, 2, 3).reshape(layers, blocks * block, hidden)


@settings(deadline=None, max_examples=75)
@given(caches(), st.data())
def test_any_blocks_of_any_layout_equal_plain_indexing(cache, data):
    ids = torch.tensor(data.draw(st.lists(st.integers(0, cache.shape[0] - 1), max_size=12)), dtype=torch.int64)
    order = cache_order(cache)
    out = torch.full(page_shape(cache, len(ids), order), -1, dtype=cache.dtype)
    block_runs(cache, ids, order).copy_to(out)
    expected = cache[ids].permute(1, 0, 2, 3).reshape(cache.shape[1], -1, cache.shape[3])
    assert torch.equal(out if order == "LTH" else out.permute(1, 0, 2), expected)


@settings(deadline=None, max_examples=75)
@given(caches(), st.data())
def test_any_rows_of_any_layers_equal_plain_indexing(cache, data):
    blocks, layers, block, hidden = cache.shape
    slots = torch.tensor(data.draw(st.lists(st.integers(0, blocks * block - 1), max_size=20)), dtype=torch.int64)
    wanted = data.draw(st.lists(st.integers(0, layers - 1), max_size=7))
    out = torch.full((len(wanted), len(slots), hidden), -1, dtype=cache.dtype)
    row_runs(cache, slots, wanted).copy_to(out)
    assert torch.equal(out, rows_of(cache)[wanted][:, slots])


@settings(deadline=None, max_examples=75)
@given(caches(), st.data())
def test_pages_that_are_gathered_at_once_equal_single_pages(cache, data):
    per, pages, before = (data.draw(st.integers(1, 3)) for _ in range(3))
    units = st.integers(0, cache.shape[0] - 1)
    ids = torch.tensor(data.draw(st.lists(units, min_size=before + per * pages, max_size=20)), dtype=torch.int64)
    order = cache_order(cache)
    if data.draw(st.booleans()):
        runs, shape = block_runs(cache, ids, order), page_shape(cache, per, order)
    else:
        runs, shape = row_runs(cache, ids, [0, cache.shape[1] - 1]), (2, per, cache.shape[3])
    outs = [torch.full(shape, -1, dtype=cache.dtype) for _ in range(pages)]
    runs.copy_to(*outs, start=before, stop=before + per * pages)
    for i, out in enumerate(outs):
        alone = torch.full(shape, -2, dtype=cache.dtype)
        runs.copy_to(alone, start=before + i * per, stop=before + (i + 1) * per)
        assert torch.equal(out, alone)


@pytest.mark.parametrize("order", ["LTH", "TLH"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_of_every_slot_and_every_single_layer(order, dtype):
    cache = cache_view(order, dtype)
    for slot in range(BLOCKS * BLOCK):
        for layer in range(LAYERS):
            out = torch.empty((1, 1, HIDDEN), dtype=dtype)
            row_runs(cache, torch.tensor([slot]), [layer]).copy_to(out)
            assert torch.equal(out[0, 0], cache[slot // BLOCK, layer, slot % BLOCK])


def test_a_layer_that_is_not_there_and_rows_with_gaps_are_refused():
    cache = cache_view("LTH", torch.float32)
    for layer in (-1, LAYERS):
        with pytest.raises(ValueError, match="layer positions"):
            row_runs(cache, torch.tensor([0]), [0, layer])
    with pytest.raises(ValueError, match="contiguous"):
        row_runs(cache.transpose(2, 3), torch.tensor([0]), [0])


def test_the_caches_own_memory_is_not_touched_and_no_row_beyond_it_is_read():
    """The indexed view overlaps itself and ends with the cache's last element: an id too large is an error."""
    for order in ("LTH", "TLH"):
        cache = cache_view(order, torch.float32, pad=16)
        before = cache.clone()
        out = torch.empty(page_shape(cache, 1, order))
        block_runs(cache, torch.tensor([BLOCKS - 1]), order).copy_to(out)
        with pytest.raises(IndexError):
            block_runs(cache, torch.tensor([BLOCKS]), order).copy_to(out)
        assert torch.equal(cache, before)


@pytest.mark.slow
def test_gathering_needs_no_vllm():
    code = "import hsx_dist.connector.gather, sys; print(*sorted({'ray', 'vllm', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []
