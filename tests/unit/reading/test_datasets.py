"""Data sets over runs that the real encoder stored: their items, per rank, in which order, and after a restart."""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from hsx_dist import (
    HiddenStatesDataset,
    HiddenStatesMapDataset,
    MixedDataset,
    PackedContexts,
    TokenBatches,
    merge_states,
    open_run,
)
from hsx_dist.errors import ConfigError, FormatError, IntegrityError, NotFound
from hsx_dist.format.codecs import ZstdCodec
from hsx_dist.format.container import Part
from hsx_dist.format.place import start_run
from hsx_dist.reading import Run, map_dataset
from hsx_dist.reading.collate import pack, pad
from hsx_dist.reading.item_reader import ItemReader
from hsx_dist.reading.order import Dealt, EpochPosition, canonical_order
from hsx_dist.store import Store, open_store
from hsx_dist.store.local import LocalStore
from hsx_dist.testing.samples import RandomSample, random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import RunWriter, store_run, whole
from tests.soak.claim_kinds import sealed

N = 23


def mask_of(sample: RandomSample) -> dict[str, np.ndarray[Any, Any]]:
    return {"loss_mask": (np.arange(len(sample.token_ids)) % 3 > 0).astype(np.int8)}


SAMPLES = [random_sample(f"s{i:02d}", 5 + (7 * i) % 31, seed=i, odd=False) for i in range(N)]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("run") / "run")
    store_run(open_store(path), SAMPLES, per_part=4, attached=mask_of)
    return path


