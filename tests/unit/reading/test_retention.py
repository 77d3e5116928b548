"""Used samples whose part is lost before the trainer acknowledges them."""

from __future__ import annotations

from typing import Any

import pytest

from hsx_dist.errors import RunError
from hsx_dist.format.manifest import RowFate
from hsx_dist.format.place import Place, start_run
from hsx_dist.format.runs import load_manifest
from hsx_dist.jobs.ledger import RowLedger
from hsx_dist.reading.retention import Retention, rank_of
from hsx_dist.testing.samples import random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import RunWriter, whole

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
