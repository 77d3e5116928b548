"""A simulated asynchronous CUDA device: it queues torch's operations, and runs them as late as CUDA would allow.

``simulated_cuda`` gives torch a device ``cuda:1`` on a machine without GPU. Its memory is host memory behind
``SimulatedTensor``. Every operation goes to the queue of the calling thread's current stream. A ``Schedule`` decides
which queues progress, within the guarantees of streams and events:

- Operations of one stream run in order. Those of two streams run in any order, unless an event orders them.
- A stream passes ``wait_event`` only after the event's last ``record`` was reached.
- The host sees a result only after it waited for the stream or for an event behind the operation.

Code that reads too early, reuses memory too early, or waits for the wrong event, reads ``POISON`` or other requests'
numbers. New memory is poison. Memory that Python frees becomes poison in the order of the stream that allocated it:
torch's caching allocator gives it to that stream's next tensor. Copies between the device and pageable host memory make
the host wait, and are listed in ``Device.stalls``.

Not simulated are time, several devices, graphs, ``record_stream``, and operations whose result the host needs
(``item``, ``nonzero``): these raise.
"""

from __future__ import annotations

import random
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

#: Each byte of memory without a result. As float32 and int64 it is a number that no test computes with.
POISON = 0xC5
INDEX = 1
DEVICE = torch.device("cuda", INDEX)


@dataclass(eq=False)
class Mark:
    """One ``record`` of an event, in the queue of a stream."""

    stream: Stream
    done: bool = False


Item = Callable[[], None] | Mark | tuple[Mark]  # an operation, a record, a wait


class Schedule(Protocol):
    """Selects the queues that progress at a call of the host."""

    def tick(self, device: Device) -> None: ...


class Latest:
    """Nothing runs before the host waits for it."""

    def tick(self, device: Device) -> None:
        pass


@dataclass
class SideFirst:
    """Streams other than the default one run at once, unless an event stops them. The model's stream is late."""

    def tick(self, device: Device) -> None:
        for stream in device.streams[1:]:
            while stream.step():
                pass


@dataclass
class ModelFirst:
    """The model's stream runs at once. All others are late."""

    def tick(self, device: Device) -> None:
        while device.streams[0].step():
            pass


class Random:
    """A random number of operations of random streams."""

    def __init__(self, seed: int, most: int = 3):
        self._random = random.Random(seed)
        self._most = most

    def tick(self, device: Device) -> None:
        for _ in range(self._random.randint(0, self._most)):
            self._random.choice(device.streams).step()


class Allocation:
    """Memory of the device. ``stream``: the current stream at its allocation."""

    def __init__(self, device: Device, backing: torch.Tensor, stream: Stream):
        self.device, self.backing, self.stream = device, backing, stream

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        backing = self.backing
        self.stream.items.append(lambda: poison(backing))


def poison(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().fill_(POISON)
    return tensor


class SimulatedTensor(torch.Tensor):
    """A tensor on the simulated device. ``host``: the same view of its memory, as a host tensor."""

    host: torch.Tensor
    allocation: Allocation

    @staticmethod
    def __new__(cls, host: torch.Tensor, allocation: Allocation) -> SimulatedTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            device=DEVICE,
        )  # fmt: skip
        made.host, made.allocation = host, allocation
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        (first, *_) = (t for t in tree_flatten((args, kwargs))[0] if isinstance(t, SimulatedTensor))
        return first.allocation.device.dispatch(func, args, kwargs or {})

    # torch's subscript operators require a CUDA build before they dispatch.
    def __getitem__(self, key: Any) -> torch.Tensor:
        keys = key if isinstance(key, tuple) else (key,)
        if not any(isinstance(k, torch.Tensor) for k in keys):
            return SimulatedTensor(self.host[key], self.allocation)
        return torch.ops.aten.index.Tensor(self, _indices(keys))

    def __setitem__(self, key: Any, value: torch.Tensor) -> None:
        keys = key if isinstance(key, tuple) else (key,)
        if not any(isinstance(k, torch.Tensor) for k in keys):
            self[key].copy_(value, non_blocking=True)
        else:
            torch.ops.aten.index_put_(self, _indices(keys), value)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SimulatedTensor({tuple(self.shape)}, {self.dtype})"


