"""Threads for calls that may hang. Unlike an executor's threads, they do not block the exit of the process."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class DaemonPool:
    """Calls on ``threads`` daemon threads, first come, first served. Calls of one key run one after another.

    ``concurrent.futures.ThreadPoolExecutor`` joins its threads when the interpreter exits. If one waits for a store
    that does not answer, the process would never exit.
    """

    def __init__(self, threads: int, name: str):
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[Callable[[], None]]] = {}  # of each key with a call that is queued or runs
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(max(threads, 1))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``call`` on a thread. Returns a future of its result or exception."""
        return self.submit_for(None, call, *args, **kwargs)

    def submit_for(self, key: str | None, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As ``submit``, after the earlier calls of ``key``. These occupy one thread at most."""
        future: Future[T] = Future()
        work = partial(self._work, key, future, partial(call, *args, **kwargs))
        if key is None:
            self._queue.put(work)
            return future
        with self._lock:
            if key in self._waiting:
                self._waiting[key].append(work)
            else:
                self._waiting[key] = deque()
                self._queue.put(work)
        return future

    def _work(self, key: str | None, future: Future[T], call: Callable[[], T]) -> None:
        try:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = call()
            except BaseException as e:  # noqa: BLE001 - the future raises it
                future.set_exception(e)
                del future  # the traceback refers to this frame: a cycle would keep the call's buffers until collected
            else:
                future.set_result(result)
        finally:
            if key is not None:
                self._next_of(key)

    def _next_of(self, key: str) -> None:
        with self._lock:
            if self._waiting[key]:
                self._queue.put(self._waiting[key].popleft())  # behind the calls of others
            else:
                del self._waiting[key]

    def close(self, *, wait: bool = True) -> None:
        """Accept no more calls. ``wait``: block until the submitted calls are finished. Calls of a key must be."""
        for _ in self._threads:
            self._queue.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # its arguments may be large, and the next call may be much later
