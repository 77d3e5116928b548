"""Mixtures give the same samples with any number of ranks and workers, also after a restart and a merge."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hsx_dist import ConfigError, HiddenStatesDataset, MixedDataset, merge_states, open_run
from hsx_dist.reading import datasets
from hsx_dist.store import open_store
from hsx_dist.testing.samples import random_sample
from tests.harness.runs import store_run

LENGTHS = {"a": 41, "b": 3, "c": 7}
KEYS = {name: [f"{name}{i}" for i in range(n)] for name, n in LENGTHS.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    for name, keys in KEYS.items():
        samples = [random_sample(key, 2, seed=i, hidden_size=4, layer_ids=(2,)) for i, key in enumerate(keys)]
        store_run(open_store(str(path / name)), samples, per_part=4)
    return path


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this process a worker of a ``DataLoader``."""
    info = SimpleNamespace(num_workers=1, id=0)
    monkeypatch.setattr(datasets, "get_worker_info", lambda: info)
    return info


def mixture(folder: Path, names: str, *weights: float, rank: int = 0, world: int = 1, **options: Any) -> MixedDataset:
    stop = options.pop("stop", "first")
    sets = [
        HiddenStatesDataset(
            str(folder / name), shuffle=True, threads=1, rank=rank, world_size=world, framework="numpy", **options
        )
        for name in names
    ]
    return MixedDataset(sets, weights or None, stop=stop)


def keys_of(items: Any) -> list[str]:
    return [item["key"] for item in items]


def shards(worker: Any, world: int, workers: int) -> Iterator[int]:
    """The rank of each shard. ``worker`` becomes its worker."""
    for rank, number in itertools.product(range(world), range(workers)):
        worker.num_workers, worker.id = workers, number
        yield rank


@pytest.mark.parametrize("weights", [[3, "x"], [3, None], "ab", 5, [1, "2"], [math.nan, 1], [math.inf, 1], [[1], [2]]])
def test_weights_are_positive_numbers(folder: Path, weights: Any) -> None:
    sets = [HiddenStatesDataset(str(folder / name)) for name in "ab"]
    MixedDataset(sets, torch.tensor([3.0, 1.0]))
    with pytest.raises(ConfigError, match=r"^weights: expected 2 positive numbers, got .*\. Correct them$"):
        MixedDataset(sets, weights)


def test_only_data_sets_are_mixed(folder: Path) -> None:
    single: Any = HiddenStatesDataset(str(folder / "a"))
    for given in (single, [single, str(folder / "b")], "ab", 5, [None]):
        with pytest.raises(ConfigError, match=r"^datasets: expected a list of HiddenStatesDataset, got "):
            MixedDataset(given)


def test_a_data_set_is_mixed_once(folder: Path) -> None:
    """It has one position, so a second place would resume at the first one's."""
    one = HiddenStatesDataset(str(folder / "a"))
    with pytest.raises(ConfigError, match=r"^datasets: expected different objects, got one several times\. Open one"):
        MixedDataset([one, one], [1, 1])


@pytest.mark.parametrize("stop", ["first", "all"])
def test_without_weights_a_data_set_without_samples_adds_nothing(folder: Path, stop: Any) -> None:
    def mixed(names: str) -> MixedDataset:
        empty = HiddenStatesDataset(open_run(str(folder / "b")).select(min_tokens=1000))
        return MixedDataset([empty, *(HiddenStatesDataset(str(folder / name)) for name in names)], stop=stop)

    assert keys_of(mixed("")) == []
    one, again = mixed("ac"), mixed("ac")
    seen = keys_of(itertools.islice(one, 7))
    again.load_state_dict(merge_states([one.state_dict()]))
    assert sorted(seen + keys_of(again)) == sorted(KEYS["a"] + KEYS["c"])
    again.set_epoch(1)
    assert sorted(keys_of(again)) == sorted(KEYS["a"] + KEYS["c"])