class _Mode(TorchDispatchMode):
    """Sends operations that create tensors to the device. Operations on its tensors dispatch by ``SimulatedTensor``."""

    def __init__(self, device: Device):
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._device.dispatch(func, args, kwargs or {})


@dataclass(eq=False)
class Stream:
    """``torch.cuda.Stream``."""

    simulation: Device
    stream_id: int
    items: deque[Item] = field(default_factory=deque)
    device: torch.device = DEVICE

    def step(self) -> bool:
        """Run the first item. False if there is none, or if it waits for another stream."""
        with self.simulation.lock:
            if not self.items:
                return False
            item = self.items[0]
            if isinstance(item, tuple) and not item[0].done:
                return False
            self.items.popleft()
            if isinstance(item, Mark):
                item.done = True
                self.simulation.changed.notify_all()
            elif callable(item):
                item()
            return True

    def queue(self, item: Item) -> None:
        with self.simulation.lock:
            self.items.append(item)

    def wait_event(self, event: Event) -> None:
        self.simulation.tick()
        if event.mark is not None:
            self.queue((event.mark,))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or torch.cuda.Event()
        event.record(self)
        return event

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def query(self) -> bool:
        self.simulation.tick()
        return not self.items

    def synchronize(self) -> None:
        self.record_event().synchronize()


@dataclass(eq=False)
class Event:
    """``torch.cuda.Event``: refers to its last ``record``. Without a record it is done."""

    simulation: Device
    mark: Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.simulation.current_stream()
        self.mark = Mark(stream)
        stream.queue(self.mark)
        self.simulation.tick()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.simulation.current_stream()).wait_event(self)

    def query(self) -> bool:
        self.simulation.touch()
        self.simulation.tick()
        return self.mark is None or self.mark.done

    def synchronize(self) -> None:
        self.simulation.touch()
        if self.mark is not None:
            self.simulation.wait_for(self.mark)