class Asked:
    """A store that records the requested ranges."""

    def __init__(self, inner: Store):
        self._inner = inner
        self.calls: list[Sequence[tuple[int, int]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        self.calls.append(ranges)
        return self._inner.get_ranges(name, ranges)


def bits(x: torch.Tensor) -> np.ndarray[Any, Any]:
    return x.view(torch.int16).numpy().view(np.uint16)


def test_items_have_the_trainers_names_and_the_samples_bits(url: str) -> None:
    items = list(HiddenStatesDataset(url, layers=[30, 2], tokens=(1, -1)))
    assert [i["key"] for i in items] == [s.key for s in SAMPLES]
    for item, sample in zip(items, SAMPLES, strict=True):
        assert set(item) == {"input_ids", "loss_mask", "hidden_states", "layer_ids", "key"}
        assert np.array_equal(bits(item["hidden_states"]), sample.states[1:-1][:, [2, 0]])
        assert item["hidden_states"].dtype == torch.bfloat16
        assert np.array_equal(item["input_ids"].numpy(), sample.token_ids[1:-1])
        assert item["loss_mask"].dtype == torch.bool
        assert np.array_equal(item["loss_mask"].numpy(), mask_of(sample)["loss_mask"][1:-1] != 0)
        assert item["layer_ids"].tolist() == [30, 2]


def test_names_can_be_others_and_arrays_numpys(url: str) -> None:
    rename = {"hidden_states": "target", "key": None, "loss_mask": "mask"}
    item = next(iter(HiddenStatesDataset(url, rename=rename, framework="numpy", max_tokens=4, crop="end")))
    assert set(item) == {"input_ids", "mask", "target", "layer_ids"}
    assert item["target"].dtype == np.float32
    assert np.array_equal(item["input_ids"], SAMPLES[0].token_ids[-4:])


def test_only_the_layers_and_tokens_wanted_are_fetched() -> None:
    store = MemoryStore()
    sample = random_sample("a", 512, layer_ids=range(31), hidden_size=64, chunk_tokens=64)
    store_run(store, [sample])
    from hsx_dist.reading import Run

    run = Run(store)
    run.open_part(run.index.parts[0].part or "")
    store.reset()
    list(HiddenStatesDataset(run, layers=[7], loss_mask="off"))
    one = store.bytes_read
    store.reset()
    list(HiddenStatesDataset(run, loss_mask="off"))
    assert one <= store.bytes_read * (1 / 31 + 0.05)
    store.reset()
    list(HiddenStatesDataset(run, layers=[7], tokens=(0, 64), loss_mask="off"))
    assert store.bytes_read - 8 * 512 <= one / 6


@pytest.mark.parametrize("listed", [4, 1000])
def test_a_run_that_lists_more_layers_than_are_stored_is_refused(listed: int) -> None:
    """Read-ahead limits its memory by the share of the layers that it reads. A wrong share would exceed the limit."""
    store = MemoryStore()
    store_run(store, SAMPLES[:1], info={"meaning": {"layers": list(range(listed))}})
    with pytest.raises(FormatError, match=rf"expected {listed} layers, as in run.json, got 3"):
        next(iter(HiddenStatesDataset(Run(store), layers=[2])))


def test_a_run_read_through_another_store_keeps_its_own(url: str) -> None:
    run = open_run(url)
    assert run.with_store(lambda store: store).store is run.store


def test_a_forked_process_reads_through_no_part_of_its_parent(url: str) -> None:
    run = open_run(url)
    name = run.index.parts[0].part or ""
    part = run.open_part(name)
    assert run.open_part(name) is part
    run._pid = -1  # as in a child process
    assert run.open_part(name) is not part


def test_a_part_is_opened_once_and_a_sample_is_one_request() -> None:
    store = MemoryStore()
    from hsx_dist.reading import Run

    asked = Asked(store_run(store, SAMPLES[:12], per_part=6, attached=mask_of).store)
    run = Run(store).with_store(lambda _: asked)
    masked = {i["key"]: i for i in HiddenStatesDataset(run)}
    assert len(asked.calls) == 2 + 12
    assert {k: i["loss_mask"].tolist() for k, i in masked.items()} == {
        s.key: (mask_of(s)["loss_mask"] != 0).tolist() for s in SAMPLES[:12]
    }
    asked.calls.clear()
    list(HiddenStatesDataset(run, layers=[15], loss_mask="off"))
    assert [len(ranges) for ranges in asked.calls] == [1] * 12


def test_threads_that_wait_for_one_part_get_its_error_and_later_ones_try_again() -> None:
    store = MemoryStore()
    own = store_run(store, SAMPLES[:6], per_part=6).store
    from hsx_dist.reading import Run

    waiting, go = threading.Barrier(4), threading.Event()

    class Refusing(Asked):
        def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
            views = super().get_ranges(name, ranges)
            if len(self.calls) > 2:  # opening reads damaged bytes a second time
                return views
            go.wait(30)
            raise FormatError("the first time")

    refusing = Refusing(own)
    run = Run(store).with_store(lambda _: refusing)
    name = run.index.parts[0].part or ""

    def look() -> str:
        waiting.wait(30)
        try:
            return run.open_part(name).name
        except FormatError as e:
            return str(e)

    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(look) for _ in range(4)]
        while not refusing.calls:
            time.sleep(0.001)
        go.set()
        said = [f.result() for f in found]
    assert all("the first time" in s or s == name for s in said)
    assert sum("the first time" in s for s in said) >= 1
    run.refresh()  # before it, a later thread gets the error too
    assert run.open_part(name).name == name
    assert len(refusing.calls) == 3


def test_memory_is_reused_and_kept_items_do_not_change(url: str) -> None:
    kept = {i["key"]: i["hidden_states"] for i in HiddenStatesDataset(url, prefetch_bytes=1 << 20, threads=3)}
    for sample in SAMPLES:
        assert np.array_equal(bits(kept[sample.key]), sample.states)
    large = [random_sample(f"l{i}", 600, hidden_size=64, seed=i, odd=False) for i in range(8)]
    store = MemoryStore()
    store_run(store, large)
    from hsx_dist.reading import Run

    places = set()
    for item, sample in zip(HiddenStatesDataset(Run(store), threads=1), large, strict=True):
        places.add(item["hidden_states"].data_ptr())
        assert np.array_equal(bits(item["hidden_states"]), sample.states)
        del item
    assert len(places) < len(large)


def test_random_windows_follow_from_seed_epoch_and_key(url: str) -> None:
    def windows(epoch: int) -> list[list[int]]:
        dataset = HiddenStatesDataset(url, max_tokens=3, crop="random", seed=5)
        dataset.set_epoch(epoch)
        return [i["input_ids"].tolist() for i in dataset]

    assert windows(0) == windows(0) != windows(1)


@pytest.mark.parametrize("workers", [0, 2])
def test_random_windows_by_position_follow_set_epoch(url: str, workers: int) -> None:
    options: dict[str, Any] = {"max_tokens": 3, "crop": "random", "seed": 5}
    by_position, in_order = HiddenStatesMapDataset(url, **options), HiddenStatesDataset(url, **options)
    loader = DataLoader(by_position, 4, collate_fn=list, num_workers=workers, persistent_workers=workers > 0)
    seen = []
    for epoch in (0, 1, 2):
        for dataset in (by_position, in_order):
            dataset.set_epoch(epoch)
        seen.append([item["input_ids"].tolist() for batch in loader for item in batch])
        assert seen[-1] == [item["input_ids"].tolist() for item in in_order]
        assert by_position[3]["input_ids"].tolist() == seen[-1][3]
    assert seen[0] != seen[1] != seen[2]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 20), st.data())
