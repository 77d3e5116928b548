"""Training while extracting: arrivals, the end, a run that died, what is used and removed."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsx_dist import HiddenStatesDataset, open_run
from hsx_dist.errors import ConfigError, RunError, RunStalled, SampleConsumed
from hsx_dist.format.place import open_place
from hsx_dist.format.runs import beat, take_attempt
from hsx_dist.reading.follow import Follower
from hsx_dist.reading.retain import Retention, rank_of
from hsx_dist.reading.verify import verify_run
from hsx_dist.store import open_store
from hsx_dist.testing.runs import RunWriter, store_run, whole, write_v1_run
from hsx_dist.testing.samples import random_sample
from hsx_dist.testing.stores import MemoryStore

SAMPLES = [random_sample(f"s{i:02d}", 4 + i, seed=i) for i in range(16)]
QUICK = {"poll_seconds": 0.01, "discover_seconds": 0.02}


def keys_of(follower: Follower) -> list[str]:
    found = []
    for arrival in follower:
        if arrival is not None:
            found.append(arrival.entry.key)
            follower.done(arrival)
    return found


def test_samples_come_as_they_are_proven_and_end_with_the_run(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    write_v1_run(store, {"meaning": {"layers": [2, 15, 30]}})
    first = RunWriter(store, name="v")
    first.put([whole(SAMPLES[0], 0)])
    dataset = HiddenStatesDataset(store.url, follow=True, follow_options=QUICK)
    seen: list[str] = []
    turn = threading.Event()

    def consume() -> None:
        for item in dataset:
            seen.append(item["key"])
            turn.set()

    thread = threading.Thread(target=consume, daemon=True)
    thread.start()
    for i in range(1, 16):
        assert turn.wait(60)
        turn.clear()
        if i == 5:  # another attempt, whose writers are new
            first = RunWriter(store, name="w")
        if i == 9:  # one in two segments, the second of which makes it whole
            a, b = SAMPLES[i].segments(6)
            first.put([(SAMPLES[i], b, i)])
            first.put([(SAMPLES[i], a, i)])
        else:
            first.put([whole(SAMPLES[i], i)])
    assert turn.wait(60)
    first.complete()
    thread.join(60)
    assert not thread.is_alive()
    assert seen == [s.key for s in SAMPLES]


def test_a_follower_asks_for_the_next_receipt_instead_of_listing() -> None:
    store = MemoryStore()
    write_v1_run(store, {})
    writer = RunWriter(store)
    writer.put([whole(SAMPLES[0])])
    source = iter(Follower(store, poll_seconds=0, discover_seconds=1e9, sleep=lambda _: None))
    assert next(source) is not None
    listed = []
    listing = store.list
    store.list = lambda *a, **k: listed.append(a) or listing(*a, **k)  # type: ignore[method-assign]
    for i in range(1, 6):
        assert next(source) is None
        writer.put([whole(SAMPLES[i])])
        arrival = next(source)
        assert arrival is not None
        assert arrival.entry.key == SAMPLES[i].key
    assert not [a for a in listed if a and str(a[0]).startswith("manifest")]


def test_a_run_without_a_live_attempt_is_told() -> None:
    store, now = MemoryStore(), [0.0]
    write_v1_run(store, {})
    writer = RunWriter(store)
    writer.put([whole(SAMPLES[0])])

    def follower() -> Any:
        return iter(Follower(store, stalled_seconds=60, sleep=lambda _: None, clock=lambda: now[0]))

    source = follower()
    assert next(source) is not None
    for value in range(5):  # alive as long as the heartbeat changes
        beat(store, writer.attempt, value, "running")
        now[0] += 50
        assert next(source) is None
    now[0] += 61
    with pytest.raises(RunStalled, match="no sign"):
        next(source)
    beat(store, writer.attempt, 99, "stopped: SIGTERM")
    source = follower()
    assert next(source) is not None
    assert next(source) is None
    now[0] += 31
    with pytest.raises(RunStalled, match="SIGTERM"):
        next(source)


def test_following_goes_on_behind_what_was_done() -> None:
    store = MemoryStore()
    write_v1_run(store, {})
    for name in "vw":
        writer = RunWriter(store, name=name)
        for i in range(0, 8, 2):
            offset = 0 if name == "v" else 8
            writer.put([whole(SAMPLES[offset + i]), whole(SAMPLES[offset + i + 1])])
    writer.complete()
    everything = keys_of(Follower(store))
    assert sorted(everything) == [s.key for s in SAMPLES]
    for taken in range(17):
        first = Follower(store)
        source = (a for a in first if a is not None)
        for _ in range(taken):
            first.done(next(source))
        position = json.loads(json.dumps(first.position))
        assert everything[:taken] + keys_of(Follower(store, state=position)) == everything


def test_ranks_divide_what_is_followed(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    store_run(store, SAMPLES)
    seen = [
        [i["key"] for i in HiddenStatesDataset(store.url, follow=True, rank=rank, world_size=3)] for rank in range(3)
    ]
    assert sorted(k for keys in seen for k in keys) == [s.key for s in SAMPLES]
    dataset = HiddenStatesDataset(store.url, follow=True)
    source = iter(dataset)
    before = [next(source)["key"] for _ in range(7)]
    other = HiddenStatesDataset(store.url, follow=True)
    other.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
    assert sorted(before + [i["key"] for i in other]) == [s.key for s in SAMPLES]
    with pytest.raises(ConfigError, match="same follow"):
        HiddenStatesDataset(store.url).load_state_dict(dataset.state_dict())


def test_a_part_is_removed_once_every_consumer_has_used_it(tmp_path: Path) -> None:
    place = open_store(str(tmp_path / "run"))
    store = store_run(place, SAMPLES, per_part=4).store
    parts = sorted(i.name for i in store.list("data/"))
    run = open_run(place.url)
    ranks = [Retention(store, "train", consumers=["train", "probe"], rank=r, world_size=2) for r in range(2)]
    probe = Retention(store, "probe", consumers=["train", "probe"])
    first = [s.key for s in SAMPLES[:4]]
    for key in first:
        ranks[rank_of(key, 2)].ack(key)
    for rank in ranks:  # a rank that had nothing of the part says so when it looks
        rank.ack(*[k for k in (s.key for s in SAMPLES[4:6]) if rank_of(k, 2) == rank._rank])
    assert sorted(i.name for i in store.list("data/")) == parts
    probe.ack(*first[:3])
    assert sorted(i.name for i in store.list("data/")) == parts
    restarted = Retention(store, "probe", consumers=["train", "probe"])
    restarted.load_state_dict(json.loads(json.dumps(probe.state_dict())))
    restarted.ack(first[3])
    left = sorted(i.name for i in store.list("data/"))
    assert left == parts[1:]
    with pytest.raises(SampleConsumed, match="removed"):
        run[first[0]].load()
    assert run[SAMPLES[8].key].load()["key"] == SAMPLES[8].key
    report = verify_run(place)
    assert report.ok
    assert report.consumed == 1
    wrong = next(s.key for s in SAMPLES if rank_of(s.key, 2) == 1)
    with pytest.raises(RunError, match="another rank"):
        ranks[0].ack(wrong)
    with pytest.raises(ConfigError, match="consumers"):
        Retention(store, "../x")


def test_a_part_that_holds_half_a_sample_stays_until_the_run_is_over() -> None:
    store = MemoryStore()
    write_v1_run(store, {})
    writer = RunWriter(store)
    long = random_sample("long", 40)
    a, b = long.segments(16)
    writer.put([whole(SAMPLES[0]), (long, a, None)])
    retention = Retention(store)
    retention.ack(SAMPLES[0].key)
    assert len(list(store.list("data/"))) == 1
    writer.put([(long, b, None)])
    retention.ack("long")
    assert not list(store.list("data/"))


def test_what_was_read_of_the_manifest_is_not_read_again_for_a_new_part(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    write_v1_run(store, {})
    writer = RunWriter(store)
    retention = Retention(store)
    read: list[str] = []
    get = store.get
    monkeypatch.setattr(store, "get", lambda name, most=None: read.append(name) or get(name, most))
    for sample in SAMPLES:
        writer.put([whole(sample)])
        retention.ack(sample.key)
    assert not list(store.list("data/"))
    assert len([name for name in read if name.startswith("manifest/")]) == len(SAMPLES)


def test_the_masks_of_attached_arrays_follow_too(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    store_run(store, SAMPLES[:3], attached=lambda s: {"loss_mask": np.arange(len(s.token_ids)) > 1})
    take_attempt(open_place(store).store, {})  # a newer attempt at work: the run is not complete any more
    dataset = HiddenStatesDataset(store.url, follow=True, follow_options={"stalled_seconds": 0, **QUICK})
    source = iter(dataset)
    assert [next(source)["loss_mask"].sum() for _ in range(3)] == [len(s.token_ids) - 2 for s in SAMPLES[:3]]
    with pytest.raises(RunStalled):
        next(source)
