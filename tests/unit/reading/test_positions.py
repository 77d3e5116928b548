"""A state of any moment resumes exactly the rest, for each data set, with and without a loader and its workers."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from hsx_dist import HiddenStatesDataset, MixedDataset, PackedContexts, TokenBatches, merge_states
from hsx_dist.errors import ConfigError
from hsx_dist.format.place import start_run
from hsx_dist.saelens import data_provider
from hsx_dist.store import open_store
from hsx_dist.testing.samples import random_sample
from tests.harness.runs import RunWriter, store_run, whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    for name, samples, first in (("a", 9, 0), ("b", 4, 100)):
        made = [
            replace(
                random_sample(f"{name}{i}", 4, seed=i, odd=False, hidden_size=4, layer_ids=(2,)),
                token_ids=np.arange(first + 4 * i, first + 4 * i + 4),
            )
            for i in range(samples)
        ]
        store_run(open_store(str(path / name)), made, per_part=3)
    return path


class Case:
    """A data set of one kind, and what its trainer calls."""

    def __init__(self, folder: Path, kind: str, **loader: Any):
        names = "ab" if kind in ("first", "all") else "a"
        self.datasets = [
            HiddenStatesDataset(str(folder / name), shuffle=True, shuffle_buffer=4, threads=1, rank=0, world_size=1)
            for name in names
        ]
        self.data: Any = self.datasets[0]
        if kind == "tokens":
            self.data = TokenBatches(self.data, 4, buffer_tokens=8)
        elif kind == "packed":
            self.data = PackedContexts(self.data, 1, 6)
        elif kind != "plain":
            self.data = MixedDataset(self.datasets, weights=[5, 1], stop="all" if kind == "all" else "first")
        self.source: Any = self.data
        if loader:
            next(iter(self.data))  # as trainers look at shapes; workers are forked with this position
            self.source = StatefulDataLoader(self.data, batch_size=None, **loader)

    def set_epoch(self, epoch: int | None) -> None:
        for dataset in self.datasets if epoch is not None else ():
            dataset.set_epoch(epoch or 0)

    def state(self) -> Any:
        state = self.source.state_dict()
        return json.loads(json.dumps(state)) if self.source is self.data else state

    def items(self) -> Iterator[list[int]]:
        return Items(iter(self.source))

    def epoch(self, number: int | None) -> list[list[int]]:
        self.set_epoch(number)
        return list(self.items())


class Items(Iterator[list[int]]):
    """The token ids of each item. ``iter`` of the data set was called."""

    def __init__(self, source: Iterator[Any]):
        self._source = source

    def __next__(self) -> list[int]:
        found: list[int] = next(self._source)["input_ids"].flatten().tolist()
        return found


@dataclass
class Moment:
    """A state, and what a resume from it yields: the items of ``epoch`` after the first ``taken``."""

    name: str
    state: Any
    epoch: int
    taken: int


def moments(case: Case) -> tuple[list[Moment], list[list[list[int]]]]:
    """States of two epochs, and the items of three."""
    found: list[Moment] = []
    orders: list[list[list[int]]] = []
    if case.source is case.data:
        found.append(Moment("nothing called", case.state(), 0, 0))
    for epoch in range(2):
        case.set_epoch(epoch)
        if case.source is case.data:
            found.append(Moment("set_epoch", case.state(), epoch, 0))
        items = case.items()
        found.append(Moment("begun", case.state(), epoch, 0))
        order = []
        for item in items:
            order.append(item)
            found.append(Moment("item", case.state(), epoch, len(order)))
        found.append(Moment("ended", case.state(), epoch, len(order)))
        orders.append(order)
    return found, [*orders, case.epoch(2)]


@pytest.mark.parametrize("kind", ["plain", "first", "all", "tokens", "packed"])
def test_a_state_of_any_moment_resumes_the_rest(folder: Path, kind: str) -> None:
    found, orders = moments(Case(folder, kind))
    assert len({str(order) for order in orders}) == 3
    for at in found:
        rest = orders[at.epoch][at.taken :]
        # ``set_epoch`` before and after ``load_state_dict``, also by a trainer that counts from 0 in each process
        for before, after in ((None, None), (at.epoch, None), (None, at.epoch), (1 - at.epoch, None), (None, 0)):
            case = Case(folder, kind)
            case.set_epoch(before)
            case.source.load_state_dict(at.state)
            case.set_epoch(after)
            again = case.state()
            later = after is None and before is not None and before > at.epoch  # begins that epoch
            assert case.epoch(None) == (orders[before] if later else rest), (at, before, after)
        assert case.epoch(2) == orders[2], at
        case.set_epoch(0)
        case.source.load_state_dict(again)
        items = case.items()
        begun = case.state()
        del items
        case.source.load_state_dict(begun)
        assert case.epoch(None) == rest, at
        case.source.load_state_dict(at.state)
        assert case.epoch(at.epoch + 1) == orders[at.epoch + 1], at


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        *itertools.product(("plain", "all", "tokens", "packed"), (0,)),
        *(("plain", 2), ("tokens", 2), ("packed", "persistent")),
        *(pytest.param(kind, 2, marks=pytest.mark.soak) for kind in ("all", "packed")),
        *(pytest.param(kind, "persistent", marks=pytest.mark.soak) for kind in ("plain", "all", "tokens")),
    ],
)
def test_torchdatas_loader_resumes_the_rest(folder: Path, kind: str, workers: int | str) -> None:
    loader = {"num_workers": 2, "persistent_workers": True} if workers == "persistent" else {"num_workers": workers}
    found, orders = moments(Case(folder, kind, **loader))
    for at in found:
        ended = at.name == "ended"
        if workers and (at.taken > 2 or at.epoch == 0) and not ended:
            continue  # it takes long to start workers
        case = Case(folder, kind, **loader)
        case.source.load_state_dict(at.state)
        epoch = at.epoch + ended
        assert case.epoch(epoch) == orders[epoch][0 if ended else at.taken :], at
        if epoch < 2 and not (workers and at.taken == 0):
            assert case.epoch(epoch + 1) == orders[epoch + 1], at


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        *itertools.product(("plain", "first", "all", "tokens", "packed"), (None, 0)),
        *(("plain", 2), ("tokens", 2)),
        *(pytest.param(kind, 2, marks=pytest.mark.soak) for kind in ("first", "all", "packed")),
    ],
)
def test_set_epoch_of_a_later_epoch_begins_it(folder: Path, kind: str, workers: int | None) -> None:
    """A trainer saves after an epoch's last item, or stops within an epoch. Loaders load states after ``set_epoch``."""
    loader = {} if workers is None else {"num_workers": workers}
    found, orders = moments(Case(folder, kind, **loader))
    first = [at for at in found if at.epoch == 0 and at.taken]
    for at in (first[1], first[-2]):
        case = Case(folder, kind, **loader)
        case.source.load_state_dict(at.state)
        first_order = case.epoch(1)  # begins with the worker that was next
        assert sorted(first_order) == sorted(orders[1]) if workers else first_order == orders[1], at
        assert case.epoch(2) == orders[2], at


