"""The shipping thread's batches, and its limit for waiting for more pages."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from hsx_dist.observe.metrics import Meter
from hsx_dist.page import Page, Segment
from hsx_dist.transport.local_end import count_shipped
from hsx_dist.transport.shipping import COALESCE_BYTES, Shipped, ShippingThread

FOREVER = 600.0


def page(i: int, nbytes: int) -> tuple[Page, None]:
    tokens = nbytes // 4
    segment = Segment(f"k{i}", 0, 0, tokens, tokens)
    ids = np.zeros(tokens, np.int64)
    return Page(segment, 0, tokens, tokens, (0,), "float32", (1, tokens, 1), "LTH", ids, offset=0), None


class Thread:
    def __init__(self, **options):
        self.calls: queue.Queue[list[str]] = queue.Queue()
        self.thread = ShippingThread(self._deliver, Meter(), **options)

    def _deliver(self, refs: list[Page], told: list[Shipped]) -> None:
        self.calls.put([ref.segment.key + ref.error for ref in refs] or [shipped.key for shipped in told])


def test_small_pages_wait_for_one_another():
    thread = Thread(least_bytes=100, linger_s=FOREVER)
    thread.thread.put(page(0, 40))
    thread.thread.put(page(1, 40), page(2, 40))
    assert thread.calls.get(timeout=60) == ["k0", "k1", "k2"]


def test_the_last_of_ordered_copies_is_waited_for_first():
    thread, asked = Thread(least_bytes=100, linger_s=FOREVER), []

    def ready(name: str) -> None:
        asked.append(name)
        if name == "b":
            raise ValueError("not copied")

    for i, name in enumerate("abc"):
        thread.thread.put((page(i, 40)[0], partial(ready, name)))
    assert thread.calls.get(timeout=60) == ["k0", "k1its states were not copied: ValueError: not copied", "k2"]
    assert asked == ["c", "a", "b", "c"]


def test_an_error_while_idle_does_not_end_the_thread(monkeypatch):
    monkeypatch.setattr(ShippingThread, "IDLE_S", 0.01)
    raised = threading.Event()

    def idle() -> None:
        if not raised.is_set():
            raised.set()
            raise AttributeError("the peer is gone")

    thread = Thread(idle=idle)
    assert raised.wait(60)
    thread.thread.put(page(0, 40))
    assert thread.calls.get(timeout=60) == ["k0"]


def test_each_column_of_a_sample_is_reported_with_its_own_failure():
    told: queue.Queue[list[Shipped]] = queue.Queue()
    thread = ShippingThread(lambda _, shipped: told.put(shipped), Meter())

    def fails() -> None:
        raise ValueError("not copied")

    pages = [replace(page(0, 40)[0], segment=Segment("k0", 0, 0, 10, 10, column=c, columns=3)) for c in range(3)]
    thread.put((pages[0], None), (pages[1], fails), (pages[2], None))
    found = told.get(timeout=60)
    assert [(one.key, one.column, one.columns) for one in found] == [("k0", 0, 3), ("k0", 1, 3), ("k0", 2, 3)]
    assert [one.reason is None for one in found] == [True, False, True]
    meter = Meter()
    count_shipped(meter, pages, found, 0.0)
    counted = {name: value for (name, _), value in meter.sums().items()}
    assert (counted["samples"], counted["skipped"], counted["pages"]) == (1, 1, 3)


def test_large_pages_are_sent_at_once():
    thread = Thread(least_bytes=100, linger_s=FOREVER)
    thread.thread.put(page(0, 100))
    assert thread.calls.get(timeout=60) == ["k0"]


def test_a_lone_small_page_is_sent_after_a_delay():
    thread = Thread(least_bytes=100, linger_s=0.01)
    thread.thread.put(page(0, 40))
    assert thread.calls.get(timeout=60) == ["k0"]


def test_messages_without_pages_are_sent_at_once():
    thread = Thread(least_bytes=100, linger_s=FOREVER)
    thread.thread.put(Shipped("skipped", "too short"))
    assert thread.calls.get(timeout=60) == ["skipped"]


def test_closing_sends_waiting_pages_at_once():
    thread = Thread(least_bytes=100, linger_s=FOREVER)
    thread.thread.put(page(0, 40))
    assert thread.thread.close(60)
    assert thread.calls.get(timeout=60) == ["k0"]


@pytest.mark.parametrize("linger_s", [0.0, FOREVER])
def test_a_call_has_a_limit(linger_s: float):
    thread = Thread(least_bytes=100, linger_s=linger_s)
    thread.thread.put(*[page(i, COALESCE_BYTES // 2) for i in range(4)])
    calls = [thread.calls.get(timeout=60)]
    while sum(map(len, calls)) < 4:
        calls.append(thread.calls.get(timeout=60))
    assert max(map(len, calls)) <= 2
