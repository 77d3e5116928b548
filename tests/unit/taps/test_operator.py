"""The operator that writes rows: eager, compiled, and its CUDA kernel in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

from hsx_dist.taps import operator
from tests.harness.exact_model import ROOT

BLOCK, WIDTH = 4, 6


class Target:
    def __init__(self, layers_first: bool = True, layers: int = 3):
        shape = (5, layers, BLOCK, WIDTH) if layers_first else (5, BLOCK, layers, WIDTH)
        self.cache = torch.full(shape, -1.0)
        self.view = (self.cache if layers_first else self.cache.transpose(1, 2))[:, 1]
        self.slots: torch.Tensor | None = torch.tensor([7, -1, 18, 0, -1])
        self.ready = True

    def rows(self) -> Any:
        return (self.view, self.slots) if self.ready else (None, None)

    def check(self, x: torch.Tensor) -> None:
        expected = torch.full((5, BLOCK, WIDTH), -1.0)
        expected[1, 3], expected[4, 2], expected[0, 0] = x[0], x[2], x[3]
        assert torch.equal(self.view, expected)
        self.view.fill_(-1)
        assert bool((self.cache == -1).all())  # other layers are untouched


def numbers(target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, dtype=torch.int64), torch.tensor([operator.register(target)])


@pytest.mark.parametrize("layers_first", [True, False])
def test_rows_go_to_their_slots(layers_first: bool) -> None:
    target = Target(layers_first)
    counter, number = numbers(target)
    x = torch.randn(7, 10)  # padded: more rows than slots
    operator.tap(x, counter, number, 3, WIDTH)
    target.check(x[:, 3:9])
    assert counter.tolist() == [1, 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8])
def test_rows_of_every_size_of_number_keep_their_bits(dtype: torch.dtype) -> None:
    cache, counter = torch.zeros(4, 3, BLOCK, WIDTH, dtype=dtype), torch.zeros(2, dtype=torch.int64)
    x = torch.randint(-99, 99, (6, WIDTH + 5)).to(dtype)[:, 2 : 2 + WIDTH]
    slots = torch.tensor([13, 2, 3, 8, 0, 15])
    operator.scatter(x, slots, cache[:, 1], counter)
    assert torch.equal(cache[slots // BLOCK, 1, slots % BLOCK], x)
    assert int((cache != 0).any(-1).sum()) == int((x != 0).any(-1).sum())
    operator.scatter(x[:0], slots[:0], cache[:, 1], counter)  # an empty step
    assert counter.tolist() == [2, 6]


def test_heads_make_one_row_and_there_may_be_no_cache_yet() -> None:
    target = Target()
    counter, number = numbers(target)
    target.ready = False
    x = torch.randn(5, 3, 2)
    torch.ops.hsx_dist.tap(x, counter, number, 0, WIDTH)
    assert counter.tolist() == [1, 0]
    target.ready = True
    torch.ops.hsx_dist.tap(x, counter, number, 0, WIDTH)
    target.check(x.reshape(5, WIDTH))
    assert counter.tolist() == [2, 3]


def test_values_are_not_rounded_and_rows_have_their_width() -> None:
    x, slots, counter = torch.zeros(1, 2), torch.tensor([0]), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(TypeError, match="bfloat16, got"):
        operator.scatter(x, slots, torch.zeros(1, 1, 2, dtype=torch.bfloat16), counter)
    with pytest.raises(TypeError, match="int32, got"):
        operator.scatter(x, slots, torch.zeros(1, 1, 2, dtype=torch.int32), counter)
    with pytest.raises(ValueError, match="rows of 3, got 2"):
        operator.scatter(x, slots, torch.zeros(1, 1, 3), counter)
    operator.scatter(x.bfloat16(), slots, torch.ones(1, 1, 2), counter)
    operator.scatter(x.long(), slots, torch.ones(1, 1, 2, dtype=torch.int32), counter)


def test_a_target_is_freed_with_its_model() -> None:
    """Each has an engine's cache: a process that makes one engine after the other would keep them all."""
    target = Target()
    gone, number = weakref.ref(target), operator.register(target)
    assert operator._targets[number] is target
    del target
    assert gone() is None
    assert number not in operator._targets


class Block(nn.Module):
    """A module with a tap on a tensor that nothing reads later."""

    def __init__(self, target: Target):
        super().__init__()
        counter, number = numbers(target)
        self.register_buffer("hsx_count_p", counter, persistent=False)
        self.register_buffer("hsx_number_p", number, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        operator.put(self, "p", x * 2, 0, WIDTH)
        return x + 1


@pytest.mark.slow
def test_a_compiled_tap_is_kept_and_equal_layers_share_one_graph() -> None:
    targets = [Target(), Target()]
    layers = [Block(t) for t in targets]
    graphs = count()
    codes: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        next(graphs)
        codes.append(graph.code)
        return torch._inductor.compile(graph, inputs)

    x = torch.randn(5, WIDTH)
    for layer, target in zip(layers, targets, strict=True):
        torch.compiler.reset()
        compiled = torch.compile(layer, backend=backend)
        with torch.no_grad():
            assert torch.equal(compiled(x), x + 1)
            assert torch.equal(compiled(x), x + 1)
        target.check(x * 2)
        assert layer.hsx_count_p.tolist() == [2, 6]
    assert codes[0] == codes[1]  # no number of a layer is a constant of the graph


_INTERPRETED = """
import torch
from hsx_dist.taps import operator
from hsx_dist.taps.triton_scatter import scatter_triton
torch.manual_seed(0)
for n, width, block, dtype in [(1, 1, 1, torch.float32), (9, 64, 4, torch.float32), (13, 1500, 8, torch.float32),
                               (6, 8, 4, torch.int32), (5, 33, 4, torch.float16), (7, 40, 4, torch.bfloat16)]:
    for token_major in (False, True):
        slots = torch.randperm(12 * block)[:n] - 2
        x = torch.randint(-99, 99, (n, width + 7)).to(dtype)[:, 3:3 + width]
        caches = []
        for scatter in (operator._scatter_cpu, scatter_triton):
            cache = torch.zeros((12, block, 3, width) if token_major else (12, 3, block, width), dtype=dtype)
            view = (cache.transpose(1, 2) if token_major else cache)[:, 1]
            counter = torch.tensor([5, 7])
            scatter(x, slots, view, counter)
            assert counter.tolist() == [6, 7 + int((slots >= 0).sum())], counter
            caches.append(cache)
        assert torch.equal(*caches), (n, width, dtype)
        assert caches[0].any()
print("equal")
"""


@pytest.mark.slow
def test_the_cuda_kernel_writes_the_same_in_tritons_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _INTERPRETED], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.stdout.endswith("equal\n"), done.stderr
