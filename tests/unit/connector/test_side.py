"""Copies beside the engine's steps, on a host."""

import sys
import threading

import pytest
import torch

from hsx_dist.connector.side import HostSide, side_of


def test_a_cache_in_host_memory_is_copied_on_a_thread():
    side, ran = side_of(torch.zeros(1)), []
    assert isinstance(side, HostSide)
    (event,) = side.start([lambda: ran.append(threading.current_thread().name)])
    event.synchronize()
    assert ran != [threading.current_thread().name]


def test_copies_run_one_after_another_and_starting_one_waits_for_none():
    side, go, ran = HostSide(), threading.Event(), []
    events = side.start([lambda: (go.wait(30), ran.append(1)), lambda: ran.append(2)])
    events += side.start([lambda: ran.append(3)])
    assert side.start([]) == []
    side.wait(0.01)
    assert not any(event.query() for event in events)
    go.set()
    events[-1].synchronize()
    assert all(event.query() for event in events)
    assert ran == [1, 2, 3]


def test_a_copy_that_fails_is_met_by_whoever_asks_and_by_every_later_step():
    side = HostSide()
    failed, later = side.start([lambda: 1 / 0, lambda: None])
    with pytest.raises(ZeroDivisionError):
        failed.synchronize()
    later.synchronize()
    with pytest.raises(ZeroDivisionError):
        later.query()


def test_a_copy_that_fails_is_never_said_to_be_done():
    def ended(event) -> bool:
        while not event.query():
            pass
        return True

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # the gap between what is done and what is listed as failed is a short one
    try:
        for _ in range(500):
            side = HostSide()
            (failed,) = side.start([lambda: 1 / 0])
            with pytest.raises(ZeroDivisionError):
                ended(failed)
            side.close()
    finally:
        sys.setswitchinterval(before)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_copy_takes_no_threads_of_its_own_and_every_other_thread_has_those_it_had(two_threads, monkeypatch):
    # As vLLM's CPU worker has it.
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    found = []
    side = HostSide()
    (event,) = side.start([lambda: found.append(torch.get_num_threads())])
    event.synchronize()
    new = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    new.start()
    new.join()
    assert (*found, torch.get_num_threads()) == (1, 2, 2)
