"""Messages to an engine: their order, which ones are sent together, and the state after a failure."""

from __future__ import annotations

import logging
import logging.handlers
import threading
from multiprocessing import Pipe

import pytest

from hsx_dist.observe.metrics import Meter
from hsx_dist.page import Segment
from hsx_dist.transport import channel
from hsx_dist.transport.channel import ReturnQueue
from hsx_dist.writers.events import Lost, Stored
from tests.unit.transport.placements import place


def test_queued_messages_are_sent_together_with_metrics_first(monkeypatch):
    monkeypatch.setattr(channel, "RETURN_LINGER_S", 0.5)
    ours, theirs = Pipe()
    meter = Meter()
    with ours, theirs:
        teller = ReturnQueue(theirs, 100, meter)
        teller.took(10)
        meter.add("parts", 1)
        teller.free(place(7, 10))
        segment = Segment("k", 0, 0, 5, 5, source="r:0", metadata='{"long": 1}', meta={"a": 1})
        teller.event(Stored((segment,), "k.safetensors"))
        teller.close()
        stored = Stored((segment,), "k.safetensors")
        messages = ours.recv()
        assert messages == [("numbers", {("parts", ""): 1}), ("free", 7), ("event", stored)]
        told = messages[-1][1].segments[0]  # without fields that a client can make long
        assert (told.source, told.metadata, told.meta) == ("r:0", "", {})
        assert not ours.poll()


def test_a_log_record_that_cannot_be_pickled_is_sent_as_text():
    ours, theirs = Pipe()
    with ours, theirs:
        teller = ReturnQueue(theirs, 100, Meter())
        handler = logging.handlers.QueueHandler(teller)
        line = {"name": "library", "msg": "slow: %s", "args": ("x",), "its": threading.Lock()}
        handler.handle(logging.makeLogRecord(line))
        teller.free(place(7, 2))
        messages = []
        while ("free", 7) not in messages:
            assert ours.poll(60)
            messages += ours.recv()
        (record,) = [what for kind, what in messages if kind == "log"]
        assert (record.name, record.getMessage()) == ("library", "slow: x")


def test_a_half_full_ring_gets_freed_space_back_at_once(monkeypatch):
    monkeypatch.setattr(channel, "RETURN_LINGER_S", 600)
    ours, theirs = Pipe()
    with ours, theirs:
        teller = ReturnQueue(theirs, 100, Meter())
        teller.took(90)
        teller.free(place(0, 20))
        assert ours.poll(60)
        assert ours.recv() == [("free", 0)]


def test_a_message_that_cannot_be_sent_closes_the_connection(capfd):
    ours, theirs = Pipe()
    with ours, theirs:
        returns = ReturnQueue(theirs, 100)
        returns.free(place(7, 2))
        assert ours.poll(60)
        assert ours.recv() == [("free", 7)]
        returns.event(Lost((Segment("k", 0, 0, 1, 1),), threading.Lock()))  # type: ignore[arg-type]
        returns.free(place(9, 2))
        assert ours.poll(60)
        with pytest.raises(EOFError):
            ours.recv()
        returns.close()  # returns although its thread has ended
    assert "cannot pickle" in capfd.readouterr().err
