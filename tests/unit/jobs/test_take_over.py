"""The driver's steps before its first row: the attempt, the seals, and parts that the store has lost."""

from __future__ import annotations

import io
import shutil
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import hsx_dist
from hsx_dist import HiddenStatesDataset
from hsx_dist.config import load_config
from hsx_dist.errors import ConfigError, EngineError, Fenced, NotFound, RunError, SampleConsumed, StoreError
from hsx_dist.format.manifest import Manifest, RowFate
from hsx_dist.format.place import Place, bury, find_place, open_place, start_run
from hsx_dist.format.receipt_log import ReceiptLog
from hsx_dist.format.runs import is_complete, load_manifest, read_heartbeat, refuse_version_1, write_complete
from hsx_dist.inputs.rows import rows_from
from hsx_dist.jobs import attempt as attempt_module
from hsx_dist.jobs import extract as extract_module
from hsx_dist.jobs.attempt import begin_attempt, complete, open_or_start_run, require_not_removed, take_over
from hsx_dist.jobs.extract import account_for
from hsx_dist.jobs.ledger import RowLedger
from hsx_dist.observe.console import Console
from hsx_dist.reading import open_run, retention, verify_run
from hsx_dist.reading.garbage import remove_run
from hsx_dist.reading.missing import mark_of, missing_parts
from hsx_dist.reading.retention import Retention
from hsx_dist.reading.status import run_status
from hsx_dist.store.local import LocalStore
from hsx_dist.testing.samples import random_sample
from tests.harness.runs import RunWriter, whole, write_v1_run

SAMPLES = [random_sample(f"s{i}", 9 + i, seed=i) for i in range(4)]


