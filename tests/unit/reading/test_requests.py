"""The number of requests to open a run, to poll it, and to load a sample. Each is a round trip to a bucket."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hsx_dist import load_hidden_states
from hsx_dist.errors import RunError
from hsx_dist.format import receipt_log
from hsx_dist.format.json_objects import MAX_JSON_BYTES, read_json
from hsx_dist.format.manifest import RowFate
from hsx_dist.format.place import bury, find_place, leftovers, open_place, start_run
from hsx_dist.observe.top import look
from hsx_dist.reading import load
from hsx_dist.reading.follow import Follower
from hsx_dist.reading.index import Index
from hsx_dist.reading.run import Run
from hsx_dist.reading.status import run_status
from hsx_dist.store import Store
from hsx_dist.testing.faulty_stores import T, Verb, WrappedStore
from hsx_dist.testing.samples import random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import RunWriter, store_run, whole, write_v1_run

SAMPLES = [random_sample(f"s{i}", 4 + i, seed=i) for i in range(8)]


class Asked(WrappedStore):
    """Records each request as ``verb name``, without the run's folder."""

    def __init__(self, inner: Store):
        super().__init__(inner)
        self.requests: list[str] = []

    def _call(self, verb: Verb, name: str, call: Callable[[], T], nbytes: int) -> T:
        self.requests.append(f"{verb} {name.partition('/')[2] if name.startswith('run-') else name}")
        return super()._call(verb, name, call, nbytes)

    def take(self) -> list[str]:
        found, self.requests = self.requests, []
        return found


def complete_run(version: int = 2) -> Asked:
    store = MemoryStore()
    store_run(store, SAMPLES, per_part=4, version=version)
    return Asked(store)


def unfinished_run(version: int = 2) -> Asked:
    """A run with two receipts of one writer and no heartbeat."""
    store = MemoryStore()
    (start_run if version == 2 else write_v1_run)(store, {})
    writer = RunWriter(store)
    for row, sample in enumerate(SAMPLES[:2]):
        writer.put([whole(sample, row)])
    return Asked(store)


OPEN_COMPLETE = [
    "get run.json",
    "list attempts/",
    "get attempts/0001.complete.json",
    "get attempts/0002.json",
    "get manifest/compacted-0001.jsonl.zst",
    "get run.json",
]
RECEIPTS = ["list manifest/", "get manifest/0001/w/000001.json", "get manifest/0001/w/000002.json"]
OPEN_UNFINISHED = ["get run.json", "list attempts/", *RECEIPTS, "get run.json"]


@pytest.mark.parametrize("version", [1, 2])
def test_opening_a_complete_run(version: int) -> None:
    store = complete_run(version)
    assert Run(store).complete
    assert store.take() == OPEN_COMPLETE


def test_opening_a_run_where_others_were_removed() -> None:
    """Each removal leaves a tombstone, but no request of every later command."""
    store = Asked(MemoryStore())
    for removed in range(12):
        place = start_run(store, {})
        before = store.take()
        assert open_place(store).id == place.id
        requests = store.take()
        assert requests == [
            *(f"get {name}" for name in ("run.json", "run.0002.json")[: removed + 1]),
            *(("list run.", f"get run.{removed + 1:04d}.json") if removed > 1 else ()),
        ]
        assert len(before) <= 14
        bury(place)
        assert find_place(store) is None
        with pytest.raises(RunError, match="tombstone of a run removed at 20"):
            open_place(store)
        store.take()


def test_leftovers_of_any_removed_run_are_found() -> None:
    store = MemoryStore()
    removed = [start_run(store, {})]
    for _ in range(5):
        bury(removed[-1])
        removed.append(start_run(store, {}))
    for place in removed[1], removed[4]:
        place.store.put("data/part-0001-w-1-000001.safetensors", [b"late"])
    store.put("run-0123456789abcdef/data/part-0001-w-1-000001.safetensors", [b"of no tombstone"])
    folders = {f"{place.folder}/" for place in (removed[1], removed[4])}
    assert set(leftovers(store, removed_only=True)) == folders
    assert set(leftovers(store)) == {*folders, "run-0123456789abcdef/"}


def test_opening_an_unfinished_run() -> None:
    store = unfinished_run()
    assert not Run(store).complete
    assert sorted(store.take()) == sorted(OPEN_UNFINISHED)
    store = unfinished_run(version=1)
    Run(store)
    assert sorted(store.take()) == sorted([*OPEN_UNFINISHED, "get complete.json"])


