"""tests/gpu on the simulated device: what runs on a GPU alone is no untested code."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.gpu import test_device_copies as on_gpu
from tests.unit.device.simulated import DEVICE, Random, simulated_cuda

pytestmark = pytest.mark.slow

for _name, _test in vars(on_gpu).items():
    if _name.startswith("test_"):
        globals()[_name] = _test


@pytest.fixture
def cuda():
    """In the place of the GPU's. It progresses while the host does something else, as a GPU does."""
    with simulated_cuda(Random(0)) as device:
        ended = threading.Event()

        def progress() -> None:
            while not ended.wait(1e-4):
                device.tick()

        thread = threading.Thread(target=progress)
        thread.start()
        try:
            yield DEVICE
        finally:
            ended.set()
            thread.join()


def test_a_step_that_waits_is_noticed(cuda):
    with on_gpu.no_synchronization(), pytest.raises(RuntimeError, match="synchronizing"):
        torch.zeros(2).to(cuda)