@pytest.mark.parametrize("kind", ["plain", "first", "all", "tokens", "packed"])
def test_set_epoch_between_iter_and_the_first_item_counts(folder: Path, kind: str) -> None:
    """``StatefulDataLoader.state_dict`` begins an iteration."""
    found, orders = moments(Case(folder, kind))
    for loader in ({}, {"num_workers": 0}):
        case = Case(folder, kind, **loader)
        if loader:
            case.state()
            assert case.epoch(1) == orders[1]
        else:
            for state in (None, next(at.state for at in found if at.taken == 2)):
                if state is not None:
                    case.set_epoch(0)
                    case.source.load_state_dict(state)
                items = case.items()
                case.set_epoch(1)
                assert list(items) == orders[1]


@pytest.mark.parametrize("kind", ["first", "all", "tokens", "packed"])
def test_reading_the_inner_data_set_does_not_change_the_position(folder: Path, kind: str) -> None:
    found, orders = moments(Case(folder, kind))
    for at in (None, next(at for at in found if at.taken == 2)):
        case, again = Case(folder, kind), Case(folder, kind)
        if at is not None:
            case.source.load_state_dict(at.state)
        next(iter(case.datasets[0]))
        again.source.load_state_dict(case.state())
        rest = orders[0] if at is None else orders[0][2:]
        assert case.epoch(None) == again.epoch(None) == rest


