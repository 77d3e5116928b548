"""The operator that writes rows: eager, compiled, and its CUDA kernel in Triton's interpreter and compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context

from hsx_dist.taps import operator
from hsx_dist.taps.scatter import scatter
from tests.harness.exact_model import ROOT

BLOCK, WIDTH = 4, 6
NUMBER = operator.number_of(0, 1)  # the second layer of an engine's first cache


class Target:
    """An engine's cache and its step."""

    def __init__(self, layers_first: bool = True, layers: int = 3):
        shape = (5, layers, BLOCK, WIDTH) if layers_first else (5, BLOCK, layers, WIDTH)
        self.cache = torch.full(shape, -1.0)
        self.slots = {operator.layer_name(0): torch.tensor([7, -1, 18, 0, -1])}
        self.config = VllmConfig()
        self.kv_cache = self.cache if layers_first else self.cache.transpose(1, 2)
        self.config.compilation_config.static_forward_context[operator.layer_name(0)] = self

    def step(self, **more: Any) -> Any:
        return set_forward_context(None, self.config, slot_mapping=self.slots, **more)

    def check(self, x: torch.Tensor, at: int = 1) -> None:
        expected = torch.full((5, BLOCK, WIDTH), -1.0)
        expected[1, 3], expected[4, 2], expected[0, 0] = x[0], x[2], x[3]
        assert torch.equal(self.kv_cache[:, at], expected)
        self.kv_cache[:, at].fill_(-1)
        assert bool((self.cache == -1).all())  # other layers are unchanged


def counter() -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize("layers_first", [True, False])
def test_rows_go_to_their_slots(layers_first: bool) -> None:
    target, count = Target(layers_first), counter()
    x = torch.randn(7, 10)  # padded: more rows than slots
    with target.step():
        operator.tap(x, count, NUMBER, 3, WIDTH)
    target.check(x[:, 3:9])
    assert count.tolist() == [1, 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8])
