"""tests/gpu on the simulated device: what runs on a GPU alone is no untested code."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import test_copies as on_gpu
from tests.unit.device.simulated import DEVICE, Random, simulated_cuda

pytestmark = pytest.mark.slow

for _name, _test in vars(on_gpu).items():
    if _name.startswith("test_"):
        globals()[_name] = _test


@pytest.fixture
def cuda():
    """In the place of the GPU's."""
    with simulated_cuda(Random(0)) as device:
        yield DEVICE
        assert device.streams


def test_a_step_that_waits_is_noticed(cuda):
    with on_gpu.no_synchronization(), pytest.raises(RuntimeError, match="synchronizing"):
        torch.zeros(2).to(cuda)
