"""The mixing buffer of ``TokenBatches``, tokens that are left out, and scaling by a run's statistics."""

from __future__ import annotations

import json
import pickle
import threading
import time
from copy import copy
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hsx_dist import HiddenStatesDataset, HiddenStatesMapDataset, MixedDataset, PackedContexts, TokenBatches
from hsx_dist.errors import ConfigError, FormatError
from hsx_dist.format.place import start_run
from hsx_dist.reading import token_batches
from hsx_dist.reading.mixer import Slots, share_sizes
from hsx_dist.reading.run import Run
from hsx_dist.reading.statistics import compute_statistics, store_statistics
from hsx_dist.store import open_store
from hsx_dist.testing.samples import RandomSample, random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import RunWriter, store_run, whole

SAMPLES = [
    replace(random_sample(f"s{i:02d}", 40, seed=i, odd=False), token_ids=np.arange(40) + 40 * i) for i in range(30)
]
TOTAL = 40 * len(SAMPLES)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("run") / "run")
    store_run(open_store(path), SAMPLES, per_part=4)
    return path


def ids_of(batches: Any) -> list[list[int]]:
    return [batch["input_ids"].tolist() for batch in batches]


def mixing(url: str, *, keep: float = 0.5, **data: Any) -> TokenBatches:
    return TokenBatches(HiddenStatesDataset(url, layers=[15], **data), 16, buffer_tokens=256, keep=keep, seed=3)


@pytest.mark.parametrize("keep", [0, 0.5, 0.8, 0.95])
def test_a_mixture_gives_each_token_once_with_its_own_states(url: str, keep: float) -> None:
    states = np.concatenate([s.states[:, 1] for s in SAMPLES])
    seen = []
    for batch in mixing(url, keep=keep):
        ids = batch["input_ids"].numpy()
        assert np.array_equal(batch["hidden_states"].view(torch.int16).numpy().view(np.uint16), states[ids])
        seen += ids.tolist()
    assert sorted(seen) == list(range(TOTAL))


def test_kept_tokens_come_in_later_rounds_and_the_buffer_bounds_them(url: str) -> None:
    """Without shuffling, a token's id is its position in the source. Its delay is its id compared with its batch."""
    first_of_batch = {keep: [min(b) for b in ids_of(mixing(url, keep=keep))] for keep in (0, 0.5)}
    late = {keep: max(16 * i - low for i, low in enumerate(firsts)) for keep, firsts in first_of_batch.items()}
    spans = {keep: np.mean([max(b) - min(b) for b in ids_of(mixing(url, keep=keep))[16:48]]) for keep in (0, 0.5)}
    assert late[0] < 256  # a buffer is emptied before the next is filled
    assert late[0.5] > 256
    assert spans[0.5] > spans[0]
    newest = [max(b) for b in ids_of(mixing(url))]
    assert all(high < 16 * (i + 1) + 256 for i, high in enumerate(newest))  # never more tokens than the buffer holds


@pytest.mark.parametrize(("block", "batch", "keep"), [(128, 16, 0.5), (4096, 16, 0.5), (16, 16, 0.5), (4096, 1, 0.9)])
def test_shares_are_a_whole_block_in_at_most_eight_rounds(block: int, batch: int, keep: float) -> None:
    sizes = share_sizes(block, batch, keep)
    assert sum(sizes) == block
    assert len(sizes) <= 8
    assert all(size % batch == 0 for size in sizes)
    assert block == batch or abs(sizes[0] / block - (1 - keep)) < 0.01 + batch / block


