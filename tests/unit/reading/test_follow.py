"""Training during extraction: new samples, the end, a run that died, and used and removed parts."""

from __future__ import annotations

import json
import random
import resource
import threading
import time
from collections.abc import Callable, Iterable
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsx_dist import HiddenStatesDataset, MixedDataset, TokenBatches, merge_states, open_run
from hsx_dist.errors import (
    ConfigError,
    FormatError,
    NotFound,
    RunError,
    RunMismatch,
    RunStalled,
    SampleConsumed,
    Unavailable,
)
from hsx_dist.format.codecs import NoneCodec
from hsx_dist.format.manifest import Manifest, Receipt, SampleRecord, SegmentProof
from hsx_dist.format.names import receipt_name
from hsx_dist.format.place import Place, open_place, start_run
from hsx_dist.format.presence import exists
from hsx_dist.format.runs import beat, load_manifest, newest_attempt, take_attempt
from hsx_dist.jobs.ledger import RowLedger
from hsx_dist.page import Segment
from hsx_dist.reading.follow import Follower, has_position, position_check
from hsx_dist.reading.garbage import remove_run
from hsx_dist.reading.missing import missing_parts
from hsx_dist.reading.retention import Retention, rank_of
from hsx_dist.reading.run import Run
from hsx_dist.reading.verify import verify_run
from hsx_dist.store import open_store
from hsx_dist.testing.faulty_stores import WrappedStore
from hsx_dist.testing.samples import random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import RunWriter, store_run, whole, write_v1_run
from tests.unit.growth import check_linear

SAMPLES = [random_sample(f"s{i:02d}", 4 + i, seed=i) for i in range(16)]
QUICK = {"poll_seconds": 0.01, "discover_seconds": 0.02}


def keys_of(follower: Follower) -> list[str]:
    found = []
    for arrival in follower:
        if arrival is not None:
            found.append(arrival.key)
            follower.done(arrival)
    return found


def test_a_follower_yields_samples_as_their_receipts_arrive_and_ends_with_the_run(tmp_path: Path) -> None:
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
        if i == 5:  # another attempt, with new writers
            first = RunWriter(store, name="w")
        if i == 9:  # a sample in two segments; the second makes it whole
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
    source = iter(Follower(open_place(store), poll_seconds=0, discover_seconds=1e9, sleep=lambda _: None))
    assert next(source) is not None
    listed = []
    listing = store.list
    store.list = lambda *a, **k: listed.append(a) or listing(*a, **k)  # type: ignore[method-assign]
    for i in range(1, 6):
        assert next(source) is None
        writer.put([whole(SAMPLES[i])])
        arrival = next(source)
        assert arrival is not None
        assert arrival.key == SAMPLES[i].key
    assert not [a for a in listed if a and str(a[0]).startswith("manifest")]


@pytest.mark.parametrize(("receipts", "listings"), [(1, 1), (999, 1), (1000, 2), (4000, 2)])
def test_new_writers_are_found_by_one_listing_that_skips_long_logs(receipts: int, listings: int) -> None:
    store = MemoryStore()
    writers = [(1, "a"), (1, "b"), (2, "a"), (3, "c")]
    for attempt, writer in writers:
        for seq in range(1, 1 + (receipts if writer == "b" else 1)):
            store.put_if_absent(receipt_name(attempt, writer, seq), b"")
    follower = Follower(Place(store, "", 1, {}, store))
    listed, read, listing = [], [], store.list

    def counted(prefix: str, after: str | None) -> Any:
        listed.append(after)
        for info in listing(prefix, after):
            read.append(info.name)
            yield info

    store.list = counted  # type: ignore[assignment, method-assign]
    follower._find_writers()
    assert sorted(follower._next) == writers
    assert (len(listed), len(read)) == (listings, min(receipts, 1000) + 3)


def test_a_run_without_a_live_attempt_raises_run_stalled() -> None:
    store, now = MemoryStore(), [0.0]
    write_v1_run(store, {})
    writer = RunWriter(store)
    writer.put([whole(SAMPLES[0])])

    def follower() -> Any:
        return iter(Follower(open_place(store), stalled_seconds=60, sleep=lambda _: None, clock=lambda: now[0]))

    source = follower()
    assert next(source) is not None
    for value in range(5):  # alive as long as the heartbeat changes
        beat(store, writer.attempt, value, "running")
        now[0] += 50
        assert next(source) is None
    now[0] += 61
    with pytest.raises(RunStalled, match="no heartbeat for"):
        next(source)
    beat(store, writer.attempt, 99, "stopped: SIGTERM")
    source = follower()
    assert next(source) is not None
    assert next(source) is None
    now[0] += 31
    with pytest.raises(RunStalled, match="SIGTERM"):
        next(source)
    beat(store, writer.attempt, 100, "x" * 100_000)
    source = follower()
    assert next(source) is not None
    assert next(source) is None
    now[0] += 31
    with pytest.raises(RunStalled, match="ended as 'xxx") as e:
        next(source)
    assert len(str(e.value)) < 400


