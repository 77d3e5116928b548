"""Copies in parallel with the engine's steps, tested on a host."""

import threading

import pytest
import torch

from hsx_dist.connector.copy_stream import Cuda, DeviceCopyStream, HostCopyStream, copy_stream_for
from hsx_dist.errors import ConfigError
from tests.unit.connector.recorded_cuda import DEVICE, RecordedCuda


@pytest.fixture
def cuda(monkeypatch):
    return RecordedCuda(monkeypatch)


def test_a_cache_in_host_memory_is_copied_on_a_thread():
    stream, ran = copy_stream_for(torch.zeros(1)), []
    assert isinstance(stream, HostCopyStream)
    (event,) = stream.start([lambda: ran.append(threading.current_thread().name)])
    event.synchronize()
    assert ran != [threading.current_thread().name]


def test_copies_run_one_after_another_and_starting_one_waits_for_none():
    stream, go, ran = HostCopyStream(), threading.Event(), []
    events = stream.start([lambda: (go.wait(30), ran.append(1)), lambda: ran.append(2)])
    events += stream.start([lambda: ran.append(3)])
    assert stream.start([]) == []
    stream.wait(0.01)
    assert not any(event.query() for event in events)
    go.set()
    events[-1].synchronize()
    assert all(event.query() for event in events)
    assert ran == [1, 2, 3]


def test_an_error_of_a_copy_is_raised_by_its_event_alone():
    stream = HostCopyStream()
    before, failed, later = stream.start([lambda: None, lambda: 1 / 0, lambda: None])
    with pytest.raises(ZeroDivisionError):
        failed.synchronize()
    before.synchronize()
    later.synchronize()
    assert all(event.query() for event in (before, failed, later))
    stream.close()


def test_memory_of_other_devices_is_refused():
    with pytest.raises(ConfigError, match=r"CUDA, ROCm or CPU device, got meta\. Use"):
        copy_stream_for(torch.zeros(1, device="meta"))


def test_copies_on_a_stream_wait_for_what_the_model_had_queued_when_the_step_began(cuda):
    stream = DeviceCopyStream(Cuda(DEVICE))
    stream.follow()
    cuda.calls.append("the model's next run")
    stream.start([lambda: cuda.calls.append("copy")])
    assert cuda.calls == [
        "record 0 on model", "copies wait for 0", "the model's next run",
        "enter copies", "copy", "leave copies", "record 1 on copies",
    ]  # fmt: skip


def test_on_a_stream_an_error_while_a_copy_is_queued_reaches_its_own_event_after_the_queued_part(cuda):
    stream = DeviceCopyStream(Cuda(DEVICE))
    failed, later = stream.start([lambda: 1 / 0, lambda: None])
    cuda.ended = {0}
    assert failed.query()
    assert not later.query()
    with pytest.raises(ZeroDivisionError):
        failed.synchronize()
    later.synchronize()
    waited = [call for call in cuda.calls if call.startswith("wait")]
    assert waited == ["wait for 0", "wait for 1"]  # the error is raised after the queued part has ended


def test_a_lost_device_raises(cuda):
    stream = DeviceCopyStream(Cuda(DEVICE))
    cuda.lost = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        stream.start([lambda: None])


def test_a_thread_that_waits_sets_the_device_first(cuda):
    """On a thread without a device CUDA creates a context on GPU 0."""
    stream = DeviceCopyStream(Cuda(DEVICE))
    (event,) = stream.start([lambda: None])
    for wait in (event.synchronize, stream.close):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
    assert cuda.devices_of_waits == [DEVICE, DEVICE]


def test_an_idle_engine_waits_for_the_last_copy(cuda):
    stream = DeviceCopyStream(Cuda(DEVICE))
    stream.wait(30)
    stream.start([lambda: None])
    stream.wait(0.001)
    cuda.ended = {0}
    stream.wait(30)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_copy_uses_one_torch_thread_and_other_threads_keep_theirs(two_threads, monkeypatch):
    # As in vLLM's CPU worker.
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    found = []
    stream = HostCopyStream()
    (event,) = stream.start([lambda: found.append(torch.get_num_threads())])
    event.synchronize()
    new = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    new.start()
    new.join()
    assert (*found, torch.get_num_threads()) == (1, 2, 2)
