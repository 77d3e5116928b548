from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest

from hsx_dist.errors import Fenced, StoreError
from hsx_dist.format.place import bury, start_run
from hsx_dist.format.runs import read_heartbeat, take_attempt
from hsx_dist.jobs import heartbeat
from hsx_dist.jobs.heartbeat import Heartbeat
from hsx_dist.store.local import LocalStore


def test_a_heartbeat_stores_progress_and_the_final_state(tmp_path):
    place = start_run(LocalStore(tmp_path), {})
    store = place.store
    take_attempt(store, {})
    rows = [0]
    with Heartbeat(place, 1, every=3600) as heart:
        first = read_heartbeat(store, 1)
        assert (first["state"], first["progress"]) == ("running", {})
        heart.connect(lambda: {"rows": rows[0]}, lambda _: None)
        rows[0] = 9
        heart.state = "stopped: signal"
    last = read_heartbeat(store, 1)
    assert (last["state"], last["progress"]) == ("stopped: signal", {"rows": 9})
    assert last["value"] > first["value"]


def test_a_heartbeat_reports_a_newer_attempt_once(tmp_path):
    place = start_run(LocalStore(tmp_path), {})
    store = place.store
    take_attempt(store, {})
    fenced, said = threading.Event(), []
    with suppress(Fenced), Heartbeat(place, 1, every=0.01) as heart:
        heart.connect(dict, lambda why: (said.append(why), fenced.set()))
        assert not fenced.wait(0.1)
        take_attempt(store, {})
        assert fenced.wait(30)
        raise Fenced("as a driver raises it")
    (why,) = said
    assert "newer attempt" in why
    assert read_heartbeat(store, 1)["state"] == "fenced"


def test_a_driver_that_connects_late_learns_of_a_newer_attempt(tmp_path):
    place = start_run(LocalStore(tmp_path), {})
    take_attempt(place.store, {})
    said = []
    with Heartbeat(place, 1, every=0.01) as heart:
        take_attempt(place.store, {})
        for _ in range(3000):
            if heart._over:
                break
            time.sleep(0.01)
        heart.connect(dict, said.append)
    assert ["newer attempt" in why for why in said] == [True]


@pytest.mark.parametrize(
    ("error", "state"), [(Fenced, "fenced"), (StoreError, "failed"), (KeyboardInterrupt, "failed")]
)
def test_an_error_after_the_last_row_is_not_a_success(tmp_path, error, state):
    place = start_run(LocalStore(tmp_path), {})
    take_attempt(place.store, {})
    with suppress(error), Heartbeat(place, 1, every=3600) as heart:
        heart.state = "finished"
        raise error("while the run is completed")
    assert read_heartbeat(place.store, 1)["state"] == ("fenced" if error is Fenced else "failed")


def test_a_store_that_does_not_answer_does_not_delay_a_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "LAST_S", 0.2)
    place = start_run(LocalStore(tmp_path), {})
    store = place.store
    take_attempt(store, {})
    answers, asked = threading.Event(), threading.Event()
    real = heartbeat.beat

    def beat(store, attempt, value, state, progress):
        if value > 1:
            asked.set()
            answers.wait(60)
        real(store, attempt, value, state, progress)

    monkeypatch.setattr(heartbeat, "beat", beat)
    with Heartbeat(place, 1, every=0.01) as heart:
        assert asked.wait(30)
        heart.state = "stopped: signal"
    assert read_heartbeat(store, 1)["state"] == "running"
    answers.set()
    heart._thread.join(60)
    assert read_heartbeat(store, 1)["state"] == "stopped: signal"


def test_the_removal_of_the_run_stops_its_driver_and_no_heartbeat_is_stored_after_it(tmp_path):
    place = start_run(LocalStore(tmp_path), {})
    take_attempt(place.store, {})
    over, said = threading.Event(), []
    with Heartbeat(place, 1, every=0.01) as heart:
        heart.connect(dict, lambda why: (said.append(why), over.set()))
        bury(place)
        assert over.wait(30)
        assert "removed" in said[0]
        before = read_heartbeat(place.store, 1)
        heart.state = "finished"
    assert read_heartbeat(place.store, 1) == before