def test_a_follower_resumes_after_the_samples_that_are_done() -> None:
    store = MemoryStore()
    write_v1_run(store, {})
    for name in "vw":
        writer = RunWriter(store, name=name)
        for i in range(0, 8, 2):
            offset = 0 if name == "v" else 8
            writer.put([whole(SAMPLES[offset + i]), whole(SAMPLES[offset + i + 1])])
    writer.complete()
    everything = keys_of(Follower(open_place(store)))
    assert sorted(everything) == [s.key for s in SAMPLES]
    for taken in range(17):
        first = Follower(open_place(store))
        source = (a for a in first if a is not None)
        for _ in range(taken):
            first.done(next(source))
        position = json.loads(json.dumps(first.position))
        assert everything[:taken] + keys_of(Follower(open_place(store), state=position)) == everything


def test_ranks_share_the_samples_of_a_followed_run(tmp_path: Path) -> None:
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
    run_place = store_run(place, SAMPLES, per_part=4).place
    store = run_place.store
    parts = sorted(i.name for i in store.list("data/"))
    run = open_run(place.url)
    ranks = [Retention(run_place, "train", consumers=["train", "probe"], rank=r, world_size=2) for r in range(2)]
    probe = Retention(run_place, "probe", consumers=["train", "probe"])
    first = [s.key for s in SAMPLES[:4]]
    for key in first:
        ranks[rank_of(key, 2)].ack(key)
    for rank in ranks:  # a rank without samples of the part reports it at its next check
        rank.ack(*[k for k in (s.key for s in SAMPLES[4:6]) if rank_of(k, 2) == rank._rank])
    assert sorted(i.name for i in store.list("data/")) == parts
    probe.ack(*first[:3])
    assert sorted(i.name for i in store.list("data/")) == parts
    restarted = Retention(run_place, "probe", consumers=["train", "probe"])
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
        Retention(run_place, "../x")


def test_a_part_with_an_unused_copy_of_a_sample_is_kept() -> None:
    """The copy that a follower received is not the copy that counts later."""
    store = MemoryStore()
    write_v1_run(store, {})
    w2 = RunWriter(store, name="w2")
    w1 = copy(w2)
    w1.name = "w1"
    a, b, c = (s.key for s in SAMPLES[:3])
    w2.put([whole(SAMPLES[0]), whole(SAMPLES[1])])
    dataset = HiddenStatesDataset(
        Run(store), follow=True, follow_options=QUICK, framework="numpy", threads=1, prefetch_bytes=1
    )
    source = iter(dataset)
    assert next(source)["key"] == a
    w1.put([whole(SAMPLES[1])])
    w1.put([whole(SAMPLES[1]), whole(SAMPLES[2])])
    retention = Retention(open_place(store))
    retention.ack(a)
    w1.complete()
    assert len(list(store.list("data/"))) == 3
    assert [item["key"] for item in source] == [b, c]
    assert dataset.skipped == 0
    assert Run(store)[b].load(framework="numpy")["key"] == b
    # With the sample, parts with no other sample are removed. A restart keeps the list of used samples.
    retention.ack(b)
    assert [i.name for i in store.list("data/")] == ["data/part-0001-w1-000002.safetensors"]
    restarted = Retention(open_place(store))
    restarted.load_state_dict(json.loads(json.dumps(retention.state_dict())))
    assert restarted.state_dict() == retention.state_dict()
    restarted.ack(c)
    assert not list(store.list("data/"))


@pytest.mark.parametrize("consumed", [True, False])
@pytest.mark.parametrize("request_number", [1, 2, 3])
def test_a_part_is_removed_while_verify_reads_it(consumed: bool, request_number: int) -> None:
    class Removing(MemoryStore):
        """Removes the first part before one of the requests for that part."""

        left = 0

        def get_ranges(self, name: str, ranges: Any) -> list[memoryview]:
            if "/data/" in name and self.left:
                self.left -= 1
                if self.left == 0:
                    Retention(place).ack("a", "b") if consumed else self.delete(part)
            return super().get_ranges(name, ranges)

    store = Removing()
    # The part has more bytes than verify reads in one request.
    samples = [random_sample(key, 300, layer_ids=(1, 2), hidden_size=8192) for key in "abcd"]
    store_run(store, samples, per_part=2, codec=NoneCodec())
    place, part = open_place(store), min(name for name in store.objects if "/data/" in name)
    store.left = request_number
    report = verify_run(store, workers=1)
    assert part not in store.objects
    assert (report.parts, report.consumed) == (2, int(consumed))
    assert [p.part for p in report.problems] == ([] if consumed else [part.partition("/")[2]])


@pytest.mark.parametrize("taken", [1, 2, 5, 7])
def test_batches_of_tokens_of_a_run_that_is_followed_lose_none_when_resumed(taken: int) -> None:
    """A follower that resumes later finds the writers' receipts in another order."""
    store = MemoryStore()
    start_run(store, {"meaning": {"layers": [1]}})
    a = RunWriter(store, NoneCodec(), name="a")
    b = copy(a)
    b.name = "b"
    samples = [random_sample(f"{i}", 5 + i, layer_ids=(1,), hidden_size=4, seed=i, odd=False) for i in range(8)]
    todo = [((b, a)[i % 2], sample, i) for i, sample in enumerate(samples)]

    def put_one(_: float) -> None:
        if todo:
            writer, sample, row = todo.pop(0)
            writer.put([whole(sample, row)])
        else:
            a.complete()

    def tokens() -> TokenBatches:
        options = {"poll_seconds": 0, "discover_seconds": 0, "sleep": put_one}
        dataset = HiddenStatesDataset(Run(store), follow=True, follow_options=options, framework="numpy", threads=1)
        return TokenBatches(dataset, 4, buffer_tokens=16)

    seen: set[bytes] = set()
    first, second = tokens(), tokens()
    batches = iter(first)
    for _ in range(taken):
        seen |= {row.tobytes() for row in next(batches)["hidden_states"]}
    state = json.loads(json.dumps(first.state_dict()))
    while todo:  # meanwhile the run continues
        put_one(0)
    second.load_state_dict(state)
    for batch in second:
        seen |= {row.tobytes() for row in batch["hidden_states"]}
    dataset = HiddenStatesDataset(Run(store), framework="numpy")
    assert seen == {row.tobytes() for item in dataset for row in item["hidden_states"][:, 0]}