@pytest.mark.parametrize(("make", "opening"), [(complete_run, OPEN_COMPLETE), (unfinished_run, OPEN_UNFINISHED)])
def test_loading_one_sample(make: Callable[[], Asked], opening: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    store = make()
    monkeypatch.setattr(load, "open_store", lambda *_: store)
    load_hidden_states("s3://bucket/run", SAMPLES[0].key, framework="numpy")
    part = "get_ranges data/part-0001-w-000001.safetensors"
    assert sorted(store.take()) == sorted([*opening, part, part])


def test_each_refresh_of_a_growing_run_requests_only_new_receipts(monkeypatch: pytest.MonkeyPatch) -> None:
    """``load_hidden_states(wait=…)`` and ``Run.refresh``. One of three writers has more than a page of names."""
    monkeypatch.setattr(receipt_log, "_PAGE", 5)
    monkeypatch.setattr(Index, "__init__", lambda *_, **__: pytest.fail("a look makes no columns of all samples"))
    inner = MemoryStore()
    start_run(inner, {"meaning": {}})
    writers = [RunWriter(inner)]
    writers += [RunWriter(inner, name=name, attempt=1) for name in ("x", "y")]
    for _ in range(20):
        writers[0].put([], [RowFate("none", None, "failed", "died", 1)])
    store, looks = Asked(inner), iter(range(4))
    monkeypatch.setattr(load, "open_store", lambda *_: store)
    asked: list[list[str]] = []

    def stored_meanwhile(_: float) -> None:
        asked.append(store.take())
        writers[next(looks) % 3].put([whole(SAMPLES[len(asked)], len(asked))])

    monkeypatch.setattr("time.sleep", stored_meanwhile)
    found = load_hidden_states("s3://bucket/run", SAMPLES[4].key, framework="numpy", wait=60)
    assert found["key"] == SAMPLES[4].key
    receipts = [[r for r in look if r.startswith("get manifest/")] for look in [*asked, store.take()]]
    assert [len(r) for r in receipts] == [20, 1, 1, 1, 1]
    assert all(len(look) <= 6 for look in asked[1:]), asked[1:]
    run = Run(store)
    store.take()
    for _ in range(2):
        run.refresh()
        assert sorted(store.take()) == ["get run.json", "list attempts/", "list manifest/", "list manifest/"]
    writers[0].complete()
    run.refresh()
    assert run.complete
    assert len(run) == 4
    store.take()
    run.refresh()
    assert store.take() == [*OPEN_COMPLETE[1:4], "get run.json"]


def test_the_status_of_a_run() -> None:
    store = complete_run()
    assert run_status(store, observe_seconds=0).state == "complete"
    about = ["get run.json", "get run.json", "list attempts/", "get attempts/0001.heartbeat.json", "list data/"]
    completed = ["get attempts/0001.complete.json", "get manifest/compacted-0001.jsonl.zst"]
    assert sorted(store.take()) == sorted([*about, *completed])
    store = unfinished_run()
    assert run_status(store, observe_seconds=0).state == "silent"
    assert sorted(store.take()) == sorted([*about, *RECEIPTS])


def test_one_refresh_of_top_takes_four_requests() -> None:
    store = unfinished_run()
    look(store)
    assert store.take() == ["get run.json", "list attempts/", "get attempts/0001.heartbeat.json", "get run.json"]


def test_a_poll_of_a_follower_with_nothing_new() -> None:
    store = unfinished_run()
    follower = iter(Follower(Run(store).place, sleep=lambda _: None))
    store.take()
    assert [next(follower) is None for _ in range(3)] == [False, False, True]
    store.take()  # all stored samples, and the first poll, which looks for the newest attempt
    for _ in range(3):
        assert next(follower) is None
        assert store.take() == [
            "get attempts/0001.complete.json",
            "get manifest/0001/w/000003.json",
            "get attempts/0002.json",
            "get attempts/0001.heartbeat.json",
        ]


def test_json_is_one_request_of_no_more_bytes_than_it_may_have() -> None:
    store = MemoryStore()
    store.put("x", [b'{"a": 1}'])
    assert read_json(store, "x") == {"a": 1}
    assert store.requests == 1
    store.put("x", [b" " * (MAX_JSON_BYTES * 2)])
    store.reset()
    with pytest.raises(Exception, match="at most"):
        read_json(store, "x")
    assert (store.requests, store.bytes_read) == (1, MAX_JSON_BYTES + 1)
