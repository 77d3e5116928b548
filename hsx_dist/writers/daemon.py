"""Threads for calls that may hang: unlike an executor's they do not keep a process that wants to end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class DaemonPool:
    """Calls on ``threads`` daemon threads, first come, first served.

    ``concurrent.futures.ThreadPoolExecutor`` joins its threads when the interpreter ends, also those that wait for a
    store that does not answer: a process would stay for ever.
    """

    def __init__(self, threads: int, name: str):
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(max(threads, 1))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """What ``call`` returns, or raises, as a future."""
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = call(*args, **kwargs)
            except BaseException as e:  # noqa: BLE001 - whoever holds the future gets it
                future.set_exception(e)
            else:
                future.set_result(result)

        self._queue.put(work)
        return future

    def close(self, *, wait: bool = True) -> None:
        """No more calls. ``wait``: until those that were submitted are done."""
        for _ in self._threads:
            self._queue.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # what it refers to may be large, and the next may be long in coming
