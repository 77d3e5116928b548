"""Copies beside the engine's steps, on a host."""

import threading

import pytest
import torch

from hsx_dist.connector.side import HostSide, side_of


def test_a_cache_in_host_memory_is_copied_on_a_thread():
    side, ran = side_of(torch.zeros(1)), []
    assert isinstance(side, HostSide)
    side.start(lambda: ran.append(threading.current_thread().name)).synchronize()
    assert ran != [threading.current_thread().name]


def test_copies_run_one_after_another_and_starting_one_waits_for_none():
    side, go, ran = HostSide(), threading.Event(), []
    first = side.start(lambda: (go.wait(30), ran.append(1)))
    second = side.start(lambda: ran.append(2))
    side.wait(0.01)
    assert not first.query()
    assert not second.query()
    go.set()
    second.synchronize()
    assert first.query()
    assert second.query()
    assert ran == [1, 2]


def test_a_copy_that_fails_is_met_by_whoever_asks_and_by_every_later_step():
    side = HostSide()
    failed = side.start(lambda: 1 / 0)
    later = side.start(lambda: None)
    with pytest.raises(ZeroDivisionError):
        failed.synchronize()
    later.synchronize()
    with pytest.raises(ZeroDivisionError):
        later.query()
