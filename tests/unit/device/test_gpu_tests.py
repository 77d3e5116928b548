"""tests/gpu on the simulated device, so that code that runs only on a GPU is tested, too."""

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
    """Replaces the GPU's fixture. The device progresses while the host does something else, like a GPU."""
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
