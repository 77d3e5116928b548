"""Copies beside the engine's steps: on a CUDA stream of their own, or on a thread where the cache is host memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from hsx_dist.connector.cores import any_core
from hsx_dist.writers.daemon import DaemonPool


class Event(Protocol):
    """A copy that was started."""

    def query(self) -> bool:
        """Whether it is done, and all before it. Raises what any of them raised: an engine must not go on with it."""

    def synchronize(self) -> None:
        """Wait until it is done. Raises what it raised."""


class Side(Protocol):
    """Where copies run, one after another, in the order in which they are started."""

    def follow(self) -> None:
        """What is started from now on sees what the model has written until now."""

    def here(self) -> AbstractContextManager[Any]:
        """Device work that prepares copies is queued with them."""

    def start(self, copies: Sequence[Callable[[], None]]) -> list[Event]:
        """Have them run."""

    def wait(self, seconds: float) -> None:
        """Give the copies at most so long, for an engine that has nothing else to do."""

    def close(self) -> None:
        """No more copies; those that were started are done."""


def side_of(cache: torch.Tensor) -> Side:
    """For copies out of ``cache``."""
    return CudaSide(cache.device) if cache.is_cuda else HostSide()


class CudaSide:
    """A CUDA stream."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._last: torch.cuda.Event | None = None

    def follow(self) -> None:
        # The model's stream waits for nothing.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def here(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def start(self, copies: Sequence[Callable[[], None]]) -> list[Event]:
        events: list[Event] = []
        for copy in copies:
            copy()
            # Blocking: the thread that waits for it sleeps meanwhile.
            self._last = torch.cuda.Event(blocking=True)
            self._last.record(self._stream)
            events.append(self._last)
        return events

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._last is not None and not self._last.query() and time.monotonic() < end:
            time.sleep(1e-4)

    def close(self) -> None:
        self._stream.synchronize()


class HostSide:
    """A thread, on any core that the process was given. What the model has written it sees at once.

    It copies by itself. torch would share each copy among a team of threads of this thread's own, beside the engine's
    team; and once a process has more such threads than cores, GNU's OpenMP lets those of every team sleep wherever they
    wait for one another, which an engine's many small operations do all the time.
    """

    def __init__(self) -> None:
        with any_core():
            self._thread = DaemonPool(1, "hsx-copy")
        _share_nothing(self._thread)
        self._last: Future[None] | None = None
        self._failed: list[Future[None]] = []

    def follow(self) -> None:
        pass

    def here(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def start(self, copies: Sequence[Callable[[], None]]) -> list[Event]:
        started: list[tuple[Callable[[], None], Future[None]]] = [(copy, Future()) for copy in copies]
        for _, future in started:
            future.add_done_callback(self._keep_failure)
            self._last = future
        # At one go: a thread that is woken for each would take the interpreter's lock from a step that is not done.
        self._thread.submit(_run, started)
        return [_HostEvent(future, self._failed) for _, future in started]

    def wait(self, seconds: float) -> None:
        if self._last is not None:
            wait([self._last], seconds)

    def close(self) -> None:
        self._thread.close()

    def _keep_failure(self, done: Future[None]) -> None:
        if done.exception() is not None:
            self._failed.append(done)


def _share_nothing(pool: DaemonPool) -> None:
    """One thread for torch in ``pool``'s only thread, and in no other."""
    others = torch.get_num_threads()
    # A thread takes the number that was set last, by whichever thread, when it first asks for it: hence asked for here,
    # before, and set back there, after. Not by torch.set_num_threads, which vLLM's CPU worker makes a no-op for
    # everybody once its own threads have their cores.
    pool.submit(torch.get_num_threads).result()
    pool.submit(torch._C.set_num_threads, 1).result()
    setter = threading.Thread(target=torch._C.set_num_threads, args=(others,))
    setter.start()
    setter.join()


def _run(started: list[tuple[Callable[[], None], Future[None]]]) -> None:
    with torch.inference_mode():  # as the engine's thread is: a mode is a thread's own
        for copy, future in started:
            try:
                copy()
            except BaseException as e:  # noqa: BLE001 - whoever asks for the event gets it
                future.set_exception(e)
            else:
                future.set_result(None)


class _HostEvent:
    def __init__(self, future: Future[None], failed: list[Future[None]]):
        self._future = future
        self._failed = failed

    def query(self) -> bool:
        # In this order: what failed is listed just after it is done, but before the next copy is.
        done = self._future.done()
        for future in (*self._failed, *([self._future] if done else [])):
            future.result()
        return done

    def synchronize(self) -> None:
        self._future.result()
