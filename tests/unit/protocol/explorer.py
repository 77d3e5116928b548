"""All orders of several processes' calls to one store, up to a number of preemptions.

Each *actor* runs production code on a store that pauses before every call. The explorer chooses whose call is next. For
each order it runs the actors again from the start, so they must not depend on time or on true randomness. After each
call that changed the store it checks a promise. An actor that is not chosen any more is a process that paused for ever,
or died. The method is stateless model checking with bounded preemptions and state caching, as in CHESS (Musuvathi et
al., OSDI 2008).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import greenlet

from hsx_dist.errors import HsxError
from hsx_dist.store.base import Buffer, ObjectInfo
from hsx_dist.testing.stores import MemoryStore


class Violation(AssertionError):
    """The promise is broken. The message lists the calls up to this point."""


class Actor:
    """A process: ``main(root)`` on a store. The explorer grants its calls one by one."""

    def __init__(self, number: int, name: str, main: Callable[[SteppedStore], Any], shared: MemoryStore):
        self.number, self.name = number, name
        self.history = 0  # a hash of the actor's calls and their results
        self.tokens = 0
        self.calls: list[str] = []
        self.numbers: list[int] = []  # numbers of its calls, counted over all actors
        self.result: Any = None
        self.error: BaseException | None = None
        self._store = SteppedStore(shared, self)
        self._main = main
        self._greenlet = greenlet.greenlet(self._run)

    def _run(self) -> None:
        try:
            self.result = self._main(self._store)
        except Exception as e:  # noqa: BLE001 (the scenario looks at it)
            self.error = e

    def step(self) -> None:
        """Let the actor make its pending call, and compute up to the next one."""
        self._greenlet.switch()

    @property
    def alive(self) -> bool:
        return not self._greenlet.dead

    def close(self) -> None:
        if self.alive:
            self._greenlet.throw(greenlet.GreenletExit)

    def pause(self, call: str) -> None:
        greenlet.getcurrent().parent.switch()
        self.calls.append(call)

    def saw(self, *what: Any) -> None:
        self.history = hash((self.history, *what))


class SteppedStore:
    """A store that pauses its actor before every call. A listing is one call."""

    def __init__(self, inner: MemoryStore, actor: Actor):
        self._inner, self._actor = inner, actor
        self.url = inner.url

    def _call(self, verb: str, name: str, call: Callable[[], Any], *about: Any) -> Any:
        self._actor.pause(f"{self._actor.name}: {verb} {name}")
        try:
            found = call()
        except Exception as e:
            self._actor.saw(verb, name, type(e))
            raise
        self._actor.saw(verb, name, *about, found if isinstance(found, bytes | tuple) else repr(found))
        return found

    def put(self, name: str, buffers: Sequence[Buffer]) -> None:
        self._call("put", name, lambda: self._inner.put(name, buffers))

    def put_if_absent(self, name: str, data: bytes | Sequence[Buffer]) -> None:
        self._call("put_if_absent", name, lambda: self._inner.put_if_absent(name, data))

    def get(self, name: str, most: int | None = None) -> bytes:
        return self._call("get", name, lambda: self._inner.get(name, most), most)

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        views = self._call("get_ranges", name, lambda: tuple(map(bytes, self._inner.get_ranges(name, ranges))))
        return list(map(memoryview, views))

    def head(self, name: str) -> ObjectInfo:
        return self._call("head", name, lambda: self._inner.head(name))

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        return iter(self._call("list", prefix, lambda: tuple(self._inner.list(prefix, after)), after))

    def delete(self, name: str) -> None:
        self._call("delete", name, lambda: self._inner.delete(name))


class ConditionalSteppedStore(SteppedStore):
    """Has conditional puts, as most stores. They add calls, so only actors that need them use this store."""

    def __init__(self, store: SteppedStore):
        super().__init__(store._inner, store._actor)

    def version(self, name: str) -> str:
        return self._call("version", name, lambda: self._inner.version(name))

    def put_version(self, name: str, buffers: Sequence[Buffer], version: str) -> bool:
        return self._call("put_version", name, lambda: self._inner.put_version(name, buffers, version))

    def delete_version(self, name: str, version: str) -> bool:
        return self._call("delete_version", name, lambda: self._inner.delete_version(name, version))


@dataclass
class Scenario:
    """``prepare(store)`` stores the initial objects. ``actors``: name → the process's function.

    ``promise(store, seen)`` is called with a copy of the store after each change, and raises when a promise is broken.
    ``seen`` is its memory within one order of calls. ``at_end(store, actors)`` is called when all actors have ended.
    """

    prepare: Callable[[MemoryStore], None]
    actors: dict[str, Callable[[SteppedStore], Any]]
    promise: Callable[[MemoryStore, dict[Any, Any]], None]
    at_end: Callable[[MemoryStore, dict[str, Actor]], None] = lambda _store, _actors: None


@dataclass
class Explored:
    """Counts of an exploration."""

    orders: int = 0
    calls: int = 0
    states: set[Any] = field(default_factory=set)
    kept: dict[Any, dict[Any, Any]] = field(default_factory=dict)  # contents that passed the promise

    def check(self, scenario: Scenario, store: MemoryStore, seen: dict[Any, Any]) -> dict[Any, Any]:
        """Check the promise, or reuse an earlier result for equal contents. Returns ``seen`` afterwards."""
        key = (frozenset(store.objects.items()), frozenset(seen.items()))
        if key not in self.kept:
            after = dict(seen)
            scenario.promise(_copy(store), after)
            self.kept[key] = after
        return self.kept[key]


def explore(scenario: Scenario, *, preemptions: int | None, most_orders: int | None = None) -> Explored:
    """Run ``scenario`` in every order with at most ``preemptions`` switches away from an actor that could continue.

    ``None``: any number of switches.

    Raises:
        Violation: an order breaks the promise.
    """
    found = Explored()
    todo: list[tuple[int, ...]] = [()]
    while todo and (most_orders is None or found.orders < most_orders):
        todo += _run(scenario, todo.pop(), preemptions, found)
        found.orders += 1
    return found


def _run(
    scenario: Scenario, prefix: tuple[int, ...], preemptions: int | None, found: Explored
) -> list[tuple[int, ...]]:
    """Run one order that begins with ``prefix``. Returns the prefixes of orders that must still be run."""
    shared = MemoryStore()
    scenario.prepare(shared)
    actors = [Actor(i, name, main, shared) for i, (name, main) in enumerate(scenario.actors.items())]
    seen: dict[Any, Any] = {}
    calls: list[str] = []
    others: list[tuple[int, ...]] = []
    trace: tuple[int, ...] = ()
    current, spent = -1, 0
    try:
        for actor in actors:
            with as_actor(actor):
                actor.step()  # up to its first call
        seen = found.check(scenario, shared, seen)
        while alive := [a.number for a in actors if a.alive]:
            if len(trace) < len(prefix):
                choice = prefix[len(trace)]
            else:
                state = (
                    hash(frozenset(shared.objects.items())),
                    hash(frozenset(seen.items())),
                    *(a.history for a in actors),
                    current,
                    spent,
                )
                if state in found.states:
                    return others
                found.states.add(state)
                choice = current if current in alive else alive[0]
                may_switch = current not in alive or preemptions is None or spent < preemptions
                others += [(*trace, a) for a in alive if a != choice] if may_switch else []
            spent += current in alive and choice != current
            trace, current = (*trace, choice), choice
            before = dict(shared.objects)
            with as_actor(actors[choice]):
                actors[choice].step()
            found.calls += 1
            calls += actors[choice].calls[-1:]
            actors[choice].numbers.append(len(calls))
            if shared.objects != before:
                seen = found.check(scenario, shared, seen)
        scenario.at_end(_copy(shared), {a.name: a for a in actors})
    except Violation:
        raise
    except (AssertionError, HsxError) as e:
        raise Violation(f"{type(e).__name__}: {e}\nafter:\n  " + "\n  ".join(calls)) from e
    finally:
        for actor in actors:
            actor.close()
    return others


def _copy(store: MemoryStore) -> MemoryStore:
    copy = MemoryStore(store.url)
    copy.objects = dict(store.objects)
    return copy


_current: list[Actor] = []


class as_actor:  # noqa: N801 (used like a function)
    """Give an actor its own random numbers while it computes."""

    def __init__(self, actor: Actor):
        self._actor = actor

    def __enter__(self) -> None:
        _current.append(self._actor)

    def __exit__(self, *_: object) -> None:
        _current.pop()


def token(nbytes: int = 8) -> str:
    """Replaces ``secrets.token_hex``: different digits for each actor and call, equal in each run."""
    if not _current:
        return "0" * (2 * nbytes)
    actor = _current[-1]
    actor.tokens += 1
    return f"{actor.number + 1:02x}{actor.tokens:0{2 * nbytes - 2}x}"