@pytest.mark.parametrize("resumed", [False, True])
def test_a_lost_sample_that_is_computed_again_while_the_run_is_followed(resumed: bool) -> None:
    store = MemoryStore()
    place = start_run(store, {"meaning": {"layers": [2, 15, 30]}})
    writer = RunWriter(store, name="a")
    lost = writer.put([whole(s, i) for i, s in enumerate(SAMPLES[:4])])
    writer.put([whole(SAMPLES[4], 4)])
    place.store.delete(lost.part)

    def compute_again() -> None:
        again = RunWriter(store, name="b")
        RowLedger(place.store, again.attempt, load_manifest(place.store)).declare_lost([lost.part])
        again.put([whole(s, i) for i, s in enumerate(SAMPLES[:3])])  # the last one fails this time
        again.complete()

    def follow(sleep: Any) -> HiddenStatesDataset:
        options = {"poll_seconds": 0, "discover_seconds": 0, "sleep": sleep}
        return HiddenStatesDataset(Run(store), follow=True, follow_options=options, on_error="skip", threads=1)

    todo = [] if resumed else [compute_again]
    dataset = follow(lambda _: todo and todo.pop()())
    source = iter(dataset)
    seen = [next(source)["key"]]
    assert (seen, dataset.skipped) == ([SAMPLES[4].key], 4)
    if resumed:
        state = json.loads(json.dumps(dataset.state_dict()))
        compute_again()
        dataset = follow(None)
        dataset.load_state_dict(state)
        source = iter(dataset)
    seen += [item["key"] for item in source]
    assert seen == [SAMPLES[i].key for i in (4, 0, 1, 2)]
    assert dataset.skipped == 4