def test_every_order_is_dealt_without_overlap_or_loss_also_twice(n: int, shards: int, buffer: int, data: Any) -> None:
    order = canonical_order(np.arange(n) // 7, shuffle=True, buffer=buffer, seed=1, epoch=2)
    assert sorted(order) == list(range(n))
    taken = [data.draw(st.integers(0, len(order[s::shards]))) for s in range(shards)]
    first = [EpochPosition(2, shards, s).mine(order)[:t] for s, t in enumerate(taken)]
    again = data.draw(st.integers(1, 4))
    rest = [EpochPosition(2, again, s, history=(Dealt(shards, tuple(taken)),)).mine(order) for s in range(again)]
    assert sorted(np.concatenate([*first, *rest])) == list(range(n))


def test_a_shuffled_epoch_is_the_same_again_and_another_in_the_next(url: str) -> None:
    def keys(epoch: int, **options: Any) -> list[str]:
        dataset = HiddenStatesDataset(url, shuffle=True, shuffle_buffer=6, seed=3, **options)
        dataset.set_epoch(epoch)
        return [i["key"] for i in dataset]

    assert keys(0) == keys(0)
    assert sorted(keys(0)) == sorted(keys(1)) == [s.key for s in SAMPLES]
    assert keys(0) != keys(1)
    parts = [keys(0, rank=r, world_size=3) for r in range(3)]
    assert sorted(k for p in parts for k in p) == [s.key for s in SAMPLES]
    assert [len(HiddenStatesDataset(url, rank=r, world_size=3)) for r in range(3)] == [len(p) for p in parts]


def test_ranks_over_a_run_that_may_grow_are_warned(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    store = MemoryStore()
    start_run(store, {"meaning": {"layers": list(SAMPLES[0].layer_ids)}})
    writer = RunWriter(store)
    writer.put([whole(s, i) for i, s in enumerate(SAMPLES[:4])])
    run = Run(store)

    def warnings(make: Any, *args: Any, **options: Any) -> int:
        caplog.clear()
        list(make(*args, **options)) if make is HiddenStatesDataset else make(*args, **options)
        return len([r for r in caplog.records if "some by no rank" in r.getMessage()])

    ranks = {"rank": 0, "world_size": 2}
    named = run.select(keys=["s00", "s02", "s03"], where=lambda meta: "bad" not in meta)[1:]
    assert warnings(HiddenStatesDataset, run, **ranks) == 1
    assert warnings(HiddenStatesDataset, run.select(min_tokens=1), **ranks) == 1
    assert warnings(HiddenStatesDataset, named, **ranks) == 0
    assert warnings(HiddenStatesDataset, run, rank=0, world_size=1) == warnings(HiddenStatesMapDataset, run) == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert warnings(HiddenStatesMapDataset, run) == 1
    writer.complete()
    assert warnings(HiddenStatesDataset, run, **ranks) == 1, "the list of samples is older than the run's end"
    assert warnings(HiddenStatesDataset, Run(store), **ranks) == warnings(HiddenStatesMapDataset, Run(store)) == 0


def test_samples_that_are_read_together_are_in_few_parts() -> None:
    groups = np.arange(4000) // 40
    order = canonical_order(groups, shuffle=True, buffer=80, seed=0, epoch=0)
    assert max(len(set(groups[order[i : i + 80]])) for i in range(0, 4000, 80)) <= 3


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "context"), [(0, None), (2, None), (2, "spawn")])
def test_a_loader_with_workers_reads_each_sample_once(url: str, workers: int, context: str | None) -> None:
    dataset = HiddenStatesDataset(url, shuffle=True, layers=[15])
    loader = DataLoader(dataset, batch_size=4, collate_fn=pad, num_workers=workers, multiprocessing_context=context)
    seen = []
    for batch in loader:
        seen += batch["key"]
        for i, key in enumerate(batch["key"]):
            sample = next(s for s in SAMPLES if s.key == key)
            n = int(batch["lengths"][i])
            assert np.array_equal(bits(batch["hidden_states"][i, :n].contiguous()), sample.states[:, [1]])
            assert batch["attention_mask"][i].sum() == n
    assert sorted(seen) == [s.key for s in SAMPLES]


@pytest.mark.parametrize("after", [0, 1, 10, 22, 23])
def test_an_iteration_resumes_at_the_exact_sample(url: str, after: int) -> None:
    def fresh() -> HiddenStatesDataset:
        return HiddenStatesDataset(url, shuffle=True, seed=8)

    whole = [i["key"] for i in fresh()]
    dataset = fresh()
    source = iter(dataset)
    before = [next(source)["key"] for _ in range(after)]
    state = json.loads(json.dumps(dataset.state_dict()))
    other = fresh()
    other.load_state_dict(state)
    assert other.state_dict()["taken"] == after
    assert before + [i["key"] for i in other] == whole
    assert [i["key"] for i in other] == whole  # the next epoch is whole again


def test_a_state_resumes_at_another_world_size(url: str) -> None:
    def fresh(rank: int, world: int) -> HiddenStatesDataset:
        return HiddenStatesDataset(url, shuffle=True, rank=rank, world_size=world)

    seen, states = [], []
    for rank, take in enumerate((5, 2, 3)):
        dataset = fresh(rank, 3)
        source = iter(dataset)
        seen += [next(source)["key"] for _ in range(take)]
        states.append(dataset.state_dict())
    other = fresh(0, 2)
    other.load_state_dict(states[1])
    with pytest.raises(ConfigError, match="merge_states"):
        next(iter(other))
    merged = merge_states({"ranks": states})
    for rank in range(2):
        dataset = fresh(rank, 2)
        dataset.load_state_dict(merged)
        seen += [i["key"] for i in dataset]
    assert sorted(seen) == [s.key for s in SAMPLES]
    with pytest.raises(ConfigError, match="got none of shards"):
        merge_states(states[:2])
    with pytest.raises(ConfigError, match="same samples"):
        HiddenStatesDataset(url, shuffle=True, seed=1).load_state_dict(merged)


