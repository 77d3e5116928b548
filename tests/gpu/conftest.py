"""Tests that need a CUDA device, run by ``make gpu``. Without a device they are skipped with a reason."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.cuda.set_device(torch.cuda.device_count() - 1)  # with several devices not 0: code that assumes 0 must fail
    return torch.device("cuda", torch.cuda.current_device())
