"""Tests that need a CUDA device: ``make gpu`` runs them. Where there is none they are skipped, and say so."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.cuda.set_device(torch.cuda.device_count() - 1)  # not 0 where there are several: who forgets it shows
    return torch.device("cuda", torch.cuda.current_device())
