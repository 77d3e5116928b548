"""Stores that inject faults, as wrappers around any real store. A ``Strike`` selects the calls that fail.

    store = FailingStore(LocalStore(folder), Unavailable("503"), Strike({"put"}, prefix="data/", times=3))

A wrapper may wrap another one. After its last strike, a wrapper passes all calls to the inner store unchanged.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, Literal, TypeVar

from hsx_dist.errors import Unavailable
from hsx_dist.store.base import Buffer, Conditional, ObjectInfo, Store, as_buffers, as_bytes_view, not_conditional

T = TypeVar("T")
Verb = Literal["put", "put_if_absent", "get", "get_ranges", "head", "list", "delete"]
PUTS: Set[Verb] = frozenset({"put", "put_if_absent"})


class Strike:
    """The calls that a fault affects: calls of ``verbs`` (default: all) on names that begin with ``prefix``.

    The first ``after`` of these calls pass. The next ``times`` calls are affected (default: all later calls).
    """

    def __init__(
        self, verbs: Set[Verb] | None = None, *, prefix: str = "", after: int = 0, times: float = float("inf")
    ):
        self._verbs = verbs
        self._prefix = prefix
        self._after = after
        self._left = times
        self._lock = threading.Lock()

    def meets(self, verb: Verb, name: str) -> bool:
        """Whether the fault affects this call. Each query counts as a call."""
        if (self._verbs is not None and verb not in self._verbs) or not name.startswith(self._prefix):
            return False
        with self._lock:
            if self._after > 0:
                self._after -= 1
                return False
            self._left -= 1
            return self._left >= 0


class WrappedStore:
    """A ``Store`` that passes every call to ``inner``. Subclasses override ``_call`` (for all verbs), or one verb."""

    def __init__(self, inner: Store):
        self._inner = inner

    @property
    def url(self) -> str:
        return self._inner.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"

    def _call(self, verb: Verb, name: str, call: Callable[[], T], nbytes: int) -> T:  # noqa: ARG002
        """Make the call. ``nbytes``: size of the object if the call is a put, else 0."""
        return call()

    def put(self, name: str, buffers: Sequence[Buffer]) -> None:
        size = sum(as_bytes_view(b).nbytes for b in buffers)
        self._call("put", name, lambda: self._inner.put(name, buffers), size)

    def put_if_absent(self, name: str, data: bytes | Sequence[Buffer]) -> None:
        size = sum(as_bytes_view(b).nbytes for b in as_buffers(data))
        self._call("put_if_absent", name, lambda: self._inner.put_if_absent(name, data), size)

    def version(self, name: str) -> str:
        return self._call("head", name, lambda: self._conditional().version(name), 0)

    def put_version(self, name: str, buffers: Sequence[Buffer], version: str) -> bool:
        size = sum(as_bytes_view(b).nbytes for b in buffers)
        return self._call("put", name, lambda: self._conditional().put_version(name, buffers, version), size)

    def delete_version(self, name: str, version: str) -> bool:
        return self._call("delete", name, lambda: self._conditional().delete_version(name, version), 0)

    def _conditional(self) -> Conditional:
        if not isinstance(self._inner, Conditional):
            raise not_conditional(self.url)
        return self._inner

    def get(self, name: str, most: int | None = None) -> bytes:
        return self._call("get", name, lambda: self._inner.get(name, most), 0)

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        return self._call("get_ranges", name, lambda: self._inner.get_ranges(name, ranges), 0)

    def head(self, name: str) -> ObjectInfo:
        return self._call("head", name, lambda: self._inner.head(name), 0)

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        yield from self._call("list", prefix, lambda: self._inner.list(prefix, after), 0)

    def delete(self, name: str) -> None:
        self._call("delete", name, lambda: self._inner.delete(name), 0)


class CountingStore(WrappedStore):
    """A store that counts ``calls`` by verb and ``bytes_put``. Failed calls count too."""

    def __init__(self, inner: Store):
        super().__init__(inner)
        self.calls: Counter[Verb] = Counter()
        self.bytes_put = 0
        self._lock = threading.Lock()

    def _call(self, verb: Verb, name: str, call: Callable[[], T], nbytes: int) -> T:
        with self._lock:
            self.calls[verb] += 1
            self.bytes_put += nbytes
        return super()._call(verb, name, call, nbytes)


class _Striking(WrappedStore):
    def __init__(self, inner: Store, strike: Strike | None = None):
        super().__init__(inner)
        self._strike = strike or Strike()

    def _call(self, verb: Verb, name: str, call: Callable[[], T], nbytes: int) -> T:
        return self._struck(name, call, nbytes) if self._strike.meets(verb, name) else call()

    def _struck(self, name: str, call: Callable[[], T], nbytes: int) -> T:
        raise NotImplementedError


class SlowStore(_Striking):
    """Delays each call by ``seconds``, and a put by one more second for every ``bytes_per_second`` bytes."""

    def __init__(self, inner: Store, seconds: float, strike: Strike | None = None, *, bytes_per_second: float = 0):
        super().__init__(inner, strike)
        self._seconds = seconds
        self._rate = bytes_per_second

    def _struck(self, name: str, call: Callable[[], T], nbytes: int) -> T:  # noqa: ARG002
        time.sleep(self._seconds + (nbytes / self._rate if self._rate else 0))
        return call()


class FailingStore(_Striking):
    """Calls raise ``error``: without any effect, or with ``done`` after their effect, as if the response was lost."""

    def __init__(self, inner: Store, error: Exception, strike: Strike | None = None, *, done: bool = False):
        super().__init__(inner, strike)
        self._error = error
        self._done = done

    def _struck(self, name: str, call: Callable[[], T], nbytes: int) -> T:  # noqa: ARG002
        if self._done:
            call()
        raise self._error


class HangingStore(_Striking):
    """Calls block until ``release``, and then pass. ``hanging`` is set when the first call blocks."""

    def __init__(self, inner: Store, strike: Strike | None = None):
        super().__init__(inner, strike)
        self.hanging = threading.Event()
        self._go = threading.Event()

    def release(self) -> None:
        """Unblock all blocked calls. Later calls do not block."""
        self._go.set()

    def _struck(self, name: str, call: Callable[[], T], nbytes: int) -> T:  # noqa: ARG002
        if not self._go.is_set():
            self.hanging.set()
            self._go.wait()
        return call()


class LyingStore(_Striking):
    """Reports success of puts that stored nothing, or of deletions that removed nothing."""

    def __init__(self, inner: Store, strike: Strike | None = None):
        super().__init__(inner, strike or Strike(PUTS))

    def _struck(self, name: str, call: Callable[[], T], nbytes: int) -> Any:  # noqa: ARG002
        return None


class TearingStore(WrappedStore):
    """Puts store only the first ``keep`` bytes, and then raise ``Unavailable``; with ``silent`` they return.

    An object store never does this, since its puts are atomic. A file system after a power cut, or a proxy that times
    out, may do it.
    """

    def __init__(self, inner: Store, keep: int, strike: Strike | None = None, *, silent: bool = False):
        super().__init__(inner)
        self._keep = keep
        self._strike = strike or Strike(PUTS)
        self._silent = silent

    def put(self, name: str, buffers: Sequence[Buffer]) -> None:
        if not self._strike.meets("put", name):
            self._inner.put(name, buffers)
            return
        self._inner.put(name, [b"".join(map(as_bytes_view, buffers))[: self._keep]])
        self._torn(name)

    def put_if_absent(self, name: str, data: bytes | Sequence[Buffer]) -> None:
        if not self._strike.meets("put_if_absent", name):
            self._inner.put_if_absent(name, data)
            return
        self._inner.put_if_absent(name, b"".join(map(as_bytes_view, as_buffers(data)))[: self._keep])
        self._torn(name)

    def _torn(self, name: str) -> None:
        if not self._silent:
            raise Unavailable(f"put {self.url}/{name}: the connection broke after {self._keep} bytes")
