"""The simulated device gives CUDA's guarantees, and no others."""

from __future__ import annotations

import pytest
import torch

from tests.unit.device.simulated import DEVICE, POISON, Latest, ModelFirst, simulated_cuda


def pinned(n: int) -> torch.Tensor:
    return torch.zeros(n).pin_memory()


def test_a_result_is_there_only_after_a_wait():
    with simulated_cuda(Latest()) as device:
        out = pinned(4)
        there = torch.arange(4.0).pin_memory().to(DEVICE, non_blocking=True)
        out.copy_(there + 1, non_blocking=True)
        event = torch.cuda.Event()
        assert event.query()  # not recorded
        event.record()
        assert out.tolist() == [0, 0, 0, 0]
        assert not event.query()
        event.synchronize()
        assert event.query()
        assert out.tolist() == [1, 2, 3, 4]
        assert device.stalls == []


def test_only_an_event_orders_two_streams():
    for ordered in (True, False):
        with simulated_cuda(Latest()):
            out, side = pinned(2), torch.cuda.Stream(DEVICE)
            memory = torch.zeros(2, device=DEVICE)
            memory += 5
            if ordered:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                out.copy_(memory, non_blocking=True)
            side.synchronize()
            assert (out.tolist() == [5, 5]) is ordered


def test_memory_that_is_freed_is_used_again_in_its_own_streams_order():
    with simulated_cuda(ModelFirst()):
        side, out = torch.cuda.Stream(DEVICE), pinned(2)
        memory = torch.ones(2, device=DEVICE)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out.copy_(memory, non_blocking=True)
        del memory
        torch.cuda.current_stream().query()
        side.synchronize()
        assert out.view(torch.uint8).tolist() == [POISON] * 8
    with simulated_cuda(ModelFirst()):
        memory, out = torch.ones(2, device=DEVICE), pinned(2)
        out.copy_(memory, non_blocking=True)
        del memory
        torch.cuda.synchronize()
        assert out.tolist() == [1, 1]


def test_pageable_memory_and_blocking_copies_make_the_host_wait():
    with simulated_cuda(Latest()) as device:
        memory = torch.ones(2, device=DEVICE)
        assert memory.to("cpu").tolist() == [1, 1]
        pinned(2).copy_(memory)
        torch.zeros(2).to(DEVICE, non_blocking=True)
        assert len(device.stalls) == 3


def test_registered_host_memory_is_pinned():
    with simulated_cuda(Latest()) as device:
        memory = torch.zeros(8)
        assert torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0) == 0
        assert memory[2:5].is_pinned()
        memory[2:4].copy_(torch.ones(2, device=DEVICE), non_blocking=True)
        assert device.stalls == []
        assert memory.sum() == 0
        assert torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()) == 0
        assert torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()) != 0
        assert not memory.is_pinned()


def test_tensors_of_two_devices_do_not_mix():
    with simulated_cuda(Latest()), pytest.raises(RuntimeError, match="expected all tensors on cuda:1"):
        torch.ones(2, device=DEVICE) + torch.ones(2)
