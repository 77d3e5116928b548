from __future__ import annotations

import threading

from hsx_dist.format.runs import read_heartbeat, take_attempt
from hsx_dist.jobs.heartbeat import Heartbeat
from hsx_dist.store.local import LocalStore


def test_it_beats_tells_and_says_how_it_ended(tmp_path):
    store = LocalStore(tmp_path)
    take_attempt(store, {})
    rows = [0]
    heart = Heartbeat(store, 1, progress=lambda: {"rows": rows[0]}, every=3600)
    first = read_heartbeat(store, 1)
    assert (first["state"], first["progress"]) == ("running", {"rows": 0})
    rows[0] = 9
    heart.stop("stopped: signal")
    last = read_heartbeat(store, 1)
    assert (last["state"], last["progress"]) == ("stopped: signal", {"rows": 9})
    assert last["value"] > first["value"]


def test_it_tells_once_that_a_newer_attempt_was_taken(tmp_path):
    store = LocalStore(tmp_path)
    take_attempt(store, {})
    fenced = threading.Event()
    heart = Heartbeat(store, 1, on_fenced=fenced.set, every=0.01)
    assert not fenced.wait(0.1)
    take_attempt(store, {})
    assert fenced.wait(30)
    heart.stop("fenced")
    assert read_heartbeat(store, 1)["state"] == "fenced"
