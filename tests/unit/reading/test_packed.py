"""Fixed contexts: no token is lost, each document has its own positions, and a resume is exact to the token."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from hsx_dist import HiddenStatesDataset, HiddenStatesMapDataset, PackedContexts, TokenBatches, merge_states
from hsx_dist.errors import ConfigError
from hsx_dist.format.names import part_name
from hsx_dist.format.place import start_run
from hsx_dist.store import open_store
from hsx_dist.testing.samples import RandomSample, random_sample
from tests.harness.runs import RunWriter, store_run

#: Shorter than a context of 16, longer, exactly one, and longer than a batch of three contexts.
LENGTHS = (5, 40, 16, 3, 70, 11)
STARTS = np.cumsum([0, *LENGTHS[:-1]])
SAMPLES = [
    replace(random_sample(f"s{i}", n, seed=i, odd=False), token_ids=np.arange(n) + start)
    for i, (n, start) in enumerate(zip(LENGTHS, STARTS, strict=True))
]
TOTAL = sum(LENGTHS)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("run") / "run")
    store_run(open_store(path), SAMPLES, per_part=4)
    return path


def packed(url: str, rows: int = 3, tokens: int = 16, *, drop_last: bool = False, **data: Any) -> PackedContexts:
    dataset = HiddenStatesDataset(url, **{"layers": [15], "framework": "numpy", **data})
    return PackedContexts(dataset, rows, tokens, drop_last=drop_last)


def flat(batches: Any, name: str) -> np.ndarray[Any, Any]:
    """The values of all tokens without padding."""
    return np.concatenate([np.asarray(b[name])[np.asarray(b["attention_mask"])] for b in batches])


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_documents_follow_one_another_with_their_own_positions(url: str, framework: str) -> None:
    batches = list(packed(url, framework=framework))
    assert [b["input_ids"].shape for b in batches] == [(3, 16)] * 3 + [(1, 16)]
    assert flat(batches, "input_ids").tolist() == list(range(TOTAL))
    assert flat(batches, "position_ids").tolist() == [i for n in LENGTHS for i in range(n)]
    of_token = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    for batch in batches:
        states, ids = batch["hidden_states"], np.asarray(batch["input_ids"])
        assert states.shape == (*ids.shape, 24)
        mask, documents = np.asarray(batch["attention_mask"]), np.asarray(batch["document_ids"])
        assert ((documents == -1) == ~mask).all()
        same = documents[mask][:, None] == documents[mask][None]
        assert (same == (of_token[ids[mask]][:, None] == of_token[ids[mask]][None])).all()
        assert batch["loss_mask"].dtype == batch["attention_mask"].dtype
    last = np.asarray(batches[-1]["attention_mask"])
    assert last.sum() == TOTAL % 48 == 1
    padding = batches[-1]["hidden_states"][~batches[-1]["attention_mask"]]
    assert not np.asarray(padding.view() if framework == "numpy" else padding.float()).any()
    assert not np.asarray(batches[-1]["input_ids"])[~last].any()


def test_states_are_those_of_their_tokens(url: str) -> None:
    items = list(HiddenStatesDataset(url, framework="numpy"))
    batches = list(packed(url, layers=None))
    assert batches[0]["hidden_states"].shape == (3, 16, 3, 24)
    expected = np.concatenate([item["hidden_states"] for item in items])
    assert np.array_equal(flat(batches, "hidden_states"), expected, equal_nan=True)


@pytest.mark.parametrize("after", range(5))
def test_a_resume_goes_on_at_the_next_token(url: str, after: int) -> None:
    whole = list(packed(url, shuffle=True))
    first = packed(url, shuffle=True)
    list(islice(first, after))
    state = json.loads(json.dumps(first.state_dict()))
    second = packed(url, shuffle=True)
    second.load_state_dict(state)
    assert json.loads(json.dumps(second.state_dict())) == state
    rest = list(second)
    expected = whole[after:] if after < 4 else []
    for name in ("input_ids", "position_ids", "document_ids", "attention_mask"):
        assert [b[name].tolist() for b in rest] == [b[name].tolist() for b in expected]
    other = packed(url, 2, 8, shuffle=True)
    other.load_state_dict(state)
    others = list(other)
    if expected:
        assert flat(others, "input_ids").tolist() == flat(expected, "input_ids").tolist()
        assert flat(others, "position_ids").tolist() == flat(expected, "position_ids").tolist()


def test_a_repeating_data_set_pads_nothing_and_the_last_batch_can_be_dropped(url: str) -> None:
    endless = list(islice(packed(url, repeat=True), 9))
    assert all(b["attention_mask"].all() for b in endless)
    assert flat(endless, "input_ids").tolist() == [t % TOTAL for t in range(9 * 48)]
    assert len(list(packed(url, drop_last=True))) == TOTAL // 48


def test_workers_of_a_loader_and_merged_states(url: str) -> None:
    loader = DataLoader(packed(url, framework="torch"), batch_size=None, num_workers=2)
    assert sorted(flat(list(loader), "input_ids").tolist()) == list(range(TOTAL))
    first = packed(url, rank=0, world_size=1)
    seen = flat(islice(first, 2), "input_ids").tolist()
    ranks = [packed(url, rank=rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(merge_states([first.state_dict()]))
    rest = [t for rank in ranks for t in flat(rank, "input_ids").tolist()]
    assert set(seen) | set(rest) == set(range(TOTAL))


def test_a_sample_that_was_begun_and_is_gone_takes_no_tokens_of_the_next(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    writer = store_run(open_store(path), SAMPLES, per_part=1)
    data = packed(path, 1, 8, on_error="skip")
    list(islice(data, 1))  # five tokens of s0 and three of s1
    state = data.state_dict()
    again = packed(path, 1, 8, on_error="skip")
    part = HiddenStatesDataset(path).run.index.parts[1].part
    assert part is not None
    writer.store.delete(part)
    again.load_state_dict(state)
    assert flat(again, "input_ids").tolist() == list(range(45, TOTAL))


@pytest.mark.parametrize("framework", ["torch", "numpy"])
@pytest.mark.parametrize("rows", [1 << 50, 1 << 58])
def test_a_batch_that_does_not_fit_into_memory_is_a_typed_error(url: str, rows: int, framework: str) -> None:
    with pytest.raises(ConfigError, match="contexts: expected a buffer that fits into memory"):
        next(iter(packed(url, rows, framework=framework)))


def test_wrong_sizes_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="context_tokens: expected an integer of at least 1"):
        packed(url, 1, 0)


@pytest.mark.parametrize(
    "change", [{"tokens": -2}, {"tokens": "4"}, {"tokens": 1.5}, {"document": 3}, {"dataset": None}, {"dataset": 5}]
)
def test_a_damaged_state_is_a_typed_error(url: str, change: dict[str, Any]) -> None:
    data = packed(url, 1, 8)
    list(islice(data, 2))
    with pytest.raises(ConfigError, match=r"state: (.*: )?expected"):
        packed(url, 1, 8).load_state_dict({**data.state_dict(), **change})
    with pytest.raises(ConfigError, match="state: expected"):
        packed(url, 1, 8).load_state_dict([])  # type: ignore[arg-type]


def test_a_repeating_data_set_without_tokens_ends_with_an_error(url: str) -> None:
    with pytest.raises(ConfigError, match="expected some tokens, got none in a whole epoch"):
        next(iter(PackedContexts(HiddenStatesDataset(url, layers=[15], tokens=slice(70, None), repeat=True), 1, 8)))


@pytest.mark.parametrize("kind", ["packed", "mixed tokens"])
def test_a_merged_state_can_be_merged_again_after_the_first_batch(url: str, kind: str) -> None:
    def ranks(world: int) -> list[Any]:
        data = [
            HiddenStatesDataset(url, layers=[15], framework="numpy", rank=r, world_size=world) for r in range(world)
        ]
        return [PackedContexts(d, 1, 4) if kind == "packed" else TokenBatches(d, 4, buffer_tokens=8) for d in data]

    seen: set[int] = set()
    state: Any = None
    for world in (2, 3, 2, 1):
        states = []
        for rank in ranks(world):
            if state is not None:
                rank.load_state_dict(state)
            for batch in islice(rank, None if world == 1 else 1):
                seen |= set(batch["input_ids"].reshape(-1).tolist())
            states.append(json.loads(json.dumps(rank.state_dict())))
        state = merge_states(states)
    assert seen == set(range(TOTAL))


@pytest.mark.parametrize("orders", [[(3, 7), (7, 3)], [(3,), (7,)]])
@pytest.mark.parametrize("joined", [lambda d: PackedContexts(d, 1, 8), lambda d: TokenBatches(d, 8, buffer_tokens=8)])
def test_samples_of_other_layers_are_not_joined_as_if_equal(tmp_path: Path, orders: Any, joined: Any) -> None:
    """Values are layer ids. A run that lists its layers gives them by id, another run is refused."""
    samples = []
    for i, ids in enumerate(orders):
        states = np.broadcast_to(np.float32(ids).view(np.uint32)[None, :, None], (4, len(ids), 2)).copy()
        samples.append(RandomSample(f"s{i}", states, np.arange(4) + 4 * i, ids, "float32", 16))
    for name, layers in (("listed", [3, 7]), ("all", "all")):
        store_run(open_store(str(tmp_path / name)), samples, info={"meaning": {"layers": layers}})
    if len(orders[0]) == 2:
        [batch] = joined(HiddenStatesDataset(str(tmp_path / "listed"), framework="numpy"))
        assert np.array_equal(batch["hidden_states"].reshape(8, 2, 2), np.broadcast_to([[[3], [7]]], (8, 2, 2)))
    with pytest.raises(ConfigError, match=r"as in earlier samples, got .*Pass layers="):
        list(joined(HiddenStatesDataset(str(tmp_path / "all"), framework="numpy")))


@pytest.mark.parametrize("follow", [False, True])
def test_items_of_points_have_one_order_of_layers(tmp_path: Path, follow: bool) -> None:
    """Items with points do not name their layers, so that code that joins them cannot compare these."""
    store = open_store(str(tmp_path))
    start_run(store, {})
    writer = RunWriter(store)
    for i, ids in enumerate([(3, 7), (7, 3)]):
        sample = random_sample(f"s{i}", 4, layer_ids=ids)
        writer.put([(sample, replace(sample.segments()[0], point="mlp_out"), i)])
    writer.complete()
    options: dict[str, Any] = {"points": ["mlp_out"], "framework": "numpy"}
    streams = [HiddenStatesDataset(str(tmp_path), follow=follow, **options)]
    if follow:  # without follow, it selects the layers of the run's first sample by id
        streams.append(PackedContexts(HiddenStatesDataset(str(tmp_path), follow=True, **options), 1, 8))
    for stream in streams:
        with pytest.raises(ConfigError, match=r"expected the layers \[.*\] of mlp_out"):
            list(stream)
    by_place = HiddenStatesMapDataset(str(tmp_path), **options)
    with pytest.raises(ConfigError, match="Pass layers="):
        by_place.__getitems__([0, 1])
    assert len(list(HiddenStatesDataset(str(tmp_path), layers=[7, 3], **options))) == 2


def _many(path: Path, n: int, per_part: int) -> RunWriter:
    """A run of ``n`` samples of four tokens. Token 4 i is the first of sample i."""
    samples = [replace(random_sample(f"s{i * 7919 % 100_003}", 4), token_ids=np.arange(4) + 4 * i) for i in range(n)]
    return store_run(open_store(str(path)), samples, per_part=per_part)


@pytest.mark.parametrize("kind", ["packed", "tokens"])
def test_states_with_follow_are_those_between_the_samples(tmp_path: Path, kind: str) -> None:
    """Also if they are made later: a batch ends in a sample, and its state is of the moment before that sample."""
    writer = _many(tmp_path, 24, 5)
    writer.store.delete(part_name(1, "w", 2))

    def data() -> HiddenStatesDataset:
        return HiddenStatesDataset(str(tmp_path), layers=[15], framework="numpy", follow=True, on_error="skip")

    plain = data()
    at = iter(plain)
    before = {0: plain.state_dict()}  # by the number of tokens that were yielded
    before.update({4 * i: plain.state_dict() for i, _ in enumerate(at, 1)})
    assert len(before) == 20
    assert before[4 * 19]["position"]["lost"]
    batches = PackedContexts(data(), 1, 10) if kind == "packed" else TokenBatches(data(), 5, buffer_tokens=10, keep=0)
    found = []
    for number, _ in enumerate(batches):
        state = batches.state_dict()
        begun = 10 * (number + 1) - 1 if kind == "packed" else 10 * (number // 2)
        if begun < 4 * 19:
            assert state["dataset"] == before[begun // 4 * 4]
            found.append((state, json.dumps(state)))
    assert len(found) >= 7
    assert all(json.dumps(state) == text for state, text in found)
    assert batches.state_dict()["dataset"] == plain.state_dict()


@pytest.mark.parametrize("kind", ["packed", "tokens"])
def test_with_follow_the_finished_keys_are_not_sorted_for_each_sample(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _many(tmp_path, 200, 200)
    sorted_keys = 0

    def counted(values: Any) -> list[Any]:
        nonlocal sorted_keys
        found = sorted(values)
        sorted_keys += len(found)
        return found

    monkeypatch.setattr("hsx_dist.reading.follow.sorted", counted, raising=False)
    data = HiddenStatesDataset(str(tmp_path), layers=[15], framework="numpy", follow=True)
    batches = PackedContexts(data, 4, 16) if kind == "packed" else TokenBatches(data, 16, buffer_tokens=64)
    assert sum(len(batch["input_ids"].flatten()) for batch in batches) == 800
    assert len(batches.state_dict()["dataset"]["position"]["1/w"][1]) == 200
    assert sorted_keys < 1000


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_a_batch_takes_memory_for_its_tokens_only(tmp_path: Path, framework: str) -> None:
    """The rows of one sample may be much wider than those of all others, so its width does not limit a batch."""
    store_run(open_store(str(tmp_path)), [random_sample("wide", 1, layer_ids=(15,), hidden_size=1 << 16, odd=False)])

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    contexts = packed(str(tmp_path), 1, 1, framework=framework)
    list(contexts)  # imports
    before = resident()
    [batch] = list(packed(str(tmp_path), 1, 1 << 10, framework=framework))  # 128 MiB in bf16
    assert resident() - before < 32 << 20
    assert batch["hidden_states"].shape == (1, 1 << 10, 1 << 16)
    assert (np.asarray(batch["hidden_states"][0, 0, :10].tolist()) != 0).any()
