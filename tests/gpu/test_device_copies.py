"""The worker half's copies on a real device, with a model that takes long to write its states."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from hsx_dist.connector.gather import block_runs, cache_order, mean_rows, page_shape, row_runs, to_device
from hsx_dist.connector.worker import pin, unpin
from tests.unit.device.request_runs import Run, requests

pytestmark = pytest.mark.gpu

#: Takes some milliseconds.
CYCLES = 5_000_000


class Cuda:
    """A GPU as ``Backend``."""

    def __init__(self, device: torch.device):
        self.device = device

    def put(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self.device)

    def before_forward(self) -> None:
        torch.cuda._sleep(CYCLES)

    def stuck(self) -> None:
        time.sleep(1e-3)

    def stalled(self) -> int:
        return 0


@contextmanager
def no_synchronization() -> Iterator[None]:
    """torch raises if an operation makes the host wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("ring_pages", [1, 4, 64])
@pytest.mark.parametrize("order", ["LTH", "TLH"])
@pytest.mark.parametrize("seed", range(2))
def test_states_are_those_that_the_model_wrote(cuda, seed, order, ring_pages):
    run = Run(Cuda(cuda), requests(seed, count=32), order=order, ring_pages=ring_pages)
    run.run()


def test_a_step_makes_the_host_wait_for_nothing(cuda):
    run = Run(Cuda(cuda), requests(0))
    step = run.worker.step

    def checked(meta):
        with no_synchronization():
            step(meta)

    run.worker.step = checked
    run.run()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("token_major", [False, True])
def test_gathers_are_those_of_the_host(cuda, token_major, dtype):
    torch.manual_seed(0)
    host = torch.randn(50, 4, 16, 2048).to(dtype)
    if token_major:
        host = host.transpose(1, 2).contiguous().transpose(1, 2)
    cache, order = host.to(cuda), cache_order(host)
    assert cache.stride() == host.stride()
    blocks, slots = torch.randperm(50)[:20], torch.randperm(800)[:300]
    for copy, shape in (
        (lambda c, out: block_runs(c, to_device(blocks, c.device), order).copy_to(out), page_shape(host, 20, order)),
        (lambda c, out: row_runs(c, to_device(slots, c.device), [3, 1]).copy_to(out), (2, 300, 2048)),
    ):
        found, expected = torch.empty(shape, dtype=dtype).pin_memory(), torch.empty(shape, dtype=dtype)
        copy(cache, found)
        copy(host, expected)
        torch.cuda.synchronize()
        assert torch.equal(found, expected)
    means = mean_rows(cache, slots.to(cuda), [0, 2]).cpu()
    torch.testing.assert_close(means, mean_rows(host, slots, [0, 2]), rtol=1e-5, atol=1e-5)


def test_registered_memory_is_pinned_and_can_be_registered_again(cuda):
    memory = torch.from_numpy(np.zeros(1 << 20, np.uint8))
    for _ in range(2):
        pin(memory)
        assert memory.is_pinned()
        unpin(memory)
    assert not memory.is_pinned()
