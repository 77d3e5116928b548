"""Copies that run concurrently with the engine's steps: on a stream of the device, or on a thread for a host cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Protocol

import torch

from hsx_dist.errors import ConfigError
from hsx_dist.transport.affinity import any_core
from hsx_dist.writers.daemon import DaemonPool


class CopyEvent(Protocol):
    """A position in a stream's queued work, or a started copy."""

    def query(self) -> bool:
        """Return whether all work up to this point has ended. A copy that failed has ended."""

    def synchronize(self) -> None:
        """Block until all work up to this point has ended. An event of a copy raises the copy's error."""


class Stream(Protocol):
    """Work that a device runs in order, concurrently with other streams."""

    def launch(self, work: Callable[[], None]) -> None:
        """Queue the device work of ``work``. Raises what ``work`` raises while it queues."""

    def record(self) -> CopyEvent:
        """Return an event after all work queued so far."""

    def wait_event(self, event: CopyEvent) -> None:
        """Run work that is queued later only after ``event``. Returns at once."""


class Device(Protocol):
    """The calls to a device's runtime that ``DeviceCopyStream`` makes; ``Cuda`` in production."""

    def attach(self) -> None:
        """Make this the calling thread's device."""

    def current_stream(self) -> Stream:
        """Return the stream on which the calling thread runs the model."""

    def new_stream(self) -> Stream:
        """Return a stream that runs concurrently with all others."""


class CopyStream(Protocol):
    """Runs copies one after another, in the order in which they are started."""

    def follow(self) -> None:
        """Make copies that start later wait for the model's work that is queued now, and for no later work."""

    def start(self, copies: Sequence[Callable[[], None]]) -> list[CopyEvent]:
        """Start the copies. If a copy fails, only ``synchronize`` of that copy's event raises its error."""

    def wait(self, seconds: float) -> None:
        """Block until the started copies end, for at most ``seconds``. Used when the engine has no other work."""

    def close(self) -> None:
        """Block until the started copies end. No copy may be started later."""


def copy_stream_for(cache: torch.Tensor) -> CopyStream:
    """Return a copy stream for copies out of ``cache``.

    Raises:
        ConfigError: copies from this device are not supported.
    """
    if cache.device.type == "cuda":  # ROCm's too
        return DeviceCopyStream(Cuda(cache.device))
    if cache.device.type == "cpu":
        return HostCopyStream()
    raise ConfigError(
        f"expected a hidden-state cache on a CUDA, ROCm or CPU device, got {cache.device}. Use an engine on one "
        "of these"
    )


class Cuda:
    """``torch.cuda`` as a ``Device``."""

    def __init__(self, device: torch.device):
        self._device = device

    def attach(self) -> None:
        torch.cuda.set_device(self._device)

    def current_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self._device))

    def new_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self._device))


class CudaStream:
    def __init__(self, stream: torch.cuda.Stream):
        self._stream = stream

    def launch(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> torch.cuda.Event:
        # Blocking: the thread that waits for the event sleeps instead of spinning.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def wait_event(self, event: CopyEvent) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._stream.wait_event(event)


class DeviceCopyStream:
    """Copies on a separate stream of the device."""

    def __init__(self, device: Device):
        self._device = device
        self._stream = device.new_stream()
        self._last: _Copied | None = None

    def follow(self) -> None:
        self._stream.wait_event(self._device.current_stream().record())

    def start(self, copies: Sequence[Callable[[], None]]) -> list[CopyEvent]:
        events: list[CopyEvent] = []
        for copy in copies:
            error = None
            try:
                self._stream.launch(copy)
            except Exception as e:  # noqa: BLE001 - affects this copy only: out of memory, indices out of range
                error = e
            # Recorded also after an error: part of the copy may be queued, and uses the cache's blocks and the ring's
            # bytes until it ends. A lost device raises here; then the engine's step must fail.
            self._last = _Copied(self._device, self._stream.record(), error)
            events.append(self._last)
        return events

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._last is not None and not self._last.query() and time.monotonic() < end:
            time.sleep(1e-4)

    def close(self) -> None:
        self._device.attach()
        self._stream.record().synchronize()


class _Copied:
    """The event after a copy, with the error if only part of the copy was queued."""

    def __init__(self, device: Device, event: CopyEvent, error: Exception | None):
        self._device = device
        self._event = event
        self._error = error
        self._ended = False

    def query(self) -> bool:
        return self._event.query()

    def synchronize(self) -> None:
        if not self._ended:  # pages that are copied at once share this event, and each waits for it
            # Any thread may wait. On a thread without a device CUDA would make a context on GPU 0, for each rank.
            self._device.attach()
            self._event.synchronize()
            self._ended = True
        if self._error is not None:
            raise self._error


class HostCopyStream:
    """Copies on a thread, which may run on any core of the process. The thread sees the model's writes at once.

    The thread copies without helper threads. Otherwise torch would split each copy among a second team of OpenMP
    threads, in addition to the engine's team. Once a process has more such threads than cores, GNU's OpenMP lets the
    threads of all teams sleep at each barrier. An engine's many small operations have many barriers.
    """

    def __init__(self) -> None:
        with any_core():
            self._thread = DaemonPool(1, "hsx-copy")
        _share_nothing(self._thread)
        self._last: Future[None] | None = None

    def follow(self) -> None:
        pass

    def start(self, copies: Sequence[Callable[[], None]]) -> list[CopyEvent]:
        started: list[tuple[Callable[[], None], Future[None]]] = [(copy, Future()) for copy in copies]
        if started:
            self._last = started[-1][1]
        # One submit for all: waking the thread for each copy would take the interpreter's lock from the running step.
        self._thread.submit(_run, started)
        return [_HostEvent(future) for _, future in started]

    def wait(self, seconds: float) -> None:
        if self._last is not None:
            wait([self._last], seconds)

    def close(self) -> None:
        self._thread.close()


def _share_nothing(pool: DaemonPool) -> None:
    """Set torch's number of threads to one in ``pool``'s only thread, and in no other thread."""
    others = torch.get_num_threads()
    # A thread's first query returns the number that any thread set last. So this thread and the pool's query it first,
    # and another thread sets it back. torch.set_num_threads does not work here: vLLM's CPU worker replaces it with a
    # no-op in the whole process once its threads are bound to cores.
    pool.submit(torch.get_num_threads).result()
    pool.submit(torch._C.set_num_threads, 1).result()
    setter = threading.Thread(target=torch._C.set_num_threads, args=(others,))
    setter.start()
    setter.join()


def _run(started: list[tuple[Callable[[], None], Future[None]]]) -> None:
    with torch.inference_mode():  # as on the engine's thread: the mode is per thread
        for copy, future in started:
            try:
                copy()
            except BaseException as e:  # noqa: BLE001 - ``synchronize`` of its event raises it
                future.set_exception(e)
            else:
                future.set_result(None)


class _HostEvent:
    def __init__(self, future: Future[None]):
        self._future = future

    def query(self) -> bool:
        return self._future.done()

    def synchronize(self) -> None:
        self._future.result()