@pytest.mark.parametrize("keep", [0, 0.5, 0.8])
def test_each_batch_waits_for_its_own_part_of_the_refill(
    url: str, keep: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a prefetching thread, a batch waits only for the tokens that are put into the buffer before it."""
    put: list[int] = []
    whole = Slots.put

    def counted(slots: Slots, places: Any, *rows: Any) -> None:
        put.append(len(places))
        whole(slots, places, *rows)

    monkeypatch.setattr(token_batches, "ahead", lambda steps, *_: steps)
    monkeypatch.setattr(Slots, "put", counted)
    waits = []
    for _ in islice(mixing(url, keep=keep, repeat=True), 200):
        waits.append(sum(put))
        put.clear()
    full = waits[100:]  # the buffer is full: equal numbers of tokens are added and taken
    assert max(full) == 16 == np.mean(full)


def test_rows_of_another_shape_are_refused() -> None:
    slots = Slots(1, 4)
    slots.put(np.arange(2), {"input_ids": np.arange(2), "hidden_states": np.ones((2, 1, 3))}, 0)
    with pytest.raises(FormatError, match="hidden_states: expected rows of float64 \\(1, 3\\) as before"):
        slots.put(np.arange(2, 4), {"input_ids": np.arange(2), "hidden_states": np.ones((2, 2, 3))}, 0)


@pytest.mark.parametrize("after", [0, 1, 9, 20, 74, 75])
@pytest.mark.parametrize("keep", [0.5, 0.8])
def test_a_resume_gives_the_rest_batch_by_batch(url: str, after: int, keep: float) -> None:
    whole = ids_of(mixing(url, keep=keep, shuffle=True))
    assert len(whole) == 75
    first = mixing(url, keep=keep, shuffle=True)
    source = iter(first)
    list(islice(source, after))
    second = mixing(url, keep=keep, shuffle=True)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = iter(second)
    given = ids_of(islice(rest, 3))
    third = mixing(url, keep=keep, shuffle=True)
    third.load_state_dict(json.loads(json.dumps(second.state_dict())))
    assert given + ids_of(third) == whole[after:]


def test_a_resume_with_another_buffer_loses_no_token(url: str) -> None:
    first = mixing(url)
    seen = {t for batch in islice(first, 30) for t in batch["input_ids"].tolist()}
    second = TokenBatches(HiddenStatesDataset(url, layers=[15]), 8, buffer_tokens=64)
    second.load_state_dict(first.state_dict())
    rest = {t for ids in ids_of(second) for t in ids}
    assert seen | rest == set(range(TOTAL))
    assert len(rest) < TOTAL


def test_a_repeating_data_set_gives_batches_without_end_each_token_once_an_epoch(url: str) -> None:
    endless = mixing(url, shuffle=True, repeat=True)
    taken = [t for ids in ids_of(islice(endless, 225)) for t in ids]
    counts = np.bincount(taken, minlength=TOTAL)
    assert len(taken) == 3 * TOTAL
    assert counts.min() >= 2
    assert counts.max() <= 4  # the tokens in the buffer at the end of three epochs
    with pytest.raises(ConfigError, match="a whole epoch"):
        next(iter(TokenBatches(HiddenStatesDataset(url, repeat=True), 16, exclude_ids=range(TOTAL))))


def test_ids_and_first_tokens_are_left_out(url: str) -> None:
    data = HiddenStatesDataset(url, layers=[15], tokens=slice(1, None))
    seen = sorted(t for ids in ids_of(TokenBatches(data, 16, exclude_ids=[3, 90])) for t in ids)
    assert seen == [t for t in range(TOTAL) if t % 40 and t not in (3, 90)]


def test_leaving_an_iteration_ends_its_thread(url: str) -> None:
    source = iter(mixing(url, repeat=True))
    next(source)
    source.close()  # type: ignore[attr-defined]
    end = time.monotonic() + 60
    while [t for t in threading.enumerate() if t.name.startswith("hsx-mix")]:
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("framework", ["torch", "numpy"])
@pytest.mark.parametrize("layers", [[15], [2, 30]])
def test_scaling_by_the_runs_statistics(tmp_path: Path, framework: Any, layers: list[int]) -> None:
    path = str(tmp_path / "run")
    store_run(open_store(path), SAMPLES[:6], per_part=4)

    def scaled(scaling: Any, **options: Any) -> np.ndarray[Any, Any]:
        data = HiddenStatesDataset(path, layers=layers, framework=framework)
        found = [np.asarray(b["hidden_states"]) for b in TokenBatches(data, 16, scaling=scaling, **options)]
        return np.concatenate(found).reshape(240, len(layers), -1)

    with pytest.raises(ConfigError, match=f"hsx stats .*--layers {layers[0]}"):
        scaled("norm")
    run = Run(open_store(path))
    store_statistics(run, compute_statistics(run))
    norm = scaled("norm")
    assert norm.dtype == np.float32
    assert np.allclose(np.linalg.norm(norm.astype(float), axis=2).mean(0), np.sqrt(norm.shape[2]), rtol=1e-4)
    standard = scaled("standard")
    assert np.allclose(standard.mean(0, dtype=float), 0, atol=1e-4)
    assert np.allclose(standard.std(0, dtype=float), 1, rtol=1e-3)
    assert scaled("norm", dtype=(torch if framework == "torch" else np).float16).dtype == np.float16
    with pytest.raises(ConfigError, match="scaling: expected"):
        scaled("layernorm")
    if framework == "numpy":
        with pytest.raises(ConfigError, match="device"):
            scaled(None, device="cpu")


def test_statistics_of_different_lengths_are_a_typed_error(tmp_path: Path) -> None:
    store_run(open_store(str(tmp_path)), SAMPLES[:1])
    run = Run(open_store(str(tmp_path)))
    found = compute_statistics(run, [2, 30])
    own = found.layers[30]
    wider = replace(own, **{name: np.tile(getattr(own, name), 2) for name in ("mean", "variance", "absmax")})
    store_statistics(run, replace(found, layers={**found.layers, 30: wider}))
    with pytest.raises(FormatError, match=r"of hidden_states of one length, got those of \[24, 48\] channels"):
        next(iter(TokenBatches(HiddenStatesDataset(run, layers=[2, 30]), 4, scaling="standard")))


@pytest.mark.parametrize("kind", ["data set", "batches", "mixed"])
def test_a_repeating_shard_without_samples_says_so(tmp_path: Path, kind: str) -> None:
    """Otherwise it would search for a sample for ever, and a training job would hang."""
    store_run(open_store(str(tmp_path)), SAMPLES[:2])
    data = HiddenStatesDataset(str(tmp_path), layers=[15], rank=2, world_size=3, repeat=True)
    one: Any = {"data set": data, "batches": TokenBatches(data, 4), "mixed": MixedDataset([data], [1])}[kind]
    with pytest.raises(ConfigError, match="expected a sample for each of 3 shards"):
        next(iter(one))
    assert list(HiddenStatesDataset(str(tmp_path), rank=2, world_size=3)) == []


def test_a_repeating_data_set_of_lost_parts_says_so(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store_run(store, SAMPLES[:4], per_part=2)
    data = HiddenStatesDataset(str(tmp_path), layers=[15], repeat=True, on_error="skip")
    first, *rest = tmp_path.rglob("*.safetensors")
    first.unlink()
    assert len(list(islice(data, 5))) == 5  # the remaining samples are repeated
    assert data.skipped >= 4
    for path in rest:
        path.unlink()
    data = HiddenStatesDataset(str(tmp_path), layers=[15], repeat=True, on_error="skip")
    for ask in (data, TokenBatches(data, 4)):
        with pytest.raises(FormatError, match="got none of a whole epoch: all 4 were skipped"):
            next(iter(ask))


def test_leaving_ends_a_step_that_finds_no_token(url: str) -> None:
    """A step of the mixing thread may read a whole epoch. Leaving the loop waits for at most one sample."""
    batches = TokenBatches(HiddenStatesDataset(url, layers=[15], repeat=True), 16, buffer_tokens=32)
    seen, asked = threading.Event(), []
    whole, release = batches._wanted, threading.Event()

    def wanted(item: Any) -> Any:
        rows = whole(item)
        if asked:
            seen.set()
            assert release.wait(30)
            rows = {name: x[:0] for name, x in rows.items()}
        asked.append(len(rows["input_ids"]))
        return rows

    batches._wanted = wanted  # type: ignore[method-assign]
    it = iter(batches)
    next(it)
    assert seen.wait(30)
    threading.Timer(0.2, release.set).start()
    it.close()
    assert asked.count(0) <= 2


def test_a_buffer_that_does_not_fit_into_memory_is_a_typed_error() -> None:
    slots = Slots(4, 256)
    slots._tokens = 1 << 50
    with pytest.raises(ConfigError, match="buffer_tokens: expected a buffer that fits into memory"):
        slots.put(np.arange(1), {"input_ids": np.zeros((1, 64))}, 0)


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("buffers", 1 << 32), ("buffers", -1), ("oldest", 5), ("blocks", 7), ("blocks", [7]), ("mix", 3), ("rows", "x"),
        ("first", 3), ("batches", 1.5), ("dataset", 5), ("dataset.epoch", 1 << 63), ("dataset.taken", -3),
        ("dataset.history", [[1, [-3]]]), ("dataset.history", [[0, []]]), ("dataset.history", [[3, [1]]]),
        ("dataset.history", [1]), ("dataset.shards", []), ("dataset.samples", None), ("dataset.run", 3),
        ("dataset.skipped", "x"),
    ],
)  # fmt: skip
def test_a_damaged_state_is_refused(url: str, member: str, value: Any) -> None:
    batches = mixing(url, repeat=True)
    list(islice(batches, 3))
    state = json.loads(json.dumps(batches.state_dict()))
    *path, name = member.split(".")
    (state[path[0]] if path else state)[name] = value
    with pytest.raises(ConfigError, match=r"state: .*expected"):
        mixing(url, repeat=True).load_state_dict(state)


def test_layers_go_by_their_ids(tmp_path: Path) -> None:
    """A sample with another order of layers gives the same rows. A sample with other layers is refused."""
    a = random_sample("a", 20, layer_ids=(3, 7), hidden_size=16, odd=False)
    turned = replace(a, key="b", states=a.states[:, ::-1].copy(), layer_ids=(7, 3))
    other = replace(a, key="c", layer_ids=(2, 8))
    info = {"meaning": {"layers": [3, 7]}}
    store_run(open_store(str(tmp_path / "both")), [a, turned], info=info)
    data = HiddenStatesDataset(str(tmp_path / "both"), framework="numpy")
    assert data.layers == (3, 7)
    [batch] = TokenBatches(data, 40)
    order = np.lexsort((*batch["hidden_states"][:, 0].T, batch["input_ids"]))
    rows = batch["hidden_states"][order]
    assert np.array_equal(rows[::2], rows[1::2])
    store_run(open_store(str(tmp_path / "other")), [a, other], info=info)
    with pytest.raises(ConfigError, match="layers"):
        list(TokenBatches(HiddenStatesDataset(str(tmp_path / "other")), 40))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_tokens": 2.5}, "batch_tokens: expected an integer of at least 1, got 2.5"),
        ({"buffer_tokens": "64"}, "buffer_tokens: expected an integer of at least 1, got '64'"),
        ({"keep": "0.5"}, "keep: expected a fraction"),
        ({"seed": -1}, "seed: expected an integer of at least 0, got -1"),
        ({"exclude_ids": "abc"}, "exclude_ids: expected token ids such as .* got 'abc'"),
        ({"exclude_ids": [0.5]}, "exclude_ids: expected token ids"),
        ({"exclude_ids": 2}, "exclude_ids: expected token ids"),
        ({"dtype": "float16"}, "dtype: expected one of torch's, got 'float16'"),
        ({"dtype": np.float16}, "dtype: expected one of torch's"),
        ({"device": "float16"}, "device: expected one of torch's, got 'float16'"),
        ({"data": {"loss_mask": "off"}, "only_loss": True}, "only_loss: expected a data set with masks, got loss_mask"),
        ({"data": {"rename": {"input_ids": "ids"}}}, "rename: expected input_ids under the same name"),
        ({"data": {"framework": "numpy"}, "dtype": "half-float"}, "dtype: expected one of numpy's"),
    ],
)
def test_a_wrong_argument_is_a_typed_error(url: str, options: dict[str, Any], message: str) -> None:
    data = {"framework": "torch", **options.pop("data", {})}
    with pytest.raises(ConfigError, match=message):
        TokenBatches(HiddenStatesDataset(url, layers=[15], **data), **{"batch_tokens": 16, **options})


def test_a_mixture_of_data_sets_is_refused(url: str) -> None:
    mixed = MixedDataset([HiddenStatesDataset(url)])
    for make in (lambda: TokenBatches(mixed, 16), lambda: PackedContexts(mixed, 2, 16)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="expected a HiddenStatesDataset, got a MixedDataset"):
            make()
    with pytest.raises(ConfigError, match="contexts: expected an integer of at least 1, got 1"):
        PackedContexts(HiddenStatesDataset(url), 1.5, 16)  # type: ignore[arg-type]


@pytest.mark.parametrize("scaling", ["norm", "standard"])
def test_a_resume_with_other_factors_is_refused(tmp_path: Path, scaling: Any, caplog: pytest.LogCaptureFixture) -> None:
    path = str(tmp_path / "run")
    store_run(open_store(path), SAMPLES[:6], per_part=4)
    run = Run(open_store(path))

    def batches(scaling: Any = scaling) -> TokenBatches:
        return TokenBatches(HiddenStatesDataset(path, layers=[15]), 16, scaling=scaling)

    store_statistics(run, compute_statistics(run, [15]))
    made = batches()
    begin = made.state_dict()
    iterator = iter(made)
    next(iterator)
    state, second = json.loads(json.dumps(made.state_dict())), next(iterator)
    store_statistics(run, compute_statistics(run, [15]))  # the same numbers
    assert "fewer tokens" not in caplog.text
    again = batches()
    again.load_state_dict(state)
    assert torch.equal(next(iter(again))["hidden_states"], second["hidden_states"])
    older = batches(None)
    older.load_state_dict({name: value for name, value in state.items() if name != "factors"})
    store_statistics(run, compute_statistics(run, [15], max_tokens=100))
    assert "layer=15 tokens=100 before=240" in caplog.text
    for other in (batches(), batches(None)):
        for of in (state, begin):
            with pytest.raises(ConfigError, match="scaling: expected the factors that the state was taken with"):
                other.load_state_dict(of)
    with pytest.raises(ConfigError, match="scaling: expected the factors"):
        made.load_state_dict(batches(None).state_dict())


@pytest.mark.parametrize("framework", ["torch", "numpy"])
@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}, {"scaling": "standard", "dtype": "float16"}])
def test_each_data_set_can_be_sent_to_a_worker_that_is_not_forked(
    url: str, framework: str, options: dict[str, Any]
) -> None:
    """``DataLoader`` pickles it for ``spawn`` and ``forkserver``."""
    if "scaling" in options:
        store_statistics(Run(open_store(url)), compute_statistics(Run(open_store(url)), [15]))
    if framework == "torch" and "dtype" in options:
        options = {**options, "dtype": getattr(torch, options["dtype"])}

    def source() -> HiddenStatesDataset:
        return HiddenStatesDataset(url, layers=[15], framework=framework)

    for made in (
        TokenBatches(source(), 16, buffer_tokens=256, **options),
        PackedContexts(source(), 2, 8),
        MixedDataset([source(), source()]),
        HiddenStatesMapDataset(url, layers=[15], framework=framework),
    ):
        pickle.loads(pickle.dumps(made))
        next(iter(made))  # also after the first batch
        sent = pickle.loads(pickle.dumps(made))
        for ours, theirs in zip(islice(iter(made), 3), islice(iter(sent), 3), strict=True):
            assert np.array_equal(ours["input_ids"], theirs["input_ids"])
            assert str(ours["hidden_states"]) == str(theirs["hidden_states"])


def _of_one_token(number: int) -> RandomSample:
    """A sample of one token, as with ``select: last``. All have the same id, and their number as states."""
    sample = random_sample(f"s{number:02d}", 1, layer_ids=(15,), hidden_size=2)
    return replace(sample, token_ids=np.array([2]), states=np.full((1, 1, 2), number, np.uint16))


def _numbers(batch: dict[str, Any]) -> list[int]:
    return batch["hidden_states"].reshape(-1, 2)[:, 0].view(torch.int16).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("rename", [{}, {"key": "id"}, {"key": None}])
def test_samples_of_equal_ids_are_distinct_if_others_are_skipped(tmp_path: Path, rename: dict[str, Any]) -> None:
    """A part was lost between the state and the resume. Otherwise the resume skips samples that were never given."""
    store_run(open_store(str(tmp_path)), [_of_one_token(i) for i in range(96)], per_part=4)

    def batches() -> TokenBatches:
        data = HiddenStatesDataset(str(tmp_path), on_error="skip", rename=rename)
        return TokenBatches(data, 4, buffer_tokens=32, keep=0)

    first, second = batches(), batches()
    given = [n for batch in islice(first, 4) for n in _numbers(batch)]
    state = json.loads(json.dumps(first.state_dict()))
    min(tmp_path.rglob("*.safetensors")).unlink()
    second.load_state_dict(state)
    given += [n for batch in second for n in _numbers(batch)]
    assert set(given) >= set(range(4, 96)) or rename == {"key": None}  # documented: without keys they are not distinct


def test_documents_of_equal_ids_are_distinct_if_their_order_changes() -> None:
    """A follower reads them in the order of the receipts that it finds, and a resume in another one."""
    store = MemoryStore()
    start_run(store, {"meaning": {"layers": [15]}})
    a = RunWriter(store, name="a")
    writers, waiting = [a, copy(a)], list(range(8))
    writers[1].name = "b"

    def put_one(_: float = 0) -> None:
        if waiting:
            number = waiting.pop(0)
            writers[1 - number % 2].put([whole(_of_one_token(number), number)])
        else:
            a.complete()

    def contexts() -> PackedContexts:
        options = {"poll_seconds": 0, "discover_seconds": 0, "sleep": put_one}
        return PackedContexts(HiddenStatesDataset(Run(store), follow=True, follow_options=options, threads=1), 1, 1)

    first, second = contexts(), contexts()
    given = [n for batch in islice(first, 3) for n in _numbers(batch)]
    state = json.loads(json.dumps(first.state_dict()))
    while waiting:
        put_one()
    second.load_state_dict(state)
    given += [n for batch in second for n in _numbers(batch)]
    assert set(given) == set(range(8))
