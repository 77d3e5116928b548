"""Retries of calls that may succeed later, as a wrapper around any store."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hsx_dist.errors import AlreadyExists, NotFound, Unavailable
from hsx_dist.store.base import (
    Buffer,
    Conditional,
    Folders,
    Gathered,
    ObjectInfo,
    Store,
    as_buffers,
    as_bytes_view,
    not_conditional,
)
from hsx_dist.store.faults import NoBucket

T = TypeVar("T")

#: vLLM seeds ``random`` in each replica, with the same number: all replicas would pause for the same times.
_chance = random.SystemRandom()
#: Bytes of an object that are compared at a time.
_PIECE = 2 << 20


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long and how often a call is retried."""

    #: Seconds after the first failure within which a retry may begin; 0: no retries. The last retry may end later.
    seconds: float = 120.0
    #: The longest pause before the first retry; it doubles with each retry.
    first_pause: float = 0.1
    #: The longest pause before any retry.
    longest_pause: float = 15.0


class RetryStore:
    """A ``Store`` that retries calls on ``Unavailable``, with jittered exponential backoff and a time limit.

    Other errors are not retried. At the time limit the last error is raised, with the number of attempts.
    """

    def __init__(
        self,
        inner: Store,
        policy: RetryPolicy = RetryPolicy(),
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        on_retry: Callable[[Unavailable], None] = lambda _: None,
    ):
        """``on_retry`` is called with each error after which the call is retried."""
        self._inner = inner
        self._policy = policy
        self._on_retry = on_retry
        self._sleep = sleep
        self._clock = clock

    @property
    def url(self) -> str:
        return self._inner.url

    def __repr__(self) -> str:
        return f"RetryStore({self._inner!r}, {self._policy.seconds:g} s)"

    def put(self, name: str, buffers: Sequence[Buffer]) -> None:
        self._repeat(lambda: self._inner.put(name, buffers))

    def put_if_absent(self, name: str, data: bytes | Sequence[Buffer]) -> None:
        failed = False

        def once() -> None:
            nonlocal failed
            try:
                self._inner.put_if_absent(name, data)
            except Unavailable:
                failed = True
                raise
            except AlreadyExists:
                # An earlier attempt may have stored the object before its response was lost.
                if not (failed and self._holds(name, data)):
                    raise

        self._repeat(once)

    def get(self, name: str, most: int | None = None) -> bytes:
        return self._repeat(lambda: self._inner.get(name, most))

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        return self._repeat(lambda: self._inner.get_ranges(name, ranges))

    def head(self, name: str) -> ObjectInfo:
        return self._repeat(lambda: self._inner.head(name))

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        return self._continued(lambda after: self._inner.list(prefix, after), after)

    def list_readable(self, unreadable: Callable[[str], None], after: str | None = None) -> Iterator[ObjectInfo]:
        """See ``Folders``. Same as ``list`` if the store has no folders."""
        inner = self._inner
        if not isinstance(inner, Folders):
            return self.list("", after)
        return self._continued(lambda after: inner.list_readable(unreadable, after), after)

    def _continued(
        self, begin: Callable[[str | None], Iterator[ObjectInfo]], after: str | None
    ) -> Iterator[ObjectInfo]:
        attempts = _Attempts(self._policy, self._sleep, self._clock, self._on_retry)
        while True:
            try:
                for info in begin(after):
                    after = info.name  # a retry continues after the last object
                    attempts = _Attempts(self._policy, self._sleep, self._clock, self._on_retry)
                    yield info
                return
            except Unavailable as e:
                attempts.failed(e)

    def delete(self, name: str) -> None:
        self._repeat(lambda: self._inner.delete(name))

    def version(self, name: str) -> str:
        return self._repeat(lambda: self._conditional().version(name))

    def delete_version(self, name: str, version: str) -> bool:
        """See ``Conditional``. Also returns False if a delete succeeded and its response was lost."""
        return self._repeat(lambda: self._conditional().delete_version(name, version))

    def put_version(self, name: str, buffers: Sequence[Buffer], version: str) -> bool:
        """See ``Conditional``. Also returns False if a put succeeded and its response was lost."""
        return self._repeat(lambda: self._conditional().put_version(name, buffers, version))

    def _conditional(self) -> Conditional:
        if not isinstance(self._inner, Conditional):
            raise not_conditional(self.url)
        return self._inner

    def unfinished(
        self, older_than: float = 0.0, unreadable: Callable[[str], None] | None = None
    ) -> Iterator[ObjectInfo]:
        """See ``Folders``. Yields nothing if the store has no folders. Looks at all folders before it yields."""
        inner = self._inner
        if isinstance(inner, Folders):
            yield from self._repeat(lambda: [*inner.unfinished(older_than, unreadable)])

    def _holds(self, name: str, data: bytes | Sequence[Buffer]) -> bool:
        """Whether the object is ``data``. Compares pieces, because the memory may not suffice for copies of samples."""
        whole = Gathered([as_bytes_view(buffer) for buffer in as_buffers(data)])
        size = len(whole)
        try:
            if self._inner.head(name).size != size:
                return False
            for start in range(0, size, _PIECE):
                stop = min(start + _PIECE, size)
                [found] = self._inner.get_ranges(name, [(start, stop)])
                if bytes(found) != whole[start:stop]:
                    return False
        except NoBucket:
            raise
        except (NotFound, ValueError):  # removed, or replaced by a shorter object
            return False
        return True

    def _repeat(self, call: Callable[[], T]) -> T:
        attempts = _Attempts(self._policy, self._sleep, self._clock, self._on_retry)
        while True:
            try:
                return call()
            except Unavailable as e:
                attempts.failed(e)


class _Attempts:
    """Failures of one call, and the pauses between its retries."""

    def __init__(
        self,
        policy: RetryPolicy,
        sleep: Callable[[float], None],
        clock: Callable[[], float],
        on_retry: Callable[[Unavailable], None],
    ):
        self._policy = policy
        self._on_retry = on_retry
        self._sleep = sleep
        self._clock = clock
        self._count = 0
        self._first = 0.0

    def failed(self, error: Unavailable) -> None:
        """Sleep until the next retry. Raises ``Unavailable`` at the time limit."""
        now = self._clock()
        if self._count == 0:
            self._first = now
        self._count += 1
        longest = min(self._policy.longest_pause, self._policy.first_pause * 2.0 ** min(self._count - 1, 30))
        # Full jitter: writers that failed at the same time must not retry at the same time.
        pause = _chance.uniform(0, longest)
        if now + pause - self._first >= self._policy.seconds:
            if self._count == 1:
                raise error
            raise type(error)(f"{error} (tried {self._count} times in {now - self._first:.0f} s)") from error
        self._on_retry(error)
        self._sleep(pause)