@pytest.mark.parametrize("world", [1, 3])
def test_without_weights_any_workers_give_each_sample_once(folder: Path, worker: Any, world: int) -> None:
    two = itertools.product(("ab", "ba"), (1, 2, 4), ("first", "all"))
    three = itertools.product(("abc",), (1, 3, 8, 50 // world), ("first", "all"))
    for names, workers, stop in (*two, *three):
        seen: list[str] = []
        for rank in shards(worker, world, workers):
            seen += keys_of(mixture(folder, names, rank=rank, world=world, stop=stop))
        assert sorted(seen) == sorted(key for name in names for key in KEYS[name]), (names, workers, stop)


def test_without_weights_workers_of_a_loader_give_each_sample_once(folder: Path) -> None:
    mixed = mixture(folder, "ab")
    for epoch in range(2):
        mixed.set_epoch(epoch)
        assert sorted(keys_of(DataLoader(mixed, batch_size=None, num_workers=4))) == sorted(KEYS["a"] + KEYS["b"])


@pytest.mark.parametrize("weights", [(41, 3, 7), (1, 1, 1), (3, 1, 0.5), (1, 5, 5), (1, 0.01, 0.01)])
def test_weighted_workers_give_the_samples_that_one_reader_gives(folder: Path, worker: Any, weights: Any) -> None:
    one = Counter(keys_of(mixture(folder, "abc", *weights)))
    for world, workers in itertools.product((1, 2), (1, 2, 4, 8)):
        seen: Counter[str] = Counter()
        for rank in shards(worker, world, workers):
            seen.update(keys_of(mixture(folder, "abc", *weights, rank=rank, world=world)))
        assert not one - seen, (world, workers)
        assert not seen or max(seen.values()) == 1
        for name, weight in zip("abc", weights, strict=True):  # a worker ends within an item of the next
            more = sum(key[0] == name for key in seen - one)
            assert more <= world * workers * max(1, weight / min(weights)), (world, workers, name)


@pytest.mark.parametrize(("old", "new"), [((3, 1), (2, 1)), ((1, 4), (3, 2)), ((2, 4), (1, 1)), ((1, 1), (5, 1))])
def test_a_mixture_without_weights_resumes_for_other_ranks(folder: Path, worker: Any, old: Any, new: Any) -> None:
    for taken in (0, 1, 5):
        seen, states = [], []
        for rank in shards(worker, *old):
            mixed = mixture(folder, "abc", rank=rank, world=old[0])
            seen += keys_of(itertools.islice(mixed, taken))
            states.append(mixed.state_dict())
            again = mixture(folder, "abc", rank=rank, world=old[0])
            again.load_state_dict(json.loads(json.dumps(states[-1])))
            whole = keys_of(mixture(folder, "abc", rank=rank, world=old[0]))
            assert whole[min(taken, len(whole)) :] == keys_of(again)
        merged = json.loads(json.dumps(merge_states(states)))
        for rank in shards(worker, *new):
            mixed = mixture(folder, "abc", rank=rank, world=new[0])
            mixed.load_state_dict(merged)
            seen += keys_of(mixed)
        assert sorted(seen) == sorted(key for keys in KEYS.values() for key in keys), taken


def test_without_weights_skipped_samples_end_no_other_data_set(tmp_path: Path, folder: Path) -> None:
    store_run(open_store(str(tmp_path)), [random_sample(f"d{i}", 2, seed=i, layer_ids=(2,)) for i in range(4)])
    lost = HiddenStatesDataset(str(tmp_path), on_error="skip")
    whole = HiddenStatesDataset(str(folder / "a"))
    for part in tmp_path.rglob("*.safetensors"):
        part.unlink()
    assert sorted(keys_of(MixedDataset([whole, lost]))) == sorted(KEYS["a"])
    assert lost.skipped == 4


def test_without_weights_a_repeating_data_set_ends_with_the_other(folder: Path) -> None:
    repeated, other = (HiddenStatesDataset(str(folder / name), repeat=name == "b") for name in "ba")
    assert Counter(key[0] for key in keys_of(MixedDataset([repeated, other]))) == {"a": 41, "b": 3}
    again = HiddenStatesDataset(str(folder / "b"), repeat=True)
    items = itertools.islice(MixedDataset([repeated, again]), 20)
    assert len(list(items)) == 20
