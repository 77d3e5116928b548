"""The worker half's unit tests, repeated with their caches on the simulated device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hsx_dist.connector.columns import CapturedPoint
from hsx_dist.connector.copy_stream import HostCopyStream
from tests.unit.connector import test_worker
from tests.unit.device.simulated import Latest, SideFirst, simulated_cuda

for _name in (
    "test_pages_hold_exactly_the_tokens_of_the_request",
    "test_a_request_longer_than_the_ring_goes_through_page_by_page",
    "test_blocks_are_held_while_the_ring_is_full_and_requests_keep_their_order",
    "test_pages_name_their_request_and_two_copies_have_different_sources",
    "test_only_requested_layers_and_tokens_are_copied",
    "test_closing_copies_waiting_pages_and_counts_the_rest",
    "test_a_mean_is_one_float32_row_over_all_tokens",
    "test_selected_positions_are_copied_and_arrays_go_with_the_first_segment",
    "test_a_request_that_cannot_be_copied_fails_alone",
):
    globals()[_name] = getattr(test_worker, _name)


@pytest.fixture(autouse=True, params=[Latest, SideFirst], ids=["latest", "side first"])
def device(request, monkeypatch):
    """A half's cache is on the device. The tests read the same memory through the host."""
    made = []
    with simulated_cuda(request.param()) as simulated:
        real = test_worker.WorkerHalf

        def on_device(caches: list[tuple[CapturedPoint, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
            made.append(real([(point, simulated.put(cache)) for point, cache in caches], *args, **kwargs))
            return made[-1]

        monkeypatch.setattr(test_worker, "WorkerHalf", on_device)
        yield
        assert made
        assert not any(isinstance(worker._copy_stream, HostCopyStream) for worker in made)
        assert simulated.stalls == []
        for worker in made:
            worker.close()
            assert not simulated._is_pinned(worker._memory)  # else the process's next engine cannot pin its memory
