"""In every placement of the writers, each submitted sample is stored or reported lost, once, and the ring is freed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hsx_dist.page import Page
from hsx_dist.transport.attach import AttachedEnd
from hsx_dist.transport.local_end import LocalEnd
from tests.unit.transport.placements import PLACEMENTS, RING, Placement, attach, inline, some, until


@pytest.fixture(params=PLACEMENTS)
def placement(request, tmp_path) -> Iterator[Placement]:
    with PLACEMENTS[request.param](tmp_path) as made:
        made.name = request.param
        yield made


def test_stored_states_equal_the_submitted_states_after_the_ring_wraps(placement):
    sent = {f"k{i}": some(40, seed=i) for i in range(600)}  # three times the ring
    assert sum(s.nbytes for s in sent.values()) > 2 * RING
    for key, states in sent.items():
        placement.submit(key, states)
    placement.wait_for(*sent)
    until(lambda: len(placement.shipped) == len(sent))
    assert all(outcome == [None] for outcome in placement.outcomes.values())
    for key in list(sent)[::20]:
        np.testing.assert_array_equal(placement.states(key), sent[key])
    until(lambda: counts(placement).get("samples") == len(sent))
    counted = counts(placement)
    assert counted["pages"] == counted["parts"] == len(sent)
    assert counted["page_bytes"] == counted["raw_bytes"] == sum(s.nbytes for s in sent.values())


def counts(placement: Placement) -> dict[str, float]:
    return {name: value for (name, _), value in placement.meter.sums().items()}


def test_metadata_and_arrays_of_a_sample_of_several_pages_are_stored(placement):
    states = some(10)
    mask = np.arange(10, dtype=np.int64) % 2
    placement.submit("a", states, page_tokens=4, meta={"user": {"id": 7}}, attached={"loss_mask": mask})
    placement.wait_for("a")
    np.testing.assert_array_equal(placement.states("a"), states)
    assert placement.stored("a")["meta"]["user"] == {"id": 7}
    assert placement.stored("a")["loss_mask"].tolist() == mask.tolist()


def test_a_transport_without_work_holds_nothing_of_stored_samples(placement):
    """Its threads above all: they must keep no metadata or attached arrays of a stored sample."""
    arrays = {f"k{i}": np.arange(10, dtype=np.int64) for i in range(4)}
    held = [weakref.ref(array) for array in arrays.values()]
    for key in list(arrays):
        placement.submit(key, some(10), page_tokens=4, attached={"loss_mask": arrays.pop(key)})
    placement.wait_for(*(f"k{i}" for i in range(4)))
    until(lambda: not any(ref() is not None for ref in held))


def test_a_page_that_was_not_copied_fails_its_sample_alone(placement):
    def broken() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    first, second = placement.pages("a", some(8), page_tokens=4)
    placement.end.submit((first, broken), (second, None))
    placement.submit("b", some(), ready=lambda: None)
    placement.wait_for("a", "b")
    assert placement.outcomes["b"] == [None]
    (why,) = placement.outcomes["a"]
    assert "illegal memory access" in why
    until(lambda: len(placement.shipped) == 2)
    assert {s.key: s.reason is None for s in placement.shipped} == {"a": False, "b": True}


def test_a_page_that_cannot_be_read_fails_its_sample_alone(placement, monkeypatch):
    """All pages are in one call. The process that reads the bad page finds it outside the ring."""
    pages = {key: next(placement.pages(key, some())) for key in ("a", "bad", "c")}
    if placement.name == "inline":
        pages["bad"] = replace(pages["bad"], shape=(1 << 20, 1 << 20, 1))
    else:
        whole = Page.detached

        def detached(page: Page) -> Page:
            sent = whole(page)
            return replace(sent, shape=(1 << 20, 1 << 20, 1)) if page.segment.key == "bad" else sent

        monkeypatch.setattr(Page, "detached", detached)
    placement.end.submit(*[(page, None) for page in pages.values()])
    placement.wait_for(*pages)
    assert placement.outcomes["a"] == placement.outcomes["c"] == [None]
    (why,) = placement.outcomes["bad"]
    assert "cannot be read" in why
    placement.submit("later", some())
    placement.wait_for("later")
    assert placement.outcomes["later"] == [None]


@pytest.mark.parametrize("placement", ["attach", "spawn"], indirect=True)
def test_a_page_that_cannot_be_pickled_fails_its_sample_alone(placement):
    pages = [
        page
        for key in ("a", "bad", "c")
        for page in placement.pages(
            key, some(8), page_tokens=4, attached={"x": threading.Lock()} if key == "bad" else {}
        )
    ]
    placement.end.submit(*[(page, None) for page in pages])
    placement.wait_for("a", "bad", "c")
    assert placement.outcomes["a"] == placement.outcomes["c"] == [None]
    (why,) = placement.outcomes["bad"]
    assert "cannot be passed on" in why


@pytest.mark.parametrize("placement", ["attach", "spawn"], indirect=True)
def test_a_sample_without_its_first_page_fails_alone(placement):
    _, late = placement.pages("a", some(8), page_tokens=4)
    placement.end.submit((late, None))
    placement.end.ring.free(0)  # the slot of the first page, which was never submitted
    placement.submit("b", some())
    placement.wait_for("a", "b")
    assert placement.outcomes["a"] == ["not all of its pages arrived"]
    assert placement.outcomes["b"] == [None]


def test_a_sample_of_which_nothing_is_stored_is_reported_after_the_pages_before_it(placement):
    placement.submit("a", some())
    placement.end.skip("b", "too short", final=True)
    until(lambda: len(placement.shipped) == 2)
    told = [(s.key, s.reason, s.final) for s in placement.shipped]
    assert told == [("a", None, False), ("b", "too short", True)]
    placement.wait_for("a")


class Refusing:
    """A sender that frees the first page of the key ``bad``, and then raises."""

    def __init__(self, sender):
        self.sender = sender
        self.late = []

    def send(self, pages, release):
        if any(page.segment.key == "bad" for page in pages):
            release(pages[0])
            self.late += [(release, page) for page in pages]
            raise RuntimeError("the object store is full")
        self.sender.send(pages, release)

    def flush(self):
        self.sender.flush()

    def close(self):
        self.sender.close()


@pytest.mark.parametrize("place", [inline, attach], ids=["inline", "attach"])
def test_pages_that_the_sender_refuses_are_reported_and_freed_once(tmp_path, place):
    made = []

    def wrap(sender):
        made.append(Refusing(sender))
        return made[-1]

    with place(tmp_path, wrap) as placement:
        first, second = placement.pages("bad", some(8), page_tokens=4)
        placement.end.submit((first, None), (second, None))
        placement.wait_for("bad")
        assert set(placement.outcomes["bad"]) == {"its pages were not shipped: RuntimeError: the object store is full"}
        until(lambda: len(placement.shipped) == 1)
        assert "object store is full" in placement.shipped[0].reason
        other = placement.end.ring.allocate(64)  # in the first page's slot
        for release, page in made[0].late:
            release(page)
        placement.submit("b", some())
        until(lambda: placement.outcomes["b"] == [None])
        until(lambda: placement.end.ring.used_bytes == 64)
        placement.end.ring.free(other)


def test_pages_of_an_engine_that_ends_are_stored(placement):
    states = {f"k{i}": some(seed=i) for i in range(20)}
    for key, rows in states.items():
        placement.submit(key, rows)
    placement.end.close(30)
    until(lambda: states.keys() <= placement.outcomes.keys())
    assert all(outcome == [None] for outcome in placement.outcomes.values())


def test_closing_waits_no_longer_than_its_time_limit(tmp_path):
    go = threading.Event()

    class Hanging:
        def send(self, pages, release):
            go.wait(60)
            for page in pages:
                release(page)

        def flush(self): ...
        def close(self): ...

    end = LocalEnd(Hanging(), RING)
    placement = Placement(tmp_path)
    placement.end = end
    placement.submit("a", some())
    end.close(0.1)
    assert end.pending == 1
    go.set()
    until(lambda: not end.pending)
    assert end.ring.used_bytes == 0


LISTENING = """
import sys
from pathlib import Path
from hsx_dist.transport.page_server import PageServer
class Keeping:
    def send(self, pages, release): print("has", len(pages), flush=True)
    def flush(self): ...
    def close(self): ...
server = PageServer(Keeping, print)
print(server.address, server.key.hex(), flush=True)
sys.stdin.read()
"""


def test_a_killed_attached_process_frees_the_engines_ring(tmp_path, caplog):
    """The engine runs on for a moment. Its steps must not wait for slots that no process frees."""
    with subprocess.Popen([sys.executable, "-c", LISTENING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer:
        assert peer.stdout is not None
        address, key = peer.stdout.readline().decode().split()
        placement = Placement(tmp_path)
        placement.end = AttachedEnd(address, bytes.fromhex(key), RING)
        placement.submit("a", some())
        assert peer.stdout.readline() == b"has 1\n"
        assert placement.end.ring.used_bytes
        peer.kill()
    shutil.rmtree(Path(address).parent)
    until(lambda: not placement.end.ring.used_bytes)
    assert "closed the connection" in caplog.text
    for i in range(600):  # more than the ring: a slot that stays occupied would block this
        placement.submit(f"k{i}", some(40))
    until(lambda: not placement.end.pending)
    assert not placement.end.ring.used_bytes
    placement.end.close(30)
