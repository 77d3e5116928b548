"""Used samples whose part is lost before the trainer acknowledges them."""

from __future__ import annotations

from typing import Any

import pytest

from hsx_dist.errors import RunError
from hsx_dist.format.manifest import RowFate
from hsx_dist.format.place import Place, start_run
from hsx_dist.format.runs import is_complete, load_manifest
from hsx_dist.format.segments import SegmentTable
from hsx_dist.jobs.ledger import RowLedger
from hsx_dist.reading import retention as retention_module
from hsx_dist.reading.retention import Retention, rank_of
from hsx_dist.testing.samples import random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import RunWriter, whole

LONG = random_sample("long", 32)
SAMPLES = [random_sample(f"s{i}", 4, seed=i) for i in range(3)]


def with_a_lost_part(known: list[Retention]) -> tuple[Place, RunWriter]:
    """Attempt 2 declares the part of ``s0`` and ``s1`` lost. ``known`` gets a retention that knew it before."""
    root = MemoryStore()
    place = start_run(root, {})
    first = RunWriter(root)
    lost = first.put([whole(s, i) for i, s in enumerate(SAMPLES[:2])]).part
    known.append(Retention(place))
    known[0].ack()
    place.store.delete(lost or "")
    second = RunWriter(root)
    RowLedger(place.store, second.attempt, load_manifest(place.store)).declare_lost([lost or ""])
    return place, second


def parts(place: Place) -> list[Any]:
    return [info.name for info in place.store.list("data/")]


@pytest.mark.parametrize("knew", [False, True])
def test_a_used_sample_whose_part_is_lost_is_acknowledged(knew: bool) -> None:
    known: list[Retention] = []
    place, second = with_a_lost_part(known)
    retention = known[0] if knew else Retention(place)
    retention.ack("s0")
    assert retention.state_dict()["used"] == ["s0"]
    mixed = second.put([whole(SAMPLES[0], 0), whole(SAMPLES[1], 1)]).part
    alone = second.put([whole(SAMPLES[0], 0)]).part
    assert parts(place) == [mixed, alone]
    retention.ack()
    assert parts(place) == [mixed], "s1 is not used"
    retention.ack("s1")
    assert parts(place) == []


def test_a_used_sample_is_acknowledged_if_its_row_fails_after_its_part_is_lost() -> None:
    place, second = with_a_lost_part([])
    second.put([whole(SAMPLES[2], 2)], [RowFate(f"s{i}", i, "failed", "its engine died", 3, "") for i in range(2)])
    second.complete()
    retention = Retention(place)
    retention.ack("s0", "s2")
    assert retention.state_dict()["used"] == ["s0"]
    assert parts(place) == []


def test_a_sample_that_was_never_whole_is_not_acknowledged() -> None:
    place, second = with_a_lost_part([])
    long = random_sample("long", 40)
    second.put([(long, long.segments(16)[0], None)])
    for key in ("long", "unknown"):
        with pytest.raises(RunError, match="not in the run"):
            Retention(place).ack(key)
    other = Retention(place, rank=1 - rank_of("s0", 2), world_size=2)
    with pytest.raises(RunError, match="another rank"):
        other.ack("s0")


def behind_an_incomplete_sample(n: int) -> tuple[RunWriter, list[str]]:
    """A part with a segment of a longer sample, and then ``n`` samples. Returns the keys of these."""
    root = MemoryStore()
    start_run(root, {})
    writer, samples = RunWriter(root), [random_sample(f"k{i}", 1, seed=i, hidden_size=1) for i in range(n)]
    writer.put([(LONG, LONG.segments(16)[0], None), *(whole(s, i) for i, s in enumerate(samples))])
    return writer, [s.key for s in samples]


def test_samples_behind_an_incomplete_one_are_acknowledged_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, keys = behind_an_incomplete_sample(64)
    writer.complete()
    looked, asked = list[int](), list[int]()
    key, complete = SegmentTable.key, is_complete
    retention = Retention(writer.place)
    retention.ack(keys[0])
    monkeypatch.setattr(SegmentTable, "key", lambda *args: looked.append(1) or key(*args))
    monkeypatch.setattr(retention_module, "is_complete", lambda *args: asked.append(1) or complete(*args))
    for name in keys[1:]:
        retention.ack(name)
    assert parts(writer.place) == []
    assert (len(asked), len(looked) < 16 * len(keys)) == (1, True)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_part_is_kept_while_a_sample_may_become_whole(resumed: bool) -> None:
    """Also if another attempt continues a complete run, after this rank has passed the segment."""
    writer, keys = behind_an_incomplete_sample(8)
    retention = Retention(writer.place)
    if resumed:
        writer.complete()
    retention.ack(*keys[:7])
    if resumed:
        writer = RunWriter(writer.place.root)
    retention.ack(*keys[7:])
    assert len(parts(writer.place)) == 1
    if not resumed:
        writer.put([(LONG, LONG.segments(16)[1], None)])
        retention.ack()
        assert len(parts(writer.place)) == 2
        retention.ack("long")
    else:
        writer.complete()
        retention.ack()
    assert parts(writer.place) == []


def test_the_store_is_asked_once_for_all_parts_of_a_running_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, keys = behind_an_incomplete_sample(1)
    for i in range(4):
        writer.put([(LONG, LONG.segments(16)[0], None), whole(SAMPLES[0], i)])
    retention, asked = Retention(writer.place), list[int]()
    monkeypatch.setattr(retention_module, "is_complete", lambda _: asked.append(1) and False)
    retention.ack(*keys, "s0")
    assert (len(asked), len(parts(writer.place))) == (1, 5)