@pytest.fixture(params=[1, 2], ids=["version 1", "version 2"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    root = LocalStore(tmp_path / "run")
    if request.param == 2:
        return start_run(root, {"meaning": {}})
    write_v1_run(root, {"meaning": {}})
    return open_place(root)


def taken(place: Place, **settings: Any) -> Any:
    config = load_config(None, (), model="m", output=place.root.url, store=settings)
    attempt = begin_attempt(config, place)
    return attempt, *take_over(place, attempt, Console(file=io.StringIO()))


def write(place: Place) -> list[str]:
    """Store four samples in two parts. Returns the parts' names."""
    writer = RunWriter(place.root)
    parts = [writer.put([whole(s, i) for s in SAMPLES[i : i + 2]]).part for i in (0, 2)]
    return [part for part in parts if part is not None]


def test_a_lost_part_is_noticed_by_everyone_and_computed_again(place: Place) -> None:
    first, _ = write(place)
    write_complete(place.store, 1, load_manifest(place.store), {"rows": 4})
    assert run_status(place.root).ok
    place.store.delete(first)
    status = run_status(place.root)
    assert (status.missing_parts, status.ok) == (1, False)
    assert [p.part for p in verify_run(place.root).problems] == [first]
    with pytest.raises(NotFound, match="Run the same extraction again"):
        open_run(place.root.url)["s0"].load()
    assert missing_parts(place.store, load_manifest(place.store), place.version) == [first]

    attempt, ledger, manifest = taken(place)
    assert (attempt, set(manifest.samples), manifest.void) == (2, {"s2", "s3"}, {first})
    # One of the rows ends without a sample this time. The old receipt is no proof any more.
    ledger.add(RowFate("s0", 0, "refused", "it is too long now", 1))
    ledger.flush()
    for found in (load_manifest(place.store), open_run(place.root.url).index):
        assert set(found.refused) == {"s0"}
    assert sorted(open_run(place.root.url).keys()) == ["s2", "s3"]
    write_complete(place.store, 2, manifest, {"rows": 4})
    assert sorted(open_run(place.root.url).keys()) == ["s2", "s3"]
    assert verify_run(place.root).ok
    assert run_status(place.root).missing_parts == 0
    third = RunWriter(place.root)
    third.put([whole(SAMPLES[0], 0)])
    assert sorted(open_run(place.root.url).keys()) == ["s0", "s2", "s3"]
    assert open_run(place.root.url)["s0"].load()["key"] == "s0"


@pytest.mark.parametrize("fate", ["poison", "refused", "failed"])
def test_an_outcome_from_before_a_lost_sample_does_not_count_again(place: Place, fate: str) -> None:
    """A reader waits for the sample, and a resume computes the row."""
    before = RowLedger(place.store, 1, Manifest())
    before.add(RowFate("s0", 0, fate, "its engine died", 3, "0" * 16))
    before.flush()
    first, _ = write(place)
    place.store.delete(first)
    _, ledger, manifest = taken(place)
    for found in (manifest, load_manifest(place.store)):
        assert not {**found.refused, **found.failed}
        assert set(found.samples) == {"s2", "s3"}
    ledger.add(RowFate("s0", 0, fate, "its engine died again", 3, "0" * 16))
    ledger.flush()
    found = load_manifest(place.store)
    assert {**found.refused, **found.failed}["s0"].reason == "its engine died again"


def test_a_row_that_killed_its_engine_after_a_segment_stays_poison_when_the_segment_is_lost(place: Place) -> None:
    sample = SAMPLES[0]
    part = RunWriter(place.root).put([(sample, sample.segments(3)[0], 0)]).part
    RowLedger(place.store, 1, Manifest()).add(RowFate("s0", 0, "poison", "its engine died", 3, "0" * 16))
    place.store.delete(part or "")
    _, _, manifest = taken(place)
    assert (set(manifest.failed), manifest.void) == ({"s0"}, {part})


def test_a_run_that_lacks_parts_is_not_complete(place: Place) -> None:
    """A node's mount of a shared folder may vanish while a writer works: its later parts are on another disk."""
    first, _ = write(place)
    attempt, ledger, manifest = taken(place)
    place.store.delete(first)
    with pytest.raises(StoreError, match=f"got 1 missing parts .{first}"):
        complete(place, ledger, attempt, manifest, 4)
    assert not is_complete(place.store)


def test_a_shuffled_epoch_goes_on_after_lost_samples_were_computed_again(place: Place) -> None:
    """Half of them have two segments, one is stored twice."""
    samples = [random_sample(f"s{i:02d}", 5, seed=i) for i in range(24)]
    root, last = place.root, len(samples)

    def stored(numbers: range) -> list[Any]:
        return [(samples[i], segment, i) for i in numbers for segment in samples[i].segments(*[3][: i % 2])]

    writer = RunWriter(root)
    parts = [writer.put(stored(range(i, i + 4))).part for i in range(0, last, 4)]
    writer.put(stored(range(3, 4)))
    writer.complete()

    def data(**options: Any) -> HiddenStatesDataset:
        return HiddenStatesDataset(root.url, framework="numpy", shuffle=True, shuffle_buffer=3, seed=1, **options)

    whole_epoch = [item["key"] for item in data()]
    dataset = data()
    iterating = iter(dataset)
    assert [next(iterating)["key"] for _ in range(7)] == whole_epoch[:7]
    state = dataset.state_dict()
    iterating.close()
    for part in parts[:3]:
        place.store.delete(part or "")
    attempt, _, manifest = taken(place)
    again = RunWriter(root, attempt=attempt)
    lost = [i for i, sample in enumerate(samples) if sample.key not in manifest.samples]
    assert len(lost) == 11
    again.put([piece for i in reversed(lost) for piece in stored(range(i, i + 1))])
    assert [item["key"] for item in data()] == whole_epoch
    for loaded in (state, {name: value for name, value in state.items() if name != "order"}):
        resumed = data()
        resumed.load_state_dict(loaded)
        assert [item["key"] for item in resumed] == whole_epoch[7:]
    with pytest.raises(ConfigError, match="Begin the epoch again"):
        data().load_state_dict({**state, "order": "0" * 16})


def test_a_follower_gets_the_sample_that_was_computed_again(place: Place) -> None:
    first, _ = write(place)
    place.store.delete(first)
    taken(place)
    again = RunWriter(place.root)
    again.put([whole(s, i) for i, s in enumerate(SAMPLES[:2])])
    write_complete(place.store, again.attempt, load_manifest(place.store), {"rows": 4})
    found = {i["key"] for i in HiddenStatesDataset(place.root.url, follow=True, framework="numpy")}
    assert found == {"s0", "s1", "s2", "s3"}


def test_a_part_that_its_consumers_used_is_not_lost(place: Place) -> None:
    write(place)
    before = open_run(place.root.url)
    before["s0"].load()
    Retention(place).ack("s0", "s1")
    for key in ("s0", "s1"):  # also in a part that is already open
        with pytest.raises(SampleConsumed):
            before[key].load()
    assert missing_parts(place.store, load_manifest(place.store), place.version) == []
    _, _, manifest = taken(place)
    assert len(manifest.samples) == 4
    with pytest.raises(SampleConsumed):
        open_run(place.root.url)["s0"].load()


def test_a_missing_part_that_one_of_two_consumers_used_is_lost(tmp_path: Path) -> None:
    place = start_run(LocalStore(tmp_path / "run"), {"meaning": {}})
    first, _ = write(place)
    Retention(place, "a", consumers=["a", "b"]).ack("s0", "s1")
    place.store.delete(first)
    with pytest.raises(NotFound):
        open_run(place.root.url)["s0"].load()
    assert missing_parts(place.store, load_manifest(place.store), place.version) == [first]


def marks_of_an_earlier_version(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on parts are marked, and counted as used up, as in versions before this one."""
    earlier = partial(mark_of, every_copy=False)
    monkeypatch.setattr(retention, "mark_of", lambda part, **_: earlier(part))
    monkeypatch.setattr(Retention, "_used_up", lambda _, part: part.endswith("-v-000001.safetensors"))


@pytest.mark.parametrize("by", ["this version", "an earlier version"])
def test_a_used_copy_proves_a_lost_sample_and_an_unused_one_does_not(
    tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """s0 has two copies, and the copy that counts is lost. s1 is in the same part as the other copy, and was used."""
    place = start_run(LocalStore(tmp_path / "run"), {"meaning": {}})
    v, u = two_writers(place)
    other = v.put([whole(SAMPLES[0], 0), whole(SAMPLES[1], 1)]).part
    counts = u.put([whole(SAMPLES[0], 0), whole(SAMPLES[2], 2)]).part
    if by == "an earlier version":
        marks_of_an_earlier_version(place, monkeypatch)
    consumer = Retention(place)
    consumer.ack("s1")
    place.store.delete(counts)
    if by == "this version":
        assert sorted(i.name for i in place.store.list("data/")) == [other]  # it holds a sample that was never used
        consumer.ack("s0")
    assert not list(place.store.list("data/"))
    _, _, manifest = taken(place)
    if by == "this version":
        assert (set(manifest.samples), manifest.void) == ({"s0", "s1"}, {counts})
    else:  # it is unknown whether s0 was used
        assert (set(manifest.samples), manifest.void) == (set(), {counts, other})
    assert missing_parts(place.store, load_manifest(place.store), place.version) == []


def test_an_old_copy_of_a_sample_that_can_be_read_needs_no_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another part is lost. Samples of a part that an earlier version removed are not computed again."""
    place = start_run(LocalStore(tmp_path / "run"), {"meaning": {}})
    v, u = two_writers(place)
    v.put([whole(SAMPLES[0], 0)])
    u.put([whole(SAMPLES[0], 0)])
    lost = u.put([whole(SAMPLES[1], 1)]).part
    marks_of_an_earlier_version(place, monkeypatch)
    Retention(place).ack("s0")
    place.store.delete(lost)
    assert missing_parts(place.store, load_manifest(place.store), place.version) == [lost]


def two_writers(place: Place) -> list[RunWriter]:
    """Two writers of one attempt. The second one's parts have lower names."""
    v = RunWriter(place.root, name="v")
    u = copy(v)
    u.name = "u"
    return [v, u]


@pytest.mark.parametrize("by", ["this version", "an earlier version"])
@pytest.mark.parametrize("resumed", [False, True])
def test_one_consumers_mark_does_not_hide_a_lost_part_of_a_run_of_version_1(
    tmp_path: Path, by: str, resumed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = LocalStore(tmp_path / "run")
    write_v1_run(root, {"meaning": {}})
    place = open_place(root)
    writer = RunWriter(root, name="v")
    if resumed:  # by this version, which stores ``removed.json`` for every kind of mark
        refuse_version_1(place.store, writer.attempt)
    part = writer.put([whole(SAMPLES[0], 0)]).part
    if by == "an earlier version":
        marks_of_an_earlier_version(place, monkeypatch)
    Retention(place, "train", consumers=["train", "eval"]).ack("s0")
    place.store.delete(part)
    hidden = by == "an earlier version" and not resumed  # version 1 stored no other mark of a removal
    assert missing_parts(place.store, load_manifest(place.store), 1) == ([] if hidden else [part])
    with pytest.raises(SampleConsumed if hidden else NotFound):
        open_run(root.url)["s0"].load()
    assert verify_run(root).ok == hidden


def test_earlier_writers_are_stopped_before_the_manifest_is_read(place: Place) -> None:
    write(place)
    earlier = ReceiptLog(place.store, 1, "w")
    earlier._next = 3
    taken(place)
    receipt = load_manifest(place.store).receipts[0]
    with pytest.raises(Fenced):
        earlier.append(receipt)


def test_a_removed_run_is_not_continued(place: Place) -> None:
    write(place)
    bury(place)
    with pytest.raises(RunError, match="mark of its removal"):
        taken(place)
    with pytest.raises(RunError, match="mark of its removal"):
        require_not_removed(place)
    assert find_place(place.root) is None


@pytest.mark.parametrize("before", ["is_complete", "complete", "missing_parts"])
def test_a_driver_without_rows_that_are_left_notices_a_removal(
    place: Place, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(place)
    if before == "missing_parts":  # no work at all
        write_complete(place.store, 1, load_manifest(place.store), {"rows": 4})
    real = getattr(extract_module, before)

    def paused(*args: Any) -> Any:
        found = real(*args)
        bury(place)
        return found

    monkeypatch.setattr(extract_module, before, paused)
    config = load_config(None, (), model="m", output=place.root.url)

    def rows() -> Any:
        return rows_from([{"id": s.key, "text": "x"} for s in SAMPLES], config.input)

    def compute(*_: Any) -> None:
        raise AssertionError("got a call without rows to compute")

    with pytest.raises(RunError, match="mark of its removal"):
        account_for(config, place, load_manifest(place.store), rows, Console(file=io.StringIO()), compute)


def test_a_complete_run_is_complete_by_its_newest_attempt_alone(place: Place) -> None:
    write(place)
    write_complete(place.store, 1, load_manifest(place.store), {"rows": 4})
    assert is_complete(place.store)
    taken(place)
    assert not is_complete(place.store)


def test_a_driver_of_version_1_refuses_a_run_that_a_later_one_took(tmp_path: Path) -> None:
    """Version 1 reads each receipt. A receipt with another beginning counts as damaged."""
    root = LocalStore(tmp_path / "run")
    write_v1_run(root, {"meaning": {}})
    taken(open_place(root))
    entries = [root.get(info.name) for info in root.list("manifest/0001/")]
    assert entries
    assert not any(entry.startswith(b'{"crc32c":"') for entry in entries)


def test_a_store_without_atomic_creation_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStore, "put_if_absent", lambda self, name, data: self.put(name, [data]))
    with pytest.raises(ConfigError, match=r"store\.single_driver"):
        taken(place)
    assert taken(place, single_driver=True)[0] == 1


def test_opening_an_existing_run_continues_it(place: Place) -> None:
    write(place)
    config = load_config(None, (), model="m", output=place.root.url)
    found, manifest = open_or_start_run(config, place.root, {})
    assert (found.info, len(manifest.samples)) == (place.info, 4)
    shutil.rmtree(place.root.url)
    found, manifest = open_or_start_run(config, LocalStore(place.root.url), {})
    assert (found.version, len(manifest.samples)) == (2, 0)


class StartsNothing:
    """A fleet that cannot start. It records the heartbeat's states while it closes."""

    def __init__(self, place: Place):
        self._place = place
        self.states: list[str] = []

    def start(self) -> None:
        raise EngineError("no engine")

    def close(self, *, quickly: bool = False) -> None:
        beat = read_heartbeat(self._place.store, 1)
        assert quickly
        assert beat is not None
        self.states.append(beat["state"])


def test_the_last_heartbeat_follows_the_end_of_the_fleet(
    tmp_path: Path, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the fleet has ended, the attempt's writers may store, and gc must count the driver as alive."""
    fleets: list[StartsNothing] = []

    def make_fleet(config: Any, place: Place, *_: Any) -> StartsNothing:
        fleets.append(StartsNothing(place))
        return fleets[0]

    monkeypatch.setattr(extract_module, "make_fleet", make_fleet)
    with pytest.raises(EngineError):
        hsx_dist.extract([[1, 2, 3]], model=str(tiny_model_path), layers=[1], output=tmp_path / "run")
    (fleet,) = fleets
    assert fleet.states == ["running"]
    beat = read_heartbeat(open_place(LocalStore(tmp_path / "run")).store, 1)
    assert beat is not None
    assert beat["state"] == "failed"


@pytest.mark.parametrize("opening", [True, False])
def test_an_error_during_a_removal_names_the_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opening: bool
) -> None:
    """``hsx rm`` begins while the driver reads the manifest."""
    place = start_run(LocalStore(tmp_path / "run"), {"meaning": {"model": "m"}})
    write(place)
    config = load_config(None, (), model="m", output=place.root.url)
    manifest = load_manifest(place.store)

    def removed_meanwhile(*_: Any) -> Any:
        remove_run(place.root, place)
        raise NotFound("manifest/0001/w/000001.json: no such object")

    def drive() -> None:
        if opening:
            open_or_start_run(config, place.root, {"model": "m"})
        else:
            rows = partial(rows_from, [{"id": "s0", "text": "a"}], config.input)
            account_for(config, place, manifest, rows, Console(file=io.StringIO()), lambda *_: None)

    monkeypatch.setattr(attempt_module, "load_manifest", removed_meanwhile)
    with pytest.raises(RunError, match="the mark of its removal"):
        drive()