@pytest.mark.parametrize("kind", ["plain", "mixed", "tokens"])
def test_a_merged_state_can_be_merged_again_before_every_rank_resumed(url: str, kind: str) -> None:
    def fresh(rank: int, world: int) -> Any:
        dataset = HiddenStatesDataset(url, layers=[15], shuffle=True, rank=rank, world_size=world)
        return MixedDataset([dataset]) if kind == "mixed" else TokenBatches(dataset, 8) if kind == "tokens" else dataset

    first = HiddenStatesDataset(url, layers=[15], shuffle=True)
    source = iter(first)
    seen = [next(source)["key"] for _ in range(2)]
    merged: Any = merge_states([first.state_dict()])
    if kind == "mixed":
        merged = {"format": "hsx-mixed/1", "taken": [2], "datasets": [merged]}
    ranks = [fresh(rank, 2) for rank in range(2)]
    for dataset in ranks:
        dataset.load_state_dict(merged)
    if kind != "tokens":  # token batches have no keys
        source = iter(ranks[0])
        seen += [next(source)["key"] for _ in range(3)]
    merged = json.loads(json.dumps(merge_states([dataset.state_dict() for dataset in ranks])))
    for rank in range(3):
        dataset = (
            fresh(rank, 3)
            if kind == "mixed"
            else HiddenStatesDataset(url, layers=[15], shuffle=True, rank=rank, world_size=3)
        )
        dataset.load_state_dict(merged)
        seen += [item["key"] for item in dataset]
    assert sorted(seen) == [s.key for s in SAMPLES]


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_stateful_loader_resumes(url: str, workers: int) -> None:
    def loader() -> StatefulDataLoader:
        dataset = HiddenStatesDataset(url, shuffle=True, layers=[2])
        return StatefulDataLoader(dataset, batch_size=2, collate_fn=pad, num_workers=workers)

    whole = [batch["key"] for batch in loader()]
    first = loader()
    source: Iterator[Any] = iter(first)
    before = [next(source)["key"] for _ in range(5)]
    state = pickle.loads(pickle.dumps(first.state_dict()))
    second = loader()
    second.load_state_dict(state)
    assert before + [batch["key"] for batch in second] == whole


def test_a_corrupt_part_is_raised_or_counted_never_passed_over(tmp_path: Path) -> None:
    place = open_store(str(tmp_path / "run"))
    store = store_run(place, SAMPLES[:12], per_part=4).store
    names = sorted(i.name for i in store.list("data/"))
    damaged = bytearray(store.get(names[0]))
    damaged[-3] ^= 1
    store.put(names[0], [bytes(damaged)])
    store.delete(names[2])
    with pytest.raises(FormatError, match="part-0001"):
        list(HiddenStatesDataset(place.url))
    dataset = HiddenStatesDataset(place.url, on_error="skip")
    found = [i["key"] for i in dataset]
    assert dataset.skipped == 12 - len(found) == 5
    assert found == [s.key for s in SAMPLES[:3] + SAMPLES[4:8]]
    assert dataset.state_dict()["taken"] == 12
    with pytest.raises(NotFound):
        HiddenStatesMapDataset(place.url)[9]