def test_a_follower_waits_for_an_attempt_that_declares_a_part_lost_before_it_reads_the_last_receipts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The follower has found the completion and no newer attempt. Then the next driver begins."""
    store = MemoryStore()
    place = start_run(store, {"meaning": {"layers": [2, 15, 30]}})
    writer = RunWriter(store, name="a")
    writer.put([whole(SAMPLES[1], 1)])
    lost: list[str] = []

    def complete() -> None:
        lost.append(writer.put([whole(SAMPLES[0], 0)]).part)
        writer.complete()
        place.store.delete(lost[0])

    def newest(of: Any) -> int:
        found = newest_attempt(of)
        if lost:
            again = RunWriter(store, name="b")
            RowLedger(place.store, again.attempt, load_manifest(place.store)).declare_lost([lost.pop()])
            todo.extend([again.complete, lambda: again.put([whole(SAMPLES[0], 0)])])
        return found

    monkeypatch.setattr("hsx_dist.reading.follow.newest_attempt", newest)
    todo: list[Callable[[], object]] = [complete]
    options = {"poll_seconds": 0, "discover_seconds": 0, "sleep": lambda _: todo and todo.pop()()}
    dataset = HiddenStatesDataset(Run(store), follow=True, follow_options=options, threads=1)
    assert [item["key"] for item in dataset] == [SAMPLES[1].key, SAMPLES[0].key]


@pytest.mark.parametrize("restart_after", range(1, 5))
@pytest.mark.parametrize("early", [False, True])
def test_a_lost_sample_is_given_once_after_a_restart_at_any_point(restart_after: int, early: bool) -> None:
    """``early``: the next attempt computes it again before the reader is restarted, otherwise after."""
    store = MemoryStore()
    place = start_run(store, {"meaning": {"layers": [2, 15, 30]}})
    writer = RunWriter(store, name="a")
    lost = writer.put([whole(SAMPLES[0], 0)])
    for i in (1, 2):
        writer.put([whole(SAMPLES[i], i)])
    place.store.delete(lost.part)

    def compute_again() -> None:
        again = RunWriter(store, name="z")
        RowLedger(place.store, again.attempt, load_manifest(place.store)).declare_lost([lost.part])
        for i in (0, 3, 4):
            again.put([whole(SAMPLES[i], i)])
        todo.append(again.complete)

    def follow() -> HiddenStatesDataset:
        options = {"poll_seconds": 0, "discover_seconds": 0, "sleep": lambda _: todo and todo.pop()()}
        return HiddenStatesDataset(Run(store), follow=True, follow_options=options, on_error="skip", threads=1)

    todo: list[Any] = [compute_again] if early or restart_after > 2 else []
    dataset = follow()
    source = iter(dataset)
    seen = [next(source)["key"] for _ in range(restart_after)]
    state = json.loads(json.dumps(dataset.state_dict()))
    source.close()  # type: ignore[attr-defined]
    if not todo and not early and restart_after <= 2:
        compute_again()
    dataset = follow()
    dataset.load_state_dict(state)
    seen += [item["key"] for item in dataset]
    assert sorted(seen) == [s.key for s in SAMPLES[:5]]
    assert dataset.skipped == 1
    assert "lost" not in dataset.state_dict()["position"]


def test_a_state_does_not_say_that_a_lost_sample_was_used() -> None:
    store = MemoryStore()
    own = store_run(store, SAMPLES[:2]).store
    for info in list(own.list("data/")):
        own.delete(info.name)
    dataset = HiddenStatesDataset(Run(store), follow=True, on_error="skip", threads=1)
    for _ in range(2):
        assert list(dataset) == []
        assert dataset.skipped == 2
        state = dataset.state_dict()
        assert state["position"]["lost"] == [s.key for s in SAMPLES[:2]]
        dataset = HiddenStatesDataset(Run(store), follow=True, on_error="skip", threads=1)
        dataset.load_state_dict(state)


def test_a_part_that_holds_half_a_sample_stays_until_the_run_is_over() -> None:
    store = MemoryStore()
    write_v1_run(store, {})
    writer = RunWriter(store)
    long = random_sample("long", 40)
    a, b = long.segments(16)
    writer.put([whole(SAMPLES[0]), (long, a, None)])
    retention = Retention(open_place(store))
    retention.ack(SAMPLES[0].key)
    assert len(list(store.list("data/"))) == 1
    writer.put([(long, b, None)])
    retention.ack("long")
    assert not list(store.list("data/"))


@pytest.mark.parametrize("late", [False, True])
def test_parts_of_copies_alone_are_removed_too(late: bool) -> None:
    store = MemoryStore()
    start_run(store, {})
    one = RunWriter(store, name="one")
    two = RunWriter(store, name="two", attempt=one.attempt)
    rows = [whole(s, i) for i, s in enumerate(SAMPLES[:2])]
    one.put(rows)
    retention = Retention(open_place(store))
    retention.ack(SAMPLES[0].key)
    if not late:
        two.put(rows)  # rows whose writer was lost were computed again
    retention.ack(SAMPLES[1].key)
    if late:
        two.put(rows)
        retention.ack()
    assert [name for name in store.objects if "/data/" in name] == []


def test_retention_reads_each_receipt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    write_v1_run(store, {})
    writer = RunWriter(store)
    retention = Retention(open_place(store))
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
    take_attempt(open_place(store).store, {})  # a newer attempt has begun: the run is not complete any more
    dataset = HiddenStatesDataset(store.url, follow=True, follow_options={"stalled_seconds": 0, **QUICK})
    source = iter(dataset)
    assert [next(source)["loss_mask"].sum() for _ in range(3)] == [len(s.token_ids) - 2 for s in SAMPLES[:3]]
    with pytest.raises(RunStalled):
        next(source)


# -- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["removed", "cut", "no header"])
def test_a_part_that_cannot_be_opened_is_skipped_and_counted(tmp_path: Path, damage: str, caplog: Any) -> None:
    place = store_run(open_store(str(tmp_path / "run")), SAMPLES, per_part=4).place
    part = sorted(i.name for i in place.store.list("data/"))[1]
    if damage == "removed":
        place.store.delete(part)
    else:
        place.store.put(part, [place.store.get(part)[:100] if damage == "cut" else b"\xff" * 5000])
    dataset = HiddenStatesDataset(place.root.url, follow=True, on_error="skip")
    sound = [s.key for i, s in enumerate(SAMPLES) if i // 4 != 1]
    assert [item["key"] for item in dataset] == sound
    assert dataset.skipped == 4
    assert len([r for r in caplog.records if "skipped" in r.getMessage()]) == 4
    # The position is after them.
    state = json.loads(json.dumps(dataset.state_dict()))
    restarted = HiddenStatesDataset(place.root.url, follow=True)
    restarted.load_state_dict(state)
    assert list(restarted) == []
    assert restarted.skipped == 4
    strict = HiddenStatesDataset(place.root.url, follow=True)
    source = iter(strict)
    assert [next(source)["key"] for _ in range(4)] == sound[:4]
    with pytest.raises((FormatError, NotFound), match=Path(part).name):
        next(source)


def test_a_store_that_is_out_of_reach_skips_no_sample(tmp_path: Path) -> None:
    place = store_run(open_store(str(tmp_path / "run")), SAMPLES, per_part=4).place
    down = [False]

    class Down(WrappedStore):
        def get_ranges(self, name: str, ranges: Any) -> list[memoryview]:
            if down[0]:
                raise Unavailable(f"{name}: no answer")
            return super().get_ranges(name, ranges)

    run = open_run(place.root.url).with_store(Down)
    dataset = HiddenStatesDataset(run, follow=True, on_error="skip", threads=1, prefetch_bytes=1)
    source = iter(dataset)
    first = [next(source)["key"] for _ in range(5)]
    down[0] = True
    with pytest.raises(Unavailable):
        list(source)
    assert dataset.skipped == 0
    down[0] = False
    restarted = HiddenStatesDataset(run, follow=True)
    restarted.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
    assert first + [item["key"] for item in restarted] == [s.key for s in SAMPLES]


def test_no_more_samples_are_read_ahead_than_fit_where_the_run_names_no_layers() -> None:
    store = MemoryStore()
    write_v1_run(store, {})
    writer = RunWriter(store)
    for sample in SAMPLES:
        writer.put([whole(sample)])
    writer.complete()
    asked: list[str] = []
    get = store.get_ranges
    store.get_ranges = lambda name, ranges: asked.append(name) or get(name, ranges)  # type: ignore[method-assign]
    source = iter(HiddenStatesDataset(Run(store), follow=True, prefetch_bytes=100))
    item = next(source)
    assert item["hidden_states"].nbytes > 100
    assert len(set(asked)) == 1


# -- another run at the same place -----------------------------------------------------------------------------------


def another_run(place: Place, version: int) -> Place:
    """The run is removed, and another run with the same keys, names and sizes replaces it."""
    url = place.root.url
    if version == 2:
        remove_run(place.root, place)
    else:  # as version 1 did
        for info in list(place.root.list()):
            place.root.delete(info.name)
    return store_run(open_store(url), SAMPLES, version=version, info={"created": "later"}).place


@pytest.mark.parametrize("version", [1, 2])
def test_no_state_applies_to_another_run_at_the_same_place(tmp_path: Path, version: int) -> None:
    place = store_run(open_store(str(tmp_path / "run")), SAMPLES, version=version).place
    url = place.root.url

    def consumers(place: Place) -> list[Any]:
        followed, plain = HiddenStatesDataset(url, follow=True), HiddenStatesDataset(url)
        tokens = TokenBatches(HiddenStatesDataset(url, framework="torch"), 8)
        return [followed, plain, MixedDataset([HiddenStatesDataset(url)]), tokens, followed.retention("train")]

    before = consumers(place)
    for consumer in before[:4]:
        next(iter(consumer))
    before[4].ack(SAMPLES[0].key)
    states = [json.loads(json.dumps(consumer.state_dict())) for consumer in before]
    for consumer, state in zip(consumers(place), states, strict=True):
        consumer.load_state_dict(state)  # the same run
    other = another_run(place, version)
    assert other.id != place.id
    for consumer, state in zip(consumers(other), states, strict=True):
        with pytest.raises(RunMismatch, match=f"expected run {place.id}, .* got run {other.id}"):
            consumer.load_state_dict(state)
    merged = merge_states([states[1]])
    with pytest.raises(RunMismatch, match=place.id):
        HiddenStatesDataset(url).load_state_dict(merged)
    with pytest.raises(ConfigError, match="'run'"):
        merge_states([{**states[1], "shards": 2}, {**states[1], "shards": 2, "shard": 1, "run": other.id}])


def test_a_state_of_an_earlier_version_names_no_run_and_is_loaded_for_version_1(tmp_path: Path) -> None:
    place = store_run(open_store(str(tmp_path / "run")), SAMPLES, version=1).place
    url = place.root.url
    for follow in (False, True):
        dataset = HiddenStatesDataset(url, follow=follow)
        source = iter(dataset)
        first = [next(source)["key"] for _ in range(3)]
        state = {k: v for k, v in dataset.state_dict().items() if k not in ("run", "skipped" if follow else "run")}
        restarted = HiddenStatesDataset(url, follow=follow)
        restarted.load_state_dict(state)
        assert restarted.state_dict() == state  # saved again at once, it is unchanged
        assert first + [item["key"] for item in restarted] == [s.key for s in SAMPLES]
    retention = dataset.retention()
    retention.load_state_dict({"used": [SAMPLES[0].key]})
    retention.ack(*(s.key for s in SAMPLES[1:4]))
    assert len(list(dataset.run.store.list("data/"))) == 3
    for bad in ({"used": ["another"]}, {**state, "position": {"1/w": [9, ["s01"]]}}):
        with pytest.raises(RunMismatch, match="a run of version 1 that has the samples and receipts it names"):
            (retention if "used" in bad else HiddenStatesDataset(url, follow=True)).load_state_dict(bad)
    remove_run(place.root, place)
    newer = store_run(place.root, SAMPLES).place
    plain = HiddenStatesDataset(url)
    for consumer, old in (
        (HiddenStatesDataset(url, follow=True), state),
        (plain, {k: v for k, v in plain.state_dict().items() if k != "run"}),
        (plain.retention(), {"used": [SAMPLES[0].key]}),
    ):
        with pytest.raises(RunMismatch, match=f"a run of version 1 .* got run {newer.id}"):
            consumer.load_state_dict(old)


def test_sound_parts_without_a_run_count_for_version_1_alone(tmp_path: Path) -> None:
    for version in (1, 2):
        place, notes = store_run(MemoryStore(), SAMPLES, version=version).place, tmp_path / f"notes-{version}"
        parts = len(list(place.store.list("data/")))
        verify_run(place.root, resume=notes)
        lines = [json.loads(line) for line in notes.read_text().splitlines()]
        old = [{k: v for k, v in d.items() if k not in ("run", "place")} for d in lines]
        notes.write_text("".join(json.dumps(line) + "\n" for line in old))
        assert verify_run(place.root, resume=notes).known == (parts if version == 1 else 0)


def test_sound_parts_that_cannot_be_noted_name_their_file(tmp_path: Path) -> None:
    """The disk is full."""
    place, notes = store_run(MemoryStore(), SAMPLES).place, tmp_path / "notes"
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, usual[1]))
    try:
        with pytest.raises(ConfigError, match=f"{notes}: expected a file that can be written, got: File too large"):
            verify_run(place.root, resume=notes)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def parts_of_a_run(rnd: random.Random, wanted: Iterable[int] = range(6)) -> list[tuple[str, list[tuple[int, Segment]]]]:
    """(writer, the samples' segments of one part). Samples have one to three segments over three writers. A few are
    stored twice.
    """
    cut = []
    for i in wanted:
        segments = [(i, segment) for segment in SMALL[i].segments(*rnd.choice([(), (), (3,), (2, 4)]))]
        cut += segments * (2 if rnd.random() < 0.2 else 1)
    rnd.shuffle(cut)
    parts = []
    while cut:
        n = rnd.randint(1, 3)
        parts.append((rnd.choice("uvw"), list(dict.fromkeys(cut[:n]))))
        cut = cut[n:]
    return parts


SMALL = [random_sample(f"k{i}", 6, seed=i, layer_ids=(1,), hidden_size=4) for i in range(6)]


@pytest.mark.parametrize("seed", range(60))
def test_a_follower_gives_each_sample_once_when_resumed_at_any_point(seed: int) -> None:
    rnd = random.Random(seed)
    parts = parts_of_a_run(rnd)
    store = MemoryStore()
    place = start_run(store, {"meaning": {}})
    writers = {"u": RunWriter(store, NoneCodec(), name="u")}
    for name in "vw":  # of the same attempt
        writers[name] = copy(writers["u"])
        writers[name].name = name
    follower, source, ahead, given = None, iter(()), [], []
    state: Any = {}
    while True:
        step = rnd.random()
        if follower is None or step < 0.1:  # another process continues; prefetched samples are repeated
            state = json.loads(json.dumps(follower.position if follower is not None else state))
            follower = Follower(place, state=state, poll_seconds=0, discover_seconds=0, sleep=lambda _: None)
            source, ahead = iter(follower), []
        elif step < 0.35 and parts:
            name, segments = parts.pop()
            writers[name].put([(SMALL[i], segment, i) for i, segment in segments])
            if not parts:
                writers["u"].complete()
        elif ahead and step < 0.7:
            follower.done(ahead[0])
            given.append(ahead.pop(0).key)
        else:
            try:
                arrival = next(source)
            except StopIteration:
                if not ahead:
                    break
                continue
            if arrival is not None:
                ahead.append(arrival)
    assert sorted(given) == [s.key for s in SMALL]


class LosingRun:
    """A run that loses parts, and attempts that compute their samples again."""

    def __init__(self, rnd: random.Random):
        self._rnd, self._root = rnd, MemoryStore()
        self.place = start_run(self._root, {"meaning": {}})
        self.complete, self._left = False, rnd.randint(0, 4)
        self._begin()

    def _begin(self) -> None:
        self._writers = {"u": RunWriter(self._root, NoneCodec(), name="u")}
        for name in "vw":  # of the same attempt
            self._writers[name] = copy(self._writers["u"])
            self._writers[name].name = name
        manifest = load_manifest(self.place.store)
        lost = missing_parts(self.place.store, manifest, self.place.version)
        RowLedger(self.place.store, self._writers["u"].attempt, manifest).declare_lost(lost)
        wanted = [i for i, s in enumerate(SMALL) if s.key not in manifest.samples]
        self._todo = parts_of_a_run(self._rnd, wanted)

    def step(self) -> None:
        stored = sorted(info.name for info in self.place.store.list("data/"))
        if stored and self._left and not self.complete and self._rnd.random() < 0.4:
            self._left -= 1
            self.place.store.delete(self._rnd.choice(stored))
        elif self._todo and self._rnd.random() < 0.8:
            name, segments = self._todo.pop()
            self._writers[name].put([(SMALL[i], segment, i) for i, segment in segments])
        elif self._todo or missing_parts(self.place.store, load_manifest(self.place.store), self.place.version):
            self._begin()
        elif not self.complete:
            self._writers["u"].complete()
            self.complete = True

    def holds(self, record: SampleRecord) -> bool:
        return all(exists(self.place.store, proof.part) for proof in record.segments)


@pytest.mark.parametrize("seed", range(100))
def test_a_follower_gives_each_sample_once_although_parts_are_lost(seed: int) -> None:
    """A sample that was done is not given again, and no other sample is left out, when resumed at any point."""
    rnd = random.Random(seed)
    run = LosingRun(rnd)
    shards = rnd.choice([1, 2])  # the other shard's samples are never done
    follower, source, ahead, given = None, iter(()), [], []
    state: Any = {}
    again = False
    while True:
        step = rnd.random()
        if follower is None or step < 0.07:  # another process continues; prefetched samples are repeated
            state = json.loads(json.dumps(follower.position if follower is not None else state))
            assert position_check(state) is None
            follower = Follower(run.place, state=state, poll_seconds=0, discover_seconds=0, sleep=lambda _: None)
            source, ahead, again = iter(follower), [], False
        elif step < 0.4:
            run.step()
        elif ahead and step < 0.7:
            record = ahead.pop(0)
            if run.holds(record):
                (follower.given if again else follower.done)(record)
                given.append(record.key)
            elif not again:
                follower.lost(record)
        else:
            try:
                arrival = next(source)
            except StopIteration:
                if ahead:
                    continue
                if again:
                    break
                source, again = follower.computed_again(), True
                continue
            if arrival is not None and rank_of(arrival.key, shards) == 0:
                ahead.append(arrival)
    assert run.complete
    assert sorted(given) == [s.key for s in SMALL if rank_of(s.key, shards) == 0]


def lose_and_compute_again(place: Place, lost: Receipt, rows: list[tuple[int, int]]) -> RunWriter:
    """The next attempt stores these samples (number, row) in one part."""
    place.store.delete(lost.part or "")
    writer = RunWriter(place.root, name="again")
    RowLedger(place.store, writer.attempt, load_manifest(place.store)).declare_lost([lost.part or ""])
    writer.put([whole(SAMPLES[i], row) for i, row in rows])
    return writer


def test_a_checkpoint_of_before_the_acknowledgements_is_resumed_after_a_lost_part_was_used_again() -> None:
    place = start_run(MemoryStore(), {"meaning": {"layers": [2, 15, 30]}})
    lost = RunWriter(place.root, name="first").put([whole(SAMPLES[0], 0), whole(SAMPLES[1], 1)])

    def follow() -> HiddenStatesDataset:
        options = {"poll_seconds": 0, "discover_seconds": 0, "sleep": lambda _: None}
        return HiddenStatesDataset(Run(place.root), follow=True, follow_options=options, threads=1)

    dataset = follow()
    items, used = iter(dataset), dataset.retention("train")
    seen = [next(items)["key"] for _ in range(2)]
    writer = lose_and_compute_again(place, lost, [(0, 0), (1, 1), (2, 2)])
    seen.append(next(items)["key"])
    checkpoint = json.loads(json.dumps([dataset.state_dict(), used.state_dict()]))
    used.ack(*seen)
    assert not list(place.store.list("data/"))
    writer.put([whole(SAMPLES[3], 3)])
    writer.complete()
    for _ in range(2):
        dataset = follow()
        dataset.load_state_dict(checkpoint[0])
        dataset.retention("train").load_state_dict(checkpoint[1])
        assert [item["key"] for item in dataset] == [SAMPLES[3].key]
    assert seen == [s.key for s in SAMPLES[:3]]


@pytest.mark.parametrize("earlier", [False, True])
def test_a_used_sample_that_the_state_lacks_is_an_error(earlier: bool) -> None:
    """The acknowledgement came before the checkpoint. ``earlier``: the state of an earlier version, without void parts.
    It cannot say which samples of a finished, void part were done, so none is left out."""
    place = start_run(MemoryStore(), {"meaning": {}})
    lost = RunWriter(place.root, name="first").put([whole(SAMPLES[0], 0), whole(SAMPLES[1], 1)])
    writer = lose_and_compute_again(place, lost, [(2, 2), (0, 0), (1, 1)])
    writer.complete()
    dataset = HiddenStatesDataset(Run(place.root), follow=True, threads=1)
    items = iter(dataset)
    assert next(items)["key"] == SAMPLES[2].key
    state = json.loads(json.dumps(dataset.state_dict()))
    assert state["position"]["1/first"] == [2, []]  # the void part counts as finished
    assert state["position"].pop("void") == [lost.part]
    if not earlier:
        state["position"]["void"] = [lost.part]
    dataset.load_state_dict(state)
    assert [item["key"] for item in dataset] == [s.key for s in SAMPLES[:2]]
    dataset.load_state_dict(state)
    dataset.retention("train").ack(*(s.key for s in SAMPLES[:3]))
    with pytest.raises(SampleConsumed):
        next(iter(dataset))


def test_a_run_of_version_1_that_was_replaced_counts_as_removed(tmp_path: Path) -> None:
    place = store_run(open_store(str(tmp_path / "run")), SAMPLES, version=1).place
    run = open_run(place.root.url)
    assert not place.removed()
    another_run(place, 1)
    assert place.removed()
    with pytest.raises(RunError, match="is being removed"):
        run.refresh()


def test_a_cache_holds_nothing_of_a_run_that_was_replaced(tmp_path: Path) -> None:
    place = store_run(open_store(str(tmp_path / "run")), SAMPLES, version=1).place
    url, cache = place.root.url, tmp_path / "cache"
    assert len(list(HiddenStatesDataset(url, cache_dir=cache))) == len(SAMPLES)
    for info in list(place.root.list()):
        place.root.delete(info.name)
    others = [random_sample(s.key, len(s.token_ids), seed=100 + i) for i, s in enumerate(SAMPLES)]
    store_run(place.root, others, version=1, info={"created": "later"})
    items = list(HiddenStatesDataset(url, cache_dir=cache, framework="numpy"))
    plain = list(HiddenStatesDataset(url, framework="numpy"))
    assert [i["hidden_states"].tobytes() for i in items] == [i["hidden_states"].tobytes() for i in plain]


def test_sound_parts_that_were_noted_are_of_one_run(tmp_path: Path) -> None:
    place, notes = store_run(open_store(str(tmp_path / "run")), SAMPLES, version=1).place, tmp_path / "notes"
    parts = len(list(place.store.list("data/")))
    assert verify_run(place.root, resume=notes).known == 0
    assert verify_run(place.root, resume=notes).known == parts
    other = another_run(place, 1)
    assert verify_run(other.root, resume=notes).known == 0
    assert verify_run(other.root, resume=notes).known == parts
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    assert {(line.pop("place"), line.pop("run")) for line in lines} == {(place.root.url, p.id) for p in (place, other)}
    notes.write_text("".join(json.dumps(line) + "\n" for line in lines))  # in the form of an earlier version
    assert verify_run(other.root, resume=notes).known == parts


def test_following_takes_time_in_proportion_to_the_receipts() -> None:
    def follower_and_receipts(parts: int, samples: int) -> tuple[Follower, list[Receipt]]:
        proofs = [SegmentProof(Segment(f"s{i}", 0, 0, 1, 1), i, "0" * 16, 1, 1, None) for i in range(samples)]
        found = [Receipt(1, "w", i, f"p{i}", 1, "0" * 8, 0, 0, proofs, (), "") for i in range(1, parts + 1)]
        return Follower(start_run(MemoryStore(), {"meaning": {}})), found

    def one_sample_in_many_parts(n: int) -> Callable[[], object]:
        follower, receipts = follower_and_receipts(n, 1)
        return lambda: [follower._take(receipt) for receipt in receipts]

    def many_samples_in_one_part(n: int) -> Callable[[], object]:
        follower, [receipt] = follower_and_receipts(1, n)
        arrivals = follower._take(receipt)
        return lambda: [follower.done(arrival) for arrival in arrivals]

    check_linear(one_sample_in_many_parts, 256)
    check_linear(many_samples_in_one_part, 2048)


def test_acknowledging_one_sample_after_another_takes_time_in_proportion_to_their_number() -> None:
    def acknowledge(n: int) -> Callable[[], object]:
        samples = [random_sample(f"s{i:05d}", 1, hidden_size=1, layer_ids=(1,), chunk_tokens=1) for i in range(n)]
        place = store_run(MemoryStore(), samples, per_part=n).place
        retention = Retention(place)
        return lambda: [retention.ack(sample.key) for sample in samples]

    check_linear(acknowledge, 256)


@pytest.mark.parametrize("state", [None, {}, {"used": 3}, {"used": "s01"}, {"used": [3]}])
def test_a_damaged_state_of_retention_is_a_typed_error(state: Any) -> None:
    store = MemoryStore()
    run = Run(store_run(store, SAMPLES[:2]).place.root)
    state = {"run": run.id, **state} if state else state
    with pytest.raises(ConfigError, match=r"^state: "):
        Retention(run.place).load_state_dict(state)


@pytest.mark.parametrize("position", [{"0/w": [1, []]}, {"1/w": [0, []]}, {"1/a b": [2, ["s00"]]}, {"1/w/x": [2, []]}])
def test_a_position_that_names_no_receipt_is_not_of_the_run(position: dict[str, Any]) -> None:
    store = MemoryStore()
    store_run(store, SAMPLES[:2], version=1)
    assert not has_position(store, position)


def test_marks_take_the_same_time_for_any_number_of_writers() -> None:
    """Each item of a data set has a mark."""
    store = MemoryStore()
    follower = Follower(start_run(store, {}), state={f"1/w{i}": [2, []] for i in range(10_000)})
    begin = time.process_time()
    for _ in range(1_000):
        mark = follower.mark()
    assert time.process_time() - begin < 1
    assert mark() == follower.position


def test_a_mark_stays_as_it_was() -> None:
    store = MemoryStore()
    place = start_run(store, {})
    for name in ("a", "b"):
        writer = RunWriter(store, name=name, attempt=None if name == "a" else 1)
        for first in (0, 3, 6):
            at = first + 9 * (name == "b")
            tokens = [random_sample(f"{name}{i}", 1, layer_ids=(1,), hidden_size=4) for i in range(at, at + 3)]
            writer.put([whole(sample, at + i) for i, sample in enumerate(tokens)])
    writer.complete()
    follower = Follower(place, state={"1/a": [1, ["a1", "a0"]]})
    marks, positions = [], []
    for arrival in follower:
        assert arrival is not None
        follower.done(arrival)
        marks.append(follower.mark())
        positions.append(json.dumps(follower.position))
    assert [json.dumps(mark()) for mark in marks] == positions
    assert (json.loads(positions[0]), json.loads(positions[-1])) == (
        {"1/a": [1, ["a0", "a1", "a2"]], "void": []},
        {"1/a": [4, []], "1/b": [3, ["b15", "b16", "b17"]], "void": []},
    )


def test_a_follower_makes_a_record_when_it_yields_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compacted manifest of a megabyte names samples whose records take hundreds."""
    made, make = list[str](), Manifest._record

    def record(self: Manifest, key: str, places: tuple[int, ...]) -> Any:
        made.append(key)
        return make(self, key, places)

    root = MemoryStore()
    writer = store_run(root, SAMPLES, per_part=16)
    monkeypatch.setattr(Manifest, "_record", record)
    arrivals = iter(Follower(writer.place, **QUICK))
    for i in range(len(SAMPLES)):
        arrival = next(arrivals)
        assert arrival is not None
        assert made == [s.key for s in SAMPLES[: i + 1]]