def test_rows_of_every_size_of_number_keep_their_bits(dtype: torch.dtype) -> None:
    cache, count = torch.zeros(4, 3, BLOCK, WIDTH, dtype=dtype), counter()
    x = torch.randint(-99, 99, (6, WIDTH + 5)).to(dtype)[:, 2 : 2 + WIDTH]
    slots = torch.tensor([13, 2, 3, 8, 0, 15])
    scatter(x, slots, cache[:, 1], count)
    assert torch.equal(cache[slots // BLOCK, 1, slots % BLOCK], x)
    assert int((cache != 0).any(-1).sum()) == int((x != 0).any(-1).sum())
    scatter(x[:0], slots[:0], cache[:, 1], count)  # an empty step
    assert count.tolist() == [2, 6]


def test_heads_make_one_row_and_there_may_be_no_cache_or_no_slots_yet() -> None:
    target, count = Target(), counter()
    x = torch.randn(5, 3, 2)
    cache, target.kv_cache = target.kv_cache, torch.tensor([])
    with target.step():
        torch.ops.hsx_dist.tap(x, count, NUMBER, 0, WIDTH)
    target.kv_cache = cache
    with set_forward_context(None, target.config):
        torch.ops.hsx_dist.tap(x, count, NUMBER, 0, WIDTH)
    assert count.tolist() == [2, 0]
    with target.step():
        torch.ops.hsx_dist.tap(x, count, NUMBER, 0, WIDTH)
    target.check(x.reshape(5, WIDTH))
    assert count.tolist() == [3, 3]


def test_values_are_not_rounded_and_each_token_has_a_row_of_its_width() -> None:
    x, slots, count = torch.zeros(1, 2), torch.tensor([0]), counter()
    with pytest.raises(TypeError, match="bfloat16, got"):
        scatter(x, slots, torch.zeros(1, 1, 2, dtype=torch.bfloat16), count)
    with pytest.raises(TypeError, match="int32, got"):
        scatter(x, slots, torch.zeros(1, 1, 2, dtype=torch.int32), count)
    with pytest.raises(ValueError, match="rows of 3 numbers, got 2"):
        scatter(x, slots, torch.zeros(1, 1, 3), count)
    with pytest.raises(ValueError, match=r"each of 2 tokens, got 1\. .*only some tokens"):  # sequence parallelism
        scatter(x, torch.tensor([0, 1]), torch.zeros(1, 2, 2), count)
    assert count.tolist() == [0, 0]
    scatter(x.bfloat16(), slots, torch.ones(1, 1, 2), count)
    scatter(x.long(), slots, torch.ones(1, 1, 2, dtype=torch.int32), count)


def test_engines_of_one_process_share_nothing() -> None:
    """Two models with equal numbers: each writes into its own engine's cache, in any order, also nested."""
    one, two = Target(), Target()
    x, y = torch.randn(5, WIDTH), torch.randn(5, WIDTH)
    with one.step():
        with two.step():
            operator.tap(y, counter(), NUMBER, 0, WIDTH)
        operator.tap(x, counter(), NUMBER, 0, WIDTH)
    one.check(x)
    two.check(y)


def test_a_step_of_two_batches_is_refused() -> None:
    target = Target()
    with (
        set_forward_context(None, target.config, slot_mapping=[target.slots] * 2),
        pytest.raises(RuntimeError, match=r"one batch a step, got 2 \(DBO\)"),
    ):
        operator.tap(torch.zeros(5, WIDTH), counter(), NUMBER, 0, WIDTH)


class Block(nn.Module):
    """A module with a tap on a tensor that nothing reads later."""

    def __init__(self, at: int):
        super().__init__()
        self.register_buffer("hsx_count_p", counter(), persistent=False)
        self.register_buffer("hsx_number_p", operator.number_of(0, at), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        operator.put(self, "p", x * 2, 0, WIDTH)
        return x + 1


@pytest.mark.slow
def test_a_compiled_tap_is_kept_and_equal_layers_share_one_graph() -> None:
    target = Target()
    graphs = count()
    codes: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        next(graphs)
        codes.append(graph.code)
        return torch._inductor.compile(graph, inputs)

    x = torch.randn(5, WIDTH)
    for at in range(2):
        layer = Block(at)
        torch.compiler.reset()
        compiled = torch.compile(layer, backend=backend)
        with torch.no_grad(), target.step():
            assert torch.equal(compiled(x), x + 1)
            assert torch.equal(compiled(x), x + 1)
        target.check(x * 2, at)
        assert layer.hsx_count_p.tolist() == [2, 6]
    assert codes[0] == codes[1]  # the graph has no layer number as a constant


_INTERPRETED = """
import torch
from hsx_dist.taps.scatter import _scatter_cpu
from hsx_dist.taps.triton_scatter import scatter_triton
torch.manual_seed(0)
for n, width, block, dtype in [(1, 1, 1, torch.float32), (9, 64, 4, torch.float32), (13, 1500, 8, torch.float32),
                               (6, 8, 4, torch.int32), (5, 33, 4, torch.float16), (7, 40, 4, torch.bfloat16)]:
    for token_major in (False, True):
        slots = torch.randperm(12 * block)[:n] - 2
        x = torch.randint(-99, 99, (n, width + 7)).to(dtype)[:, 3:3 + width]
        caches = []
        for scatter in (_scatter_cpu, scatter_triton):
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


#: Compiles the kernel for one kind of GPU. Needs no GPU, and Triton's own NVIDIA back end.
_COMPILED = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from hsx_dist.taps.triton_scatter import _kernel
sizes = ("n", "width", "block", "x_stride", "block_stride", "token_stride")
pointers = {"x": "*" + sys.argv[1], "slots": "*i64", "cache": "*" + sys.argv[1], "count": "*i64"}
signature = pointers | dict.fromkeys(sizes, "i32") | dict.fromkeys(("ROWS", "COLUMNS"), "constexpr")
source = ASTSource(_kernel, signature, constexprs={"ROWS": 4, "COLUMNS": 1024})
print(compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "i32"])
def test_triton_compiles_the_kernel_for_a_gpu(dtype: str, tmp_path: Path) -> None:
    """Triton's interpreter accepts kernels that its compiler refuses."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    argv = [sys.executable, "-c", _COMPILED, dtype]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=200)
    assert "sm_90" in done.stdout, done.stderr