def test_wrong_arguments_are_refused(url: str) -> None:
    for options in (
        {"layers": [3]},
        {"layers": 15},
        {"crop": "middle"},
        {"layers": ["last"]},
        {"on_error": "ignore"},
        {"rank": 2, "world_size": 2},
        {"rank": 1},
        {"threads": 0},
        {"follow": True, "shuffle": True},
        {"loss_mask": "zeros"},
        {"max_tokens": 0},
        {"rename": {"positions": "hidden_states"}},
        {"rename": {"positions": "x", "input_ids": "x"}},
        {"rename": {"input_ids": "loss_mask"}},
        {"rename": {"token_ids": "input_ids", "hidden_states": None}},
    ):
        with pytest.raises(ConfigError):
            HiddenStatesDataset(url, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Selection"):
        HiddenStatesDataset(open_run(url).select(min_tokens=5), follow=True)
    with pytest.raises(ConfigError, match="expected an attached array 'label'"):
        list(HiddenStatesDataset(url, rename={"label": "label"}))
    HiddenStatesDataset(url, rename={"label": "hidden_states", "hidden_states": None})
    HiddenStatesDataset(url, loss_mask="off", rename={"label": "loss_mask"})
    with pytest.raises(ConfigError, match="step"):
        list(HiddenStatesDataset(url, tokens=slice(0, 9, 2)))


@pytest.mark.parametrize(
    ("argument", "values", "message"),
    [
        ("layers", [["last"], "last", [None], [1.5], [[2]], {"hidden_states": ["last"]}], "only for extraction"),
        ("layers", [5, {"hidden_states": 5}], "Put it into a list"),
        ("points", [[1], [["q"]], 5, "q", []], r"expected a list of names such as \['q'\]"),
        (
            "tokens",
            [(0, "x"), (0, 1.5), "0:3", 5, (1, 2, 3, 4), (5,), range(3, 5), {3, 5}, slice("a", 3)],
            r"expected a slice or \(start, stop\)",
        ),
    ],
)
def test_values_of_another_type_are_refused_by_data_sets_and_samples(
    url: str, argument: str, values: list[Any], message: str
) -> None:
    run = open_run(url)
    for value in values:
        for read in (partial(HiddenStatesDataset, run), partial(HiddenStatesMapDataset, run), run.at(0).load):
            with pytest.raises(ConfigError, match=f"^{argument}: .*{message}"):
                read(**{argument: value})


def test_layers_may_be_an_array_or_a_tensor(url: str) -> None:
    sample = open_run(url).at(0)
    ids = sample.load()["layer_ids"]
    for layers in (ids, ids.numpy(), iter(ids.tolist())):
        assert sample.load(layers=layers)["layer_ids"].tolist() == ids.tolist()


@pytest.mark.parametrize(
    "options", [{"rename": ["a"]}, {"rename": {"a": 5}}, {"rename": {"input_ids": ["x"]}}, {"max_tokens": "5"}]
)
def test_names_and_counts_of_another_type_are_refused(url: str, options: dict[str, Any]) -> None:
    (name,) = options
    for make in (HiddenStatesDataset, HiddenStatesMapDataset):
        with pytest.raises(ConfigError, match=f"^{name}: expected"):
            make(url, **options)
    with pytest.raises(ConfigError, match=r"^threads: expected"):
        HiddenStatesMapDataset(url, threads=0)


def test_a_map_data_set_reads_by_position(url: str) -> None:
    dataset = HiddenStatesMapDataset(url, layers=[15], max_tokens=20)
    assert len(dataset) == N
    assert dataset.lengths.tolist() == [min(20, len(s.token_ids)) for s in SAMPLES]
    items = dataset.__getitems__([3, 1])
    assert [i["key"] for i in items] == ["s03", "s01"]
    batches = list(DataLoader(dataset, batch_size=5, collate_fn=pack, shuffle=True))
    assert sorted(k for b in batches for k in b["key"]) == [s.key for s in SAMPLES]


def test_padded_and_packed_batches_hold_the_same_tokens(url: str) -> None:
    items = list(HiddenStatesDataset(open_run(url).select(keys=["s01", "s04", "s02"])))
    padded, packed = pad(items, multiple=8, pad_id=-5), pack(items)
    lengths = [len(i["input_ids"]) for i in items]
    assert padded["input_ids"].shape[1] % 8 == 0
    assert torch.equal(padded["input_ids"][padded["attention_mask"]], packed["input_ids"][0])
    assert (padded["input_ids"][~padded["attention_mask"]] == -5).all()
    assert torch.equal(padded["hidden_states"][padded["attention_mask"]], packed["hidden_states"][0])
    assert packed["cu_seqlens"].tolist() == [0, *np.cumsum(lengths)]
    assert packed["document_ids"][0].bincount().tolist() == lengths
    assert packed["position_ids"][0].tolist() == [i for n in lengths for i in range(n)]
    cut = pack(items, length=sum(lengths) - 3)
    assert cut["lengths"].tolist() == [*lengths[:2], lengths[2] - 3]
    assert pack(items, length=sum(lengths) + 3)["document_ids"][0, -3:].tolist() == [-1, -1, -1]
    with pytest.raises(ConfigError, match="at least one"):
        pad([])


@pytest.mark.parametrize("collate", [pad, pack])
@pytest.mark.parametrize("other", [torch.zeros(1, 2, 24), torch.zeros(1, 1, 24, dtype=torch.float64)])
def test_rows_are_compared_before_a_batch_is_allocated(collate: Any, other: torch.Tensor) -> None:
    items = [
        {"input_ids": torch.zeros(len(rows), dtype=torch.int64), "hidden_states": rows}
        for rows in (torch.zeros(3, 1, 24), other)
    ]
    with pytest.raises(ConfigError, match=r"hidden_states: expected rows of torch\.float32 \(1, 24\) in all items"):
        collate(items, length=1 << 50)  # more than can be allocated


def test_runs_are_mixed_by_weight(url: str, tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    store_run(open_store(other), [random_sample(f"o{i}", 4, seed=i) for i in range(40)])

    def mixed(stop: Any = "first") -> MixedDataset:
        return MixedDataset([HiddenStatesDataset(url), HiddenStatesDataset(other)], [1, 3], stop=stop)

    keys = [i["key"] for i in mixed()]
    for end in range(4, len(keys), 4):
        assert abs(sum(k.startswith("s") for k in keys[:end]) - end / 4) < 1
    assert len({i["key"] for i in mixed("all")}) == N + 40
    first = mixed()
    source = iter(first)
    before = [next(source)["key"] for _ in range(9)]
    second = mixed()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + [i["key"] for i in second] == keys
    with pytest.raises(ConfigError, match="weights"):
        MixedDataset([HiddenStatesDataset(url)], [0])
    with pytest.raises(ConfigError, match="MixedDataset"):
        second.load_state_dict({"taken": [1, 2]})


def test_a_mixture_resumes_at_another_world_size(url: str, tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    store_run(open_store(other), [random_sample(f"o{i}", 4, seed=i) for i in range(40)])

    def mixed(rank: int, world: int) -> MixedDataset:
        return MixedDataset(
            [HiddenStatesDataset(u, rank=rank, world_size=world, shuffle=True) for u in (url, other)],
            [1, 3],
            stop="all",
        )

    seen, states = [], []
    for rank in range(3):
        dataset = mixed(rank, 3)
        source = iter(dataset)
        seen += [next(source)["key"] for _ in range(8)]
        states.append(dataset.state_dict())
    merged = json.loads(json.dumps(merge_states({"ranks": states})))
    for rank in range(2):
        dataset = mixed(rank, 2)
        dataset.load_state_dict(merged)
        keys = [i["key"] for i in dataset]
        assert sum(k.startswith("s") for k in keys[:8]) == 2
        seen += keys
    assert sorted(seen) == sorted([s.key for s in SAMPLES] + [f"o{i}" for i in range(40)])
    with pytest.raises(ConfigError, match="number"):
        merge_states([states[0], {**states[1], "datasets": states[1]["datasets"][:1]}])


@pytest.mark.slow
@pytest.mark.parametrize("only_loss", [False, True])
def test_token_batches_hold_every_token_once_and_resume(url: str, only_loss: bool) -> None:
    def batches() -> TokenBatches:
        dataset = HiddenStatesDataset(url, layers=[15], shuffle=True)
        return TokenBatches(dataset, 16, buffer_tokens=100, seed=4, only_loss=only_loss)

    whole = list(batches())
    assert all(b["hidden_states"].shape == (len(b["input_ids"]), 24) for b in whole)
    assert {len(b["input_ids"]) for b in whole[:-1]} == {16}
    expected = np.concatenate(
        [s.states[:, 1][mask_of(s)["loss_mask"] != 0] if only_loss else s.states[:, 1] for s in SAMPLES]
    )
    got = np.concatenate([bits(b["hidden_states"]) for b in whole])
    assert np.array_equal(np.sort(got.view("V48").ravel()), np.sort(np.ascontiguousarray(expected).view("V48").ravel()))
    for after in (0, 1, 7, 8, len(whole) - 1, len(whole)):
        first = batches()
        source = iter(first)
        for _ in range(after):
            next(source)
        second = batches()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        rest = list(second)
        assert [b["input_ids"].tolist() for b in rest] == [b["input_ids"].tolist() for b in whole[after:]]
    third = batches()
    third.load_state_dict(merge_states([first.state_dict()]))
    assert sum(len(b["input_ids"]) for b in third) <= sum(len(b["input_ids"]) for b in whole)
    loaded = list(DataLoader(batches(), batch_size=None, num_workers=1))
    assert [b["input_ids"].tolist() for b in loaded] == [b["input_ids"].tolist() for b in whole]


def test_repeat_continues_with_the_next_epoch(url: str) -> None:
    source = iter(HiddenStatesDataset(url, shuffle=True, repeat=True))
    epochs = [[next(source)["key"] for _ in range(N)] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("lost", [0, 1])
def test_token_batches_lose_no_other_tokens_where_a_sample_of_the_buffer_is_skipped_on_resume(
    tmp_path: Path, lost: int
) -> None:
    """At the resume the buffer holds the last two rows of one sample and the first six of the next."""
    samples = [replace(random_sample(f"s{i}", 10), token_ids=np.arange(10) + 100 * i) for i in range(8)]
    store = LocalStore(tmp_path)
    writer = store_run(store, samples, per_part=1)

    def tokens(data: TokenBatches) -> Iterator[list[int]]:
        return (batch["input_ids"].tolist() for batch in data)

    def batches() -> TokenBatches:
        return TokenBatches(HiddenStatesDataset(str(tmp_path), framework="numpy", on_error="skip"), 4, buffer_tokens=8)

    data = batches()
    reading = tokens(data)
    seen = [next(reading) for _ in range(3)]
    state = json.loads(json.dumps(data.state_dict()))
    run = open_run(str(tmp_path))
    part = run.index.parts[lost].part or ""
    content = writer.store.get(part)
    writer.store.delete(part)
    resumed = batches()
    resumed.load_state_dict(state)
    reading = tokens(resumed)
    seen.append(next(reading))
    again = json.loads(json.dumps(resumed.state_dict()))
    every = {100 * i + j for i in range(8) for j in range(10)}
    assert every - {t for batch in [*seen, *reading] for t in batch} <= {100 * lost + j for j in range(10)}
    writer.store.put(part, [content])
    back = batches()
    back.load_state_dict(again)
    assert every == {t for batch in [*seen, *tokens(back)] for t in batch}


def test_two_states_of_one_shard_are_not_merged(url: str) -> None:
    """Those of an older checkpoint. Two equal ones are."""
    states = []
    for rank, take in enumerate((5, 0)):
        dataset = HiddenStatesDataset(url, rank=rank, world_size=2)
        source = iter(dataset)
        states += [dataset.state_dict(), *([next(source)["key"] for _ in range(take)] and [dataset.state_dict()])]
    old, now, other = states
    assert merge_states([now, other, dict(now)])["history"] == [[2, [5, 0]]]
    for several in ([now, old, other], [old, other, now]):
        with pytest.raises(ConfigError, match="expected one state of each shard, got two of shard 0"):
            merge_states(several)


@pytest.mark.parametrize(
    "change",
    [
        {"taken": 2**61},
        {"taken": len(SAMPLES) // 2 + 1},
        {"shard": 2**61, "taken": 1},
        {"history": [[1, [2**61]]]},
        {"history": [[2, [1, len(SAMPLES)]]]},
        {"history": [[1, [len(SAMPLES)]]], "taken": 1},
        {"history": [[1, [1]]] * 1001},
    ],
)
def test_a_state_that_took_more_than_its_share_is_refused(url: str, change: dict[str, Any]) -> None:
    dataset = HiddenStatesDataset(url, rank=1, world_size=2)
    state = dataset.state_dict()
    with pytest.raises(ConfigError, match=r"state: expected at most .* Use another checkpoint"):
        dataset.load_state_dict({**state, **change})
    dataset.load_state_dict({**state, "taken": len(SAMPLES) // 2, "history": [[1, [0]]] * 2000})
    assert list(dataset) == []


def test_merging_makes_no_state_that_is_refused_later(url: str) -> None:
    """Each merge of an epoch's shards adds a division."""
    dataset = HiddenStatesDataset(url, rank=0, world_size=1)
    state = {**dataset.state_dict(), "taken": 1, "history": [[1, [1]]] * 1000}
    with pytest.raises(ConfigError, match=r"state: expected at most 1000 divisions of one epoch, got 1001"):
        merge_states([state])
    merge_states([{**state, "taken": 0}])
    merge_states([{**state, "history": state["history"][1:]}])


@pytest.mark.parametrize("seed", [-1, "x", 1.5])
def test_a_seed_that_shuffles_nothing_is_refused(url: str, seed: Any) -> None:
    with pytest.raises(ConfigError, match="seed: expected an integer of at least 0"):
        HiddenStatesDataset(url, shuffle=True, seed=seed)


@pytest.mark.parametrize(
    "change", [{"shards": 2**60}, {"shards": "x"}, {"taken": "x"}, {"history": 5}, {"epoch": None}]
)
def test_damaged_states_are_not_merged(url: str, change: dict[str, Any]) -> None:
    state = HiddenStatesDataset(url, rank=0, world_size=1).state_dict()
    with pytest.raises(ConfigError, match=r"^state"):
        merge_states([{**state, **change}])
    mixed = MixedDataset([HiddenStatesDataset(url, rank=0, world_size=1)]).state_dict()
    for damaged in ({"taken": "x"}, {"taken": []}, {"datasets": 3}, {"datasets": [{**state, **change}]}):
        with pytest.raises(ConfigError, match=r"^state"):
            merge_states([{**mixed, **damaged}])


@pytest.mark.parametrize(
    "wrap", [lambda v: [v], lambda v: {"a": v}, lambda v: {"format": "hsx-mixed/1", "taken": [1], "datasets": [v]}]
)
def test_states_nested_deeply_are_refused(url: str, wrap: Any) -> None:
    deep: Any = 0
    for _ in range(3000):
        deep = wrap(deep)
    dataset = HiddenStatesDataset(url, rank=0, world_size=1)
    state = dataset.state_dict()
    for states in (deep, [{**state, "samples": deep}], [{**state, "run": deep}, state]):
        with pytest.raises(ConfigError, match=r"^states?:"):
            merge_states(states)
    for damaged in (deep, {**state, "format": deep}, {**state, "samples": deep}, {**state, "history": deep}):
        for reader in (dataset, MixedDataset([dataset]), TokenBatches(dataset, 4)):
            with pytest.raises(ConfigError, match="state"):
                reader.load_state_dict(damaged)


def test_a_receipt_that_says_less_than_the_part_holds_is_found_before_its_states_are_decoded() -> None:
    """``prefetch_bytes`` counts the bytes that receipts name."""
    store = MemoryStore()
    store_run(store, [random_sample("a")])
    (name,) = [n for n in store.objects if "/manifest/" in n and n.endswith("000001.json")]
    body = json.loads(store.objects[name])["receipt"]
    body["segments"][0][7] -= 1
    store.put(name, [sealed(body)])
    for complete in [n for n in store.objects if n.endswith(".complete.json")]:
        store.delete(complete)
    with pytest.raises(IntegrityError, match="bytes of states"):
        Run(store)["a"].load()


def of_zeros(samples: int, nbytes: int) -> MemoryStore:
    """A run whose samples are one chunk of ``nbytes`` zeros each, in parts of a few KiB."""
    store = MemoryStore()
    zeros = np.zeros((nbytes >> 11, 1, 1 << 10), np.uint16)
    ids = np.arange(len(zeros))
    made = [RandomSample(f"k{i}", zeros, ids, (3,), "bfloat16", len(zeros)) for i in range(samples)]
    store_run(store, made, codec=ZstdCodec(), per_part=1)
    return store


@pytest.mark.parametrize("by_place", [False, True])
def test_reading_a_token_counts_the_memory_of_its_whole_chunk(by_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Receipts do not have the size of a chunk."""
    chunk, running, most = 16 << 20, 0, 0
    run, lock, read = Run(of_zeros(12, chunk)), threading.Lock(), Part.load

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        try:
            return read(*args, **kwargs)
        finally:
            with lock:
                running -= 1

    monkeypatch.setattr(Part, "load", counted)
    if by_place:
        monkeypatch.setattr(map_dataset, "_BATCH_BYTES", 5 * chunk)
        monkeypatch.setattr(ItemReader, "_held_ahead", lambda *_: 1 << 60)  # a receipt may claim any stored bytes
        items = HiddenStatesMapDataset(run, max_tokens=1).__getitems__(range(12))
    else:
        items = list(HiddenStatesDataset(run, max_tokens=1, prefetch_bytes=10 * chunk))
    assert [item["hidden_states"].shape for item in items] == [(1, 1, 1 << 10)] * 12
    assert most <= 2  # 5 chunks of memory are for chunks, and a codec may take as much as the chunk


@pytest.mark.parametrize("kind", ["plain", "mixed", "packed"])
def test_skipped_samples_of_all_ranks_are_counted_once_after_a_merge(tmp_path: Path, kind: str) -> None:
    store_run(open_store(str(tmp_path)), SAMPLES, per_part=4)
    sorted(tmp_path.rglob("*.safetensors"))[0].unlink()

    def of(rank: int, world: int) -> tuple[HiddenStatesDataset, Any]:
        one = HiddenStatesDataset(str(tmp_path), layers=[15], on_error="skip", rank=rank, world_size=world)
        return one, MixedDataset([one]) if kind == "mixed" else PackedContexts(one, 1, 4) if kind == "packed" else one

    ranks = [of(rank, 3) for rank in range(3)]
    for _, data in ranks:
        list(data)
    assert sorted(one.skipped for one, _ in ranks) == [1, 1, 2]
    state = merge_states([data.state_dict() for _, data in ranks])
    for world, begun in ((2, False), (4, True), (3, True)):
        ranks = [of(rank, world) for rank in range(world)]
        for _, data in ranks:
            data.load_state_dict(json.loads(json.dumps(state)))
            assert not begun or list(data) == []
        state = merge_states([data.state_dict() for _, data in ranks])
        assert not begun or sum(one.skipped for one, _ in ranks) == 4
    assert (state["datasets"][0] if kind == "mixed" else state)["skipped"] == 4


@pytest.mark.parametrize(
    "make",
    [
        lambda data: TokenBatches(data(), 16, buffer_tokens=64, seed=2**64 - 1),
        lambda data: TokenBatches(data(), np.int64(16), buffer_tokens=np.int64(64), seed=np.int64(3)),
        lambda data: TokenBatches(data(), 16, buffer_tokens=64, keep=np.float32(0.5)),
        lambda data: PackedContexts(data(), np.int64(2), np.int64(24)),
        lambda data: data(rank=np.int64(0), world_size=np.int64(2)),
    ],
)
def test_a_state_of_large_seeds_and_numbers_of_numpy_resumes(url: str, make: Any) -> None:
    first = make(lambda **ranks: HiddenStatesDataset(url, layers=[15], **ranks))
    items = iter(first)
    next(items)
    state = json.loads(json.dumps(first.state_dict()))
    again = make(lambda **ranks: HiddenStatesDataset(url, layers=[15], **ranks))
    again.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert next(iter(again))["input_ids"].tolist() == next(items)["input_ids"].tolist()