def test_states_between_snapshots_are_not_merged(folder: Path) -> None:
    case = Case(folder, "plain", num_workers=2, snapshot_every_n_steps=4)
    items = case.items()
    states = [(next(items), case.state())[1] for _ in range(5)]
    merge_states([states[3]])
    with pytest.raises(ConfigError, match=r"got one 1 steps later\. Set snapshot_every_n_steps=1"):
        merge_states([states[4]])


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("options", [{"follow": True}, {"on_error": "skip"}])
def test_a_loader_with_a_snapshot_at_each_step_loses_nothing(
    options: dict[str, Any], steps: int, tmp_path: Path
) -> None:
    """With fewer snapshots it drops items by number, so that the guide requires one at each step."""
    root = open_store(str(tmp_path))
    place = start_run(root, {"meaning": {"layers": [2]}})
    stored = [whole(random_sample(f"s{i}", 4, seed=i, odd=False, hidden_size=4, layer_ids=(2,)), i) for i in range(8)]
    late = RunWriter(root, name="b")
    early = RunWriter(root, name="a", attempt=late.attempt)

    def loader() -> StatefulDataLoader:
        data = HiddenStatesDataset(root.url, **options, threads=1, rank=0, world_size=1)
        return StatefulDataLoader(data, None, num_workers=1, prefetch_factor=1, snapshot_every_n_steps=steps)

    parts = [late.put([one]).part for one in stored[:4]]
    if "follow" not in options:
        early.put(stored[4:])
        early.complete()
    first = loader()
    items = iter(first)
    before = [next(items)["key"] for _ in range(3)]
    state = pickle.loads(pickle.dumps(first.state_dict()))
    del items, first
    if "follow" in options:  # a resumed data set reads the receipts of writer "a" first
        early.put(stored[4:])
        early.complete()
    else:
        place.store.delete(parts[0] or "")
    again = loader()
    again.load_state_dict(state)
    lost = {sample.key for sample, _, _ in stored} - {*before, *(item["key"] for item in again)}
    assert bool(lost) == (steps > 1)


@pytest.mark.parametrize("kind", ["plain", "all", "tokens", "packed"])
def test_workers_start_the_next_epoch_after_resuming_a_merged_state(folder: Path, kind: str) -> None:
    found, orders = moments(Case(folder, kind))
    at = next(m for m in found if m.taken == 2)
    every = {i for item in orders[0] for i in item}
    head = {i for item in orders[0][:2] for i in item}
    case = Case(folder, kind)
    case.source.load_state_dict(merge_states([at.state]))
    case.source = DataLoader(case.data, batch_size=None, num_workers=2)
    rest = [i for item in case.epoch(0) for i in item]
    assert head | set(rest) == every
    if kind in ("plain", "all"):  # a merge repeats the tokens of a buffer
        assert len(head) + len(rest) == len(every)
    assert {i for item in case.epoch(1) for i in item} == every


@pytest.mark.parametrize("kind", ["plain", "all", "tokens", "packed"])
def test_set_epoch_during_an_iteration_loses_nothing(folder: Path, kind: str) -> None:
    orders = moments(Case(folder, kind))[1]
    case = Case(folder, kind)
    items = case.items()
    head = [next(items)]
    case.set_epoch(1)
    between = case.state()
    head.append(next(items))
    state = case.state()
    assert head + list(items) == orders[0]
    assert case.epoch(None) == orders[1]
    for at, rest in ((between, orders[1]), (state, orders[0][2:])):
        again = Case(folder, kind)
        again.source.load_state_dict(at)
        assert again.epoch(None) == rest


@pytest.mark.parametrize("follow", [False, True])
def test_a_second_iteration_begins_anew_before_its_first_item(folder: Path, follow: bool) -> None:
    def fresh() -> HiddenStatesDataset:
        return HiddenStatesDataset(str(folder / "a"), threads=1, rank=0, world_size=1, follow=follow)

    for take in (3, 9):  # an abandoned iteration and a complete one
        dataset, again = fresh(), fresh()
        first, rest = iter(dataset), fresh()
        head = [next(first)["key"] for _ in range(take)]
        rest.load_state_dict(dataset.state_dict())
        every = [*head, *(item["key"] for item in rest)]
        second = iter(dataset)
        again.load_state_dict(dataset.state_dict())
        assert [item["key"] for item in again] == [item["key"] for item in second] == every
        assert len(every) == 9


def test_a_saelens_provider_saved_before_its_first_batch_resumes_there(folder: Path) -> None:
    def provider() -> Any:
        return data_provider(str(folder / "a"), "blocks.2.hook_resid_pre", 4, data={"threads": 1}, buffer_tokens=8)

    made, again = provider(), provider()
    for _ in range(20):  # into the third epoch
        next(made)
    state = json.loads(json.dumps(made.state_dict()))
    rest = [next(made).tolist() for _ in range(4)]
    for _ in range(2):
        again.load_state_dict(state)
        state = json.loads(json.dumps(again.state_dict()))
        assert [next(again).tolist() for _ in range(4)] == rest