class Device:
    """The simulated device, which also replaces the module ``torch.cuda``."""

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.host_thread = threading.get_ident()
        self.streams: list[Stream] = []
        self.streams.append(Stream(self, len(self.streams)))
        self.stalls: list[str] = []  # where the host waited for a copy
        self.contexts: set[int] = set()  # current devices of threads that waited for an event
        self._refuse_stalls = False
        self._awaited: list[Mark] = []  # by other threads
        self._pinned: list[tuple[int, int]] = []
        self._kept: list[torch.Tensor] = []
        self._local = threading.local()

    # -- progress ----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Let time pass: the host has made a call."""
        with self.lock:
            self.schedule.tick(self)

    def run_until(self, mark: Mark) -> None:
        with self.lock:
            while not mark.done:
                head = mark.stream.items[0]
                if isinstance(head, tuple):
                    self.run_until(head[0])
                mark.stream.step()

    def wait_for(self, mark: Mark) -> None:
        """Run the operations before ``mark``. Threads other than the test's block until ``grant`` or the schedule."""
        if threading.get_ident() == self.host_thread:
            self.run_until(mark)
            return
        with self.lock:
            self._awaited.append(mark)
            while not mark.done:
                self.changed.wait()
            self._awaited.remove(mark)

    def grant(self) -> None:
        """The host can do nothing more: run the operations that another thread waits for, else one per stream."""
        with self.lock:
            if self._awaited:
                self.run_until(self._awaited[-1])  # others may be even later
                return
            for stream in list(self.streams):
                stream.step()

    def touch(self) -> None:
        self.contexts.add(getattr(self._local, "device", 0))

    # -- tensors -----------------------------------------------------------------------------------------------------

    def put(self, host: torch.Tensor) -> SimulatedTensor:
        """``host`` as memory of the device, without a copy."""
        return SimulatedTensor(host, Allocation(self, host, self.streams[0]))

    def _new(self, like: torch.Tensor) -> SimulatedTensor:
        """Fresh memory with the shape, strides and dtype of ``like``."""
        host = poison(torch.empty_strided(like.size(), like.stride(), dtype=like.dtype))
        return SimulatedTensor(host, Allocation(self, host, self.current_stream()))

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Queue or run one of torch's operations."""
        flat = tree_flatten((args, kwargs))[0]
        ours = [t for t in flat if isinstance(t, SimulatedTensor)]
        name = func._schema.name.removeprefix("aten::")
        if name in ("is_pinned", "_pin_memory"):
            return self._pin(args[0]) if name == "_pin_memory" else self._is_pinned(args[0])
        target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        to_device = target is not None and target.type == "cuda"
        if not ours and not to_device:
            return func(*args, **kwargs)
        self.tick()
        if name == "_to_copy":
            return self._to_copy(args[0], kwargs, target)
        if name == "copy_":
            return self._copy(args[0], args[1], blocking=not (args[2] if len(args) > 2 else kwargs.get("non_blocking")))
        likes = name.endswith("_like")
        known = {id(t) for t in ours}
        strange = [t for t in flat if isinstance(t, torch.Tensor) and id(t) not in known and t.ndim]
        if strange and not likes:
            raise RuntimeError(f"{name}: expected all tensors on {DEVICE}, got one on {strange[0].device}")
        if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            host = func(*_hosts(args), **_hosts(kwargs))  # a view: nothing is computed
            return tree_map_only(torch.Tensor, lambda t: SimulatedTensor(t, ours[0].allocation), host)
        return self._queue(func, args, kwargs, name)

    def _queue(self, func: Any, args: Any, kwargs: dict[str, Any], name: str) -> Any:
        stream = self.current_stream()
        host_args, host_kwargs = _hosts(args), _hosts(kwargs)
        if "device" in host_kwargs:
            host_kwargs["device"] = torch.device("cpu")
        written = [a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if written:
            stream.queue(lambda: _ignore(func(*host_args, **host_kwargs)))
            named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
            return named[written[0].name]
        meta = {**_metas(kwargs), **({"device": torch.device("meta")} if "device" in kwargs or not args else {})}
        found = tree_map_only(torch.Tensor, self._new, func(*_metas(args), **meta))
        if not name.startswith("empty") and not name.startswith("new_empty"):
            outs = [t.host for t in tree_flatten(found)[0] if isinstance(t, SimulatedTensor)]

            def compute() -> None:
                results = [t for t in tree_flatten(func(*host_args, **host_kwargs))[0] if isinstance(t, torch.Tensor)]
                for out, result in zip(outs, results, strict=True):
                    out.copy_(result)

            stream.queue(compute)
        return found

    def _to_copy(self, source: torch.Tensor, kwargs: dict[str, Any], target: torch.device | None) -> torch.Tensor:
        dtype = kwargs.get("dtype") or source.dtype
        there = isinstance(source, SimulatedTensor) if target is None else target.type == "cuda"
        like = torch.empty_like(_metas(source), dtype=dtype)
        made = self._new(like) if there else torch.empty_strided(like.size(), like.stride(), dtype=dtype)
        return self._copy(made, source, blocking=not kwargs.get("non_blocking"))

    def _copy(self, to: torch.Tensor, source: torch.Tensor, *, blocking: bool) -> torch.Tensor:
        host_to, host_source = _hosts(to), _hosts(source)
        self.current_stream().queue(lambda: _ignore(host_to.copy_(host_source)))
        hosts = [t for t in (to, source) if not isinstance(t, SimulatedTensor) and t.ndim]
        if hosts and (blocking or not all(map(self._is_pinned, hosts))):
            self._stall("a copy from or to pageable memory" if not blocking else "a blocking copy")
        return to

    def set_sync_debug_mode(self, mode: str) -> None:
        self._refuse_stalls = mode == "error"

    def _stall(self, why: str) -> None:
        """Make the host wait for all operations queued on the current stream."""
        if self._refuse_stalls:
            raise RuntimeError(f"called a synchronizing CUDA operation: {why}")
        self.stalls.append(why + "\n" + "".join(traceback.format_stack(limit=12)))
        mark = Mark(self.current_stream())
        mark.stream.queue(mark)
        self.run_until(mark)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = tensor.clone()
        self._kept.append(pinned)  # keep it, so that its addresses are not used again
        self.host_register(pinned.data_ptr(), pinned.nbytes, 0)
        return pinned

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, SimulatedTensor):
            return False
        at, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(start <= at and end <= start + size for start, size in self._pinned)

    # -- torch.cuda --------------------------------------------------------------------------------------------------

    def make_stream(self, *_: Any, **__: Any) -> Stream:
        self.streams.append(Stream(self, len(self.streams)))
        return self.streams[-1]

    def event_class(self) -> type[Event]:
        """``torch.cuda.Event``."""
        simulation = self

        class CudaEvent(Event):
            def __init__(self, **_: Any):
                super().__init__(simulation)

        return CudaEvent

    def current_stream(self, _: Any = None) -> Stream:
        return getattr(self._local, "stream", None) or self.streams[0]

    def default_stream(self, _: Any = None) -> Stream:
        return self.streams[0]

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        before = getattr(self._local, "stream", None)
        self._local.stream = stream or before
        try:
            yield
        finally:
            self._local.stream = before

    def set_device(self, device: Any) -> None:
        self._local.device = device if isinstance(device, int) else torch.device(device).index or 0

    def current_device(self) -> int:
        return getattr(self._local, "device", 0)

    def synchronize(self, _: Any = None) -> None:
        with self.lock:
            for stream in list(self.streams):
                stream.synchronize()

    def host_register(self, pointer: int, size: int, _: int) -> int:
        self._pinned.append((pointer, size))
        return 0

    def host_unregister(self, pointer: int) -> int:
        before = len(self._pinned)
        self._pinned = [p for p in self._pinned if p[0] != pointer]
        return 0 if len(self._pinned) < before else 1

    def cudart(self) -> Any:
        class Runtime:
            cudaHostRegister = staticmethod(self.host_register)  # noqa: N815
            cudaHostUnregister = staticmethod(self.host_unregister)  # noqa: N815

        return Runtime


