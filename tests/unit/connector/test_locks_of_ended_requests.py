"""A lock file is held for a request only until the request has ended, in any order of its messages and threads."""

from __future__ import annotations

import fcntl
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hsx_dist.connector import failure_markers
from hsx_dist.connector.locks import ObjectLocks
from hsx_dist.connector.object_writer import StoreOutlet
from hsx_dist.connector.step import Expect, Skip
from hsx_dist.errors import Denied, Unavailable
from hsx_dist.store.local import LocalStore
from tests.unit.connector.small_outlet import outlet_on, some, submit
from tests.unit.transport.placements import until

NAME = "a.safetensors"


@contextmanager
def idle_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the block, no thread handles an ask."""
    go, settle = threading.Event(), ObjectLocks._settle

    def waiting(self: ObjectLocks, name: str, holder: str) -> bool:
        assert go.wait(30)
        return settle(self, name, holder)

    monkeypatch.setattr(ObjectLocks, "_settle", waiting)
    try:
        yield
    finally:
        go.set()


def conflict(request: str) -> Skip:
    return Skip(request, "a", NAME, 0, "used before for another sample", False, True, "1" * 32)


def test_an_ask_does_not_look_at_all_held_locks(tmp_path):
    """Otherwise the time for each request grows with the number of requests that wait for the store."""
    looks = []

    class Held(dict):
        def items(self):
            looks.append(len(self))
            return super().items()

        def __iter__(self):
            looks.append(len(self))
            return super().__iter__()

    locks = ObjectLocks(tmp_path)
    locks._held = Held()
    for i in range(100):
        locks.ask(f"{i}", f"{i}")
        locks.wait()
    assert len(locks._held) == 100
    assert looks == []
    locks.release_all()


def test_a_lock_that_another_server_takes_during_a_release_is_taken_when_it_opens(tmp_path, monkeypatch):
    path, locks = tmp_path / f"{NAME}.lock", ObjectLocks(tmp_path)
    (tmp_path / NAME).touch()
    locks.hold(NAME, "r1")
    path.unlink()
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        look, take = locks._is_there, locks._open

        def join(name: str) -> bool:
            locks.hold(name, "r2")
            return look(name)

        def tried_before_it_is_used(name: str, *, last: bool) -> tuple[int, bool] | None:
            taken = take(name, last=last)
            locks._take_lacking()
            return taken

        with monkeypatch.context() as patches:
            patches.setattr(locks, "_is_there", join)
            patches.setattr(locks, "_open", tried_before_it_is_used)
            locks.release("r1", stored=False)
        assert not locks._held[NAME].held
    locks.ask("b", "b")
    until(lambda: locks._held[NAME].held)
    locks.release_all()


@pytest.mark.parametrize("end", ["release", "pass_on"])
def test_a_second_ask_takes_no_lock_after_its_request_has_ended(tmp_path, monkeypatch, end):
    locks = ObjectLocks(tmp_path)
    locks.ask(NAME, "r0")
    locks.ask(NAME, "r1")
    locks.wait()
    with idle_thread(monkeypatch):
        locks.ask(NAME, "r1")
        if end == "pass_on":
            locks.pass_on("r1", "r0")
        else:
            locks.release("r1", stored=False)
        locks.release("r0", stored=False)
    locks.wait()
    assert (locks._held, locks._names, list(tmp_path.iterdir())) == ({}, {}, [])


def test_a_request_that_ends_before_its_ask_is_handled_has_no_lock(tmp_path, monkeypatch):
    locks = ObjectLocks(tmp_path)
    with idle_thread(monkeypatch):
        for request in ("r0", "r1", "r2"):
            locks.ask(request, request)
        locks.release("r0", stored=False)
        locks.pass_on("r1", "r3")
        locks.release("r2", stored=False)
        locks.ask("r2", "r2")  # a later request with the same id
    locks.wait()
    assert {name: lock.holders for name, lock in locks._held.items()} == {"r1": {"r3"}, "r2": {"r2"}}
    locks.release("r3", stored=False)
    locks.release("r2", stored=False)
    assert (locks._held, locks._names, list(tmp_path.iterdir())) == ({}, {}, [])


def test_a_conflict_at_a_requests_end_leaves_no_lock(tmp_path, monkeypatch):
    """Its key and prompt are another request's, and its generated tokens are not. It has had its lock since its
    start."""
    outlet = outlet_on(tmp_path)
    requests = ["r0", "r1", "r2"]
    for request in requests:
        outlet.expect(Expect(request, NAME, 0, True, "1" * 32))
    outlet.prepared()
    asked: list[str] = []
    ask = ObjectLocks.ask
    monkeypatch.setattr(ObjectLocks, "ask", lambda self, name, holder: (asked.append(holder), ask(self, name, holder)))
    with idle_thread(monkeypatch):
        for request in requests:
            outlet.skip(conflict(request))
        until(lambda: not outlet.pending)
    outlet.prepared()
    assert (outlet._locks._held, asked) == ({}, [])
    outlet.skip(conflict("never scheduled"))
    assert asked == ["never scheduled"]
    outlet.prepared()
    until(lambda: not outlet.pending and not outlet._locks._held)
    outlet.close(10)


class _Unreliable(LocalStore):
    """A store whose calls fail at random until ``mended``."""

    def __init__(self, url: str, chance: random.Random):
        super().__init__(url)
        self.chance, self.mended = chance, False

    def _fail(self) -> None:
        if not self.mended and self.chance.random() < 0.2:
            raise self.chance.choice([Unavailable, Denied])("the store is busy")

    def put(self, name, buffers):
        self._fail()
        super().put(name, buffers)

    def put_if_absent(self, name, data):
        self._fail()
        super().put_if_absent(name, data)

    def get(self, name, most=None):
        self._fail()
        return super().get(name, most)


def _one_message(outlet: StoreOutlet, live: list[str], chance: random.Random, number: int) -> None:
    kind = chance.choice(["expect", "expect", "conflict", "end", "end", "store"])
    name = chance.choice("abc")
    if kind == "expect":
        live.append(f"r{number}:{name}")
        outlet.expect(Expect(live[-1], f"{name}.safetensors", 0, True, chance.choice("12") * 32))
    elif kind == "conflict":
        outlet.skip(Skip(f"r{number}", name, f"{name}.safetensors", 0, "used before", False, True, "2" * 32))
    elif kind == "store":
        submit(outlet, name, some(), request=f"r{number}")
    elif live:
        request = live.pop(chance.randrange(len(live)))
        name = request[-1]
        quiet, refused = chance.choice([(True, False), (False, True), (False, False)])
        outlet.skip(Skip(request, name, f"{name}.safetensors", 0, "it ended", quiet, refused, "1" * 32))


@pytest.mark.parametrize("seed", range(2))
def test_no_lock_is_held_after_any_order_of_messages(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(failure_markers, "_AGAIN_S", 0.02)
    chance = random.Random(seed)
    store = _Unreliable(str(tmp_path), chance)
    outlet = outlet_on(tmp_path, store=store, markers=store)
    live: list[str] = []
    for number in range(300):
        _one_message(outlet, live, chance, number)
        if chance.random() < 0.5:
            outlet.prepared()
    for request in live:
        outlet.skip(Skip(request, request[-1], f"{request[-1]}.safetensors", 0, "the engine ends"))
    outlet.prepared()
    store.mended = True
    until(lambda: not outlet.pending and not outlet._locks._held)
    assert (outlet._locks._names, outlet._requests, outlet._names, outlet._claims) == ({}, {}, {}, {})
    outlet.close(10)
