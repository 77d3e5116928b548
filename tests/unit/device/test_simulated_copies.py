"""The worker half, its ring and the copies, on a simulated device that runs operations as late as CUDA allows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from hsx_dist.connector import worker as worker_module
from hsx_dist.connector.copy_stream import HostCopyStream
from hsx_dist.transport import local_end
from hsx_dist.transport.ring import Ring
from tests.unit.device import simulated
from tests.unit.device.request_runs import Request, Run, WrongNumbers, requests
from tests.unit.device.simulated import Device, Latest, ModelFirst, Random, Schedule, SideFirst, simulated_cuda

pytestmark = pytest.mark.slow

#: ``make soak`` runs more.
SEEDS = range(int(os.environ.get("HSX_SEEDS", "3")))


class Simulated:
    """The simulated device as ``Backend``."""

    def __init__(self, device: Device):
        self.device = device

    def put(self, host: torch.Tensor) -> torch.Tensor:
        return self.device.put(host)

    def before_forward(self) -> None:
        pass

    def stuck(self) -> None:
        self.device.grant()

    def stalled(self) -> int:
        return len(self.device.stalls)


def schedules(seed: int) -> dict[str, Schedule]:
    return {"latest": Latest(), "side first": SideFirst(), "model first": ModelFirst(), "random": Random(seed)}


@contextmanager
def prepared(schedule: Schedule, seed: int, **options: Any) -> Iterator[tuple[Run, Device]]:
    with simulated_cuda(schedule) as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_module, "IDLE_WAIT_S", 0.0)  # the simulated device has no time
        yield Run(Simulated(device), requests(seed), **options), device


@pytest.mark.parametrize("ring_pages", [1, 4])
@pytest.mark.parametrize("order", ["LTH", "TLH"])
@pytest.mark.parametrize("schedule", schedules(0))
def test_no_order_of_the_device_gives_wrong_numbers(schedule, order, ring_pages):
    for seed in SEEDS if schedule == "random" else SEEDS[:1]:
        with prepared(schedules(seed)[schedule], seed, order=order, ring_pages=ring_pages) as (run, device):
            assert not isinstance(run.worker._copy_stream, HostCopyStream)
            run.run()
            assert run.host_waits == 0
            # Each thread that uses the device has set it: otherwise CUDA creates a context on device 0.
            assert device.contexts == {simulated.INDEX}


@pytest.mark.parametrize("announced", [True, False])
def test_copies_wait_for_no_forward_pass_that_is_queued_after_a_step_began(announced):
    """Otherwise blocks are held until the next steps have ended."""
    with prepared(Latest(), 0) as (run, device):
        run.wanted = [Request(f"r{n}", n + 1, 20) for n in range(4)]
        run.waiting = list(run.wanted)
        if not announced:
            run.worker.begin = lambda _: None
        ended = run.step([])
        assert [r.name for r in ended] == ["r0"]
        ended = run.step(ended)
        while not run.reader.kept:
            device.grant()
            time.sleep(1e-4)
        assert any(map(callable, device.streams[0].items)) is announced
        run.run(ended=ended)


@pytest.mark.parametrize("schedule", ["latest", "random"])
def test_two_connectors_of_one_process(schedule):
    """A tensor that one prepares on its stream and caches is used by the other on another stream."""
    with prepared(schedules(0)[schedule], 0) as (one, device):
        other, ended = Run(Simulated(device), requests(1)), list[Any]()

        def step_other(_: Run) -> None:
            ended[:] = other.step(list(ended))

        one.run(drive=step_other)
        other.run(ended=ended)


# -- checks of the simulation: each fault must be detected -------------------------------------------------------------


def no_wait_of_the_copies(patch: pytest.MonkeyPatch) -> None:
    """An event is missing: copies do not wait for the model's writes."""
    patch.setattr(simulated.Stream, "wait_event", lambda *_: None)


def no_wait_of_the_writers(patch: pytest.MonkeyPatch) -> None:
    """The shipping thread does not wait for a page's copy."""
    patch.setattr(simulated.Event, "synchronize", lambda _: None)


def blocks_released_early(patch: pytest.MonkeyPatch) -> None:
    """A request is reported as finished when its copies have only started."""
    patch.setattr(simulated.Event, "query", lambda _: True)


def event_recorded_before_the_copy(patch: pytest.MonkeyPatch) -> None:
    """An event is reached before the operations that were queued before it."""

    def record(self: simulated.Event, stream: simulated.Stream | None = None) -> None:
        stream = stream or self.simulation.current_stream()
        self.mark = simulated.Mark(stream)
        stream.items.appendleft(self.mark)

    patch.setattr(simulated.Event, "record", record)


def copies_on_the_models_stream(patch: pytest.MonkeyPatch) -> None:
    """Events of the copy stream do not cover copies on another stream."""
    patch.setattr(simulated.Device, "stream", lambda *_: nullcontext())


def slot_given_back_before_it_is_read(patch: pytest.MonkeyPatch) -> None:
    real = local_end.hand_over

    def hand_over(sender: Any, pages: Any, memory: Any, free: Any) -> Any:
        for page in pages:
            free(page)
        return real(sender, pages, memory, lambda _: None)

    patch.setattr(local_end, "hand_over", hand_over)


def slots_given_back_with_any_other(patch: pytest.MonkeyPatch) -> None:
    """The ring frees all pages that were allocated before the returned one."""

    def free(self: Any, offset: int) -> None:
        with self._lock:
            self._by_offset.pop(offset, None)
            self._live.clear()

    patch.setattr(Ring, "free", free)


MUTATIONS = [
    no_wait_of_the_copies,
    no_wait_of_the_writers,
    blocks_released_early,
    event_recorded_before_the_copy,
    copies_on_the_models_stream,
    slot_given_back_before_it_is_read,
    slots_given_back_with_any_other,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_a_fault_is_noticed(mutation, monkeypatch):
    for schedule in schedules(0).values():
        with monkeypatch.context() as patch:
            mutation(patch)
            with prepared(schedule, 0, ring_pages=3) as (run, _):
                try:
                    run.run()
                except (WrongNumbers, IndexError):  # poison is no valid index
                    return
    pytest.fail("expected an order of the device that gives wrong numbers, got none")
