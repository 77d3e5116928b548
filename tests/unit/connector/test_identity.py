"""A reader that compares identities never gets another request's sample, in every order of stores and failures."""

from __future__ import annotations

import threading
import time

import pytest

import hsx_dist
from hsx_dist.connector.locks import ObjectLocks
from hsx_dist.connector.step import Skip
from hsx_dist.errors import ConfigError, NotFound, SampleConflict, SampleFailed, StoreError
from hsx_dist.store import open_store
from hsx_dist.testing.faulty_stores import PUTS, FailingStore, Strike
from hsx_dist.testing.samples import random_sample
from tests.harness.runs import store_run
from tests.unit.connector.small_outlet import outlet_on, some, submit

NAME = "k.safetensors"
A, B = ({"request": letter * 32, "tokens": letter * 32} for letter in "ab")
PATTERN = r"expected the sample of request .*b{32}.*, got "


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def store_a(tmp_path, name="", identity=A):
    outlet = outlet_on(tmp_path)
    submit(outlet, "k", some(), name=name, request="A", meta={"identity": identity} if identity else {})
    outlet.close()


def of_b(tmp_path, name=NAME, wait=0.0):
    return hsx_dist.load_hidden_states(str(tmp_path / name), identity=B, wait=wait, framework="numpy")


def test_the_sample_of_the_answer_is_loaded(tmp_path):
    store_a(tmp_path, identity=B)
    assert of_b(tmp_path)["meta"]["identity"] == B


@pytest.mark.parametrize("identity", [A, None])
def test_another_requests_sample_is_an_error(tmp_path, identity):
    """Also an object without identity, from an earlier version or from vLLM's own connector."""
    store_a(tmp_path, identity=identity)
    with pytest.raises(SampleConflict, match=PATTERN):
        of_b(tmp_path)
    assert hsx_dist.load_hidden_states(str(tmp_path / NAME))["key"] == "k"


def test_a_path_is_waited_for_until_it_is_replaced(tmp_path):
    path = "sub/x.safetensors"
    store_a(tmp_path, path)
    with pytest.raises(SampleConflict, match=PATTERN):
        of_b(tmp_path, path)
    found = []
    reader = threading.Thread(target=lambda: found.append(of_b(tmp_path, path, wait=30)))
    reader.start()
    outlet = outlet_on(tmp_path)
    submit(outlet, "k", some(seed=1), ids=[9] * 5, name=path, request="B", meta={"identity": B})
    reader.join(60)
    outlet.close()
    assert found[0]["token_ids"].tolist() == [9] * 5


def test_a_sample_of_a_run_has_no_identity(tmp_path):
    store = open_store(str(tmp_path))
    store_run(store, [random_sample("a", 4)])
    with pytest.raises(SampleConflict, match=r"'a': expected the sample of request .* got one without identity"):
        hsx_dist.load_hidden_states(str(tmp_path), "a", identity=B)


@pytest.mark.parametrize("identity", ["b" * 32, {}, 1])
def test_malformed_identities_are_refused(tmp_path, identity):
    store_a(tmp_path)
    with pytest.raises(ConfigError, match="identity: expected the answer's"):
        hsx_dist.load_hidden_states(str(tmp_path / NAME), identity=identity)


def a_killed_engine(tmp_path):
    """B's engine ends after the answer. B has neither an object nor a marker."""


def a_full_store(tmp_path):
    refuse = StoreError("No space left on device")
    stores = [FailingStore(open_store(str(tmp_path)), refuse, Strike(PUTS)) for _ in range(2)]
    outlet = outlet_on(tmp_path, store=stores[0], markers=stores[1])
    submit(outlet, "k", some(seed=1), ids=[9] * 5, request="B", meta={"identity": B})
    outlet.close()


def a_cleared_marker(tmp_path):
    outlet = outlet_on(tmp_path)
    outlet.skip(Skip("B", "k", NAME, 0, "aborted", request=B["request"]))
    until(lambda: not outlet.pending)
    submit(outlet, "k", some(), request="A2", meta={"identity": A})
    outlet.close()


@pytest.mark.parametrize("how", [a_killed_engine, a_full_store, a_cleared_marker])
def test_readers_get_no_other_requests_sample_in_any_order_of_events(tmp_path, how):
    if how is not a_cleared_marker:
        store_a(tmp_path)
    how(tmp_path)
    with pytest.raises((SampleConflict, SampleFailed)):
        of_b(tmp_path)


def test_a_failed_request_does_not_get_an_object_without_identity(tmp_path):
    store_a(tmp_path, identity=None)
    outlet = outlet_on(tmp_path)
    outlet.skip(Skip("B", "k", NAME, 0, "aborted", request=B["request"]))
    outlet.close()
    assert not (tmp_path / f"{NAME}.conflict.json").exists()
    with pytest.raises(SampleFailed, match="aborted"):
        hsx_dist.load_hidden_states(str(tmp_path / NAME))
    store_a(tmp_path, identity=None)
    assert hsx_dist.load_hidden_states(str(tmp_path / NAME))["key"] == "k"


def test_a_lock_that_another_server_or_gc_held_is_taken_when_it_opens(tmp_path):
    """The engine's step does not wait for it. Readers of its request wait until the other process is done."""
    other, locks = ObjectLocks(tmp_path), ObjectLocks(tmp_path)
    other.hold(NAME, "A")
    (tmp_path / NAME).touch()
    locks.ask(NAME, "B")
    locks.wait()
    assert not locks._held[NAME].held
    other.release("A", stored=True)
    until(lambda: locks._held[NAME].held)
    with pytest.raises(NotFound, match="held by a server"):
        hsx_dist.load_hidden_states(str(tmp_path / NAME))
    locks.release("B", stored=True)
    locks.ask(NAME, "C")
    locks.wait()
    assert locks._held[NAME].held
    for each in (other, locks):
        each.release_all()