def _indices(keys: tuple[Any, ...]) -> list[torch.Tensor | None]:
    """Subscripts that are tensors or ``:``, in the form of ``aten::index``."""
    if wrong := [k for k in keys if not isinstance(k, torch.Tensor) and k != slice(None)]:
        raise NotImplementedError(f"expected tensors and ':' next to a tensor, got {wrong[0]!r}")
    return [k if isinstance(k, torch.Tensor) else None for k in keys]


def _hosts(tree: Any) -> Any:
    return tree_map_only(SimulatedTensor, lambda t: t.host, tree)


def _metas(tree: Any) -> Any:
    def meta(t: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta")

    return tree_map_only(torch.Tensor, meta, tree)


def _ignore(_: Any) -> None:
    pass


@contextmanager
def simulated_cuda(schedule: Schedule) -> Iterator[Device]:
    """Replace ``torch.cuda`` by a simulated device, for tensors of this thread and for every thread's events.

    Production code that caches tensors of a device (``functools.lru_cache``) must not use those of another simulation.
    So the caches of ``gather`` are emptied before and after.
    """
    from hsx_dist.connector import gather

    device = Device(schedule)
    device.set_device(INDEX)  # as vLLM's worker does in its first thread
    caches = [f for f in vars(gather).values() if hasattr(f, "cache_clear")]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "Stream": device.make_stream,
            "Event": device.event_class(),
            "stream": device.stream,
            "current_stream": device.current_stream,
            "default_stream": device.default_stream,
            "set_device": device.set_device,
            "current_device": device.current_device,
            "synchronize": device.synchronize,
            "cudart": device.cudart,
            "is_available": lambda: True,
            "device_count": lambda: INDEX + 1,
            "_lazy_init": lambda: None,
            "_sleep": lambda _: None,
            "set_sync_debug_mode": device.set_sync_debug_mode,
        }.items():
            patch.setattr(torch.cuda, name, value)
        for cache in caches:
            cache.cache_clear()
        try:
            with _Mode(device):
                yield device
        finally:
            for cache in caches:
                cache.cache_clear()
