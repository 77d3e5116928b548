"""A listing of a driver or a reader is empty although objects exist. No proven sample is lost, whichever it is."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from hsx_dist.errors import Fenced, RunStalled, StoreError
from hsx_dist.format.place import Place, open_place, start_run
from hsx_dist.format.receipt_log import ReceiptLog
from hsx_dist.format.runs import (
    load_manifest,
    newest_attempt,
    read_complete,
    seal_attempts,
    take_attempt,
    write_complete,
)
from hsx_dist.jobs.attempt import complete, take_over
from hsx_dist.observe.console import Console
from hsx_dist.reading import Run
from hsx_dist.reading.follow import Follower
from hsx_dist.reading.missing import missing_parts
from hsx_dist.reading.retention import Retention
from hsx_dist.store import ObjectInfo
from hsx_dist.store.local import LocalStore
from hsx_dist.testing.samples import random_sample
from tests.harness.runs import RunWriter, whole

GOLDEN = Path(__file__).parents[2] / "golden"


class SomeEmpty(LocalStore):
    """A folder. Its listings with the numbers ``bad``, from 0, are empty."""

    def __init__(self, root: Path, bad: Collection[int] = ()):
        super().__init__(root)
        self.bad = bad
        self.asked: list[str] = []

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        self.asked.append(prefix)
        return iter(()) if len(self.asked) - 1 in self.bad else super().list(prefix, after)


def resume(place: Place) -> None:
    attempt = take_attempt(place.store, {})
    ledger, manifest = take_over(place, attempt, Console(file=io.StringIO()))
    complete(place, ledger, attempt, manifest, len(manifest.samples))


def each_listing(
    make: Callable[[Path], Path], tmp_path: Path, use: Callable[[Place], Any]
) -> Iterator[tuple[Path, bool]]:
    """Call ``use`` with a copy of the run for each of its listings, which is empty. Yields the copy, and whether
    ``use`` raised a ``StoreError``."""
    whole_one = SomeEmpty(make(tmp_path / "whole"))
    use(open_place(whole_one))
    assert len(whole_one.asked) > 3
    for bad in range(len(whole_one.asked)):
        store = SomeEmpty(make(tmp_path / str(bad)), [bad])
        raised = False
        try:
            use(open_place(store))
        except StoreError:
            raised = True
        print(bad, store.asked[bad], "raised" if raised else "finished")
        yield Path(store.url), raised


def golden(to: Path) -> Path:
    shutil.copytree(GOLDEN / "v2-unfinished", to)
    return to


def test_a_resume_counts_every_sample_or_raises(tmp_path: Path) -> None:
    expected = len(Run(LocalStore(GOLDEN / "v2-unfinished")))
    found = list(each_listing(golden, tmp_path, resume))
    for folder, raised in found:
        run = Run(LocalStore(folder))
        assert (len(run), run.complete) == (expected, not raised)
    assert {raised for _, raised in found} == {True, False}


def with_open_logs(to: Path) -> Path:
    """Attempt 1 has a writer with a receipt and a writer with a part alone, as if both were between two calls."""
    place = start_run(LocalStore(to), {"meaning": {}})
    writer = RunWriter(LocalStore(to), name="w1")
    writer.put([whole(random_sample("a", 5, seed=1), 0)])
    place.store.put("data/part-0001-w2-000001.safetensors", [b"1"])
    return to


def test_no_earlier_writer_stores_a_receipt_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writers have checked that their attempt is not closed, and pause before the put of their receipt."""
    for folder, raised in each_listing(with_open_logs, tmp_path, resume):
        store = open_place(LocalStore(folder)).store
        receipt = replace(next(iter(load_manifest(store).receipts)), created="later")
        with monkeypatch.context() as m:
            m.setattr("hsx_dist.format.receipt_log.is_closed", lambda *_: False)
            for name in ("w1", "w2"):
                if not raised:
                    with pytest.raises(Fenced):
                        ReceiptLog(store, 1, name).append(receipt)
        assert raised or (len(Run(LocalStore(folder))) == 1 and store.head("attempts/0001.closed.json"))


def consumed(to: Path) -> Path:
    """A run in attempt 1, whose consumer has used the sample ``a`` and has removed its part."""
    store = LocalStore(to)
    place = start_run(store, {"meaning": {}})
    writer = RunWriter(store, name="w1")
    for key in "ab":
        writer.put([whole(random_sample(key, 5, seed=1), 0)])
    Retention(place).ack("a")
    return to


def test_a_used_part_is_not_lost(tmp_path: Path) -> None:
    for folder, raised in each_listing(consumed, tmp_path, resume):
        run = Run(LocalStore(folder))
        assert not run.manifest.void
        assert (sorted(run.keys()), run.complete) == (["a", "b"], not raised)


def test_a_lost_part_with_an_unlisted_mark_is_a_store_error(tmp_path: Path) -> None:
    store = open_place(SomeEmpty(consumed(tmp_path / "run"), [1])).store
    with pytest.raises(StoreError, match=r"consumed/.*: expected a listing with this object, which exists"):
        missing_parts(store, load_manifest(open_place(LocalStore(tmp_path / "run")).store), 2)


def test_a_consumer_does_not_forget_a_part(tmp_path: Path) -> None:
    place = open_place(SomeEmpty(consumed(tmp_path / "run"), range(99)))
    good = open_place(LocalStore(tmp_path / "run"))
    used = Retention(good)
    used._refresh()
    used._store = place.store
    with pytest.raises(StoreError, match=r"default\.0of1\.json: expected a listing with this object"):
        used.ack("b")
    used._store = good.store
    used.ack("b")
    assert list(good.store.list("data/")) == []


def test_a_run_with_an_attempt_has_a_newest_one(tmp_path: Path) -> None:
    """Before a removal the newest attempt shows whether a driver works on the run."""
    folder = consumed(tmp_path / "run")
    with pytest.raises(StoreError, match=r"attempts/0001.json: expected a listing with this object, which exists"):
        newest_attempt(open_place(SomeEmpty(folder, [0, 1])).store)
    assert newest_attempt(open_place(SomeEmpty(folder, [0])).store) == 1  # taken between two calls
    assert newest_attempt(LocalStore(tmp_path / "none")) == 0


def test_an_attempt_that_was_removed_by_hand_is_no_bad_listing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    take_attempt(store, {})
    store.delete("attempts/0001.json")
    with pytest.raises(StoreError, match=r"0001.json: expected this object, .* by hand. Start the same command again"):
        seal_attempts(store, 0, 1)


def test_a_follower_of_a_complete_run_yields_all_samples(tmp_path: Path) -> None:
    folder = consumed(tmp_path / "run")
    store = open_place(LocalStore(folder)).store
    write_complete(store, 1, load_manifest(store), {})
    assert read_complete(store) is not None
    for bad in combinations(range(6), 4):
        place = open_place(SomeEmpty(folder, bad))
        with suppress(StoreError, RunStalled):
            follower = Follower(place, poll_seconds=0, stalled_seconds=0)
            assert sorted(record.key for record in follower if record is not None) == ["a", "b"]
