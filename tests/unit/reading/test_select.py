"""Selection of a run's samples, and the index in columns compared with the manifest, which decides."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsx_dist import HiddenStatesDataset, HiddenStatesMapDataset, open_run
from hsx_dist.errors import ConfigError, SampleNotFound
from hsx_dist.format.manifest import Receipt, RowFate, SegmentProof
from hsx_dist.format.names import part_name, receipt_name
from hsx_dist.format.place import start_run
from hsx_dist.format.runs import load_manifest, take_attempt, write_complete
from hsx_dist.page import Segment
from hsx_dist.reading import Run
from hsx_dist.reading.index import Index
from hsx_dist.store import open_store
from hsx_dist.testing.samples import random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import RunWriter, store_run, whole, write_v1_run

_SEGMENT = st.tuples(st.sampled_from("abcd"), st.sampled_from([(0, 0, 4), (0, 0, 2), (1, 2, 4)]), st.integers(0, 2))
_RECEIPT = st.tuples(
    st.integers(1, 2),
    st.sampled_from("vw"),
    st.lists(_SEGMENT, max_size=4, unique_by=lambda s: (s[0], s[1])),
    st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from(["refused", "failed", "withdrawn"])), max_size=2),
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(_RECEIPT, max_size=6), st.booleans())
def test_the_index_says_what_the_manifest_says(receipts: list[tuple], complete: bool) -> None:
    store = MemoryStore()
    write_v1_run(store, {})
    attempts = [take_attempt(store, {}) for _ in range(2)]
    numbers: dict[tuple[int, str], int] = {}
    for attempt, writer, segments, fates in receipts:
        seq = numbers[attempt, writer] = numbers.get((attempt, writer), 0) + 1
        proofs = tuple(
            SegmentProof(Segment(key, i, a, b, 4), slot, f"{b:016x}", 8, 6, ord(key) - 97, f"{number:016x}")
            for slot, (key, (i, a, b), number) in enumerate(segments)
        )
        rows = tuple(RowFate(key, None, fate, "why", 1) for key, fate in fates)
        part = part_name(attempt, writer, seq) if proofs else None
        sizes = (100, "00000000", 50, 80) if proofs else (0, "00000000", 0, 0)
        receipt = Receipt(attempt, writer, seq, part, *sizes, proofs, rows, "2026")
        store.put(receipt_name(attempt, writer, seq), [receipt.to_json()])
    if complete:
        write_complete(store, attempts[-1], load_manifest(store), {})
    run, manifest = Run(store), load_manifest(store)
    assert sorted(run.keys()) == sorted(manifest.samples)
    assert run.keys() == sorted(manifest.samples, key=lambda k: (manifest.samples[k].row, k))
    for i, key in enumerate(run.keys()):
        record, found = manifest.samples[key], run.index[i]
        segments = tuple(replace(proof, sample_hash="") for proof in record.segments)
        kept = tuple(replace(proof, sample_hash="") for proof in found.segments)
        assert (replace(found, segments=()), kept) == (replace(record, segments=()), segments)
    assert (run.refused, run.failed) == (dict(manifest.refused), dict(manifest.failed))
    parts = sorted(manifest.parts)
    stored = set(parts[::2])
    inside = {key for key, record in manifest.samples.items() if {proof.part for proof in record.segments} <= stored}
    assert {run.keys()[i] for i in np.flatnonzero(run.index.stored_in(stored))} == inside
    assert run.index.conflicts == manifest.conflicts
    assert pickle.loads(pickle.dumps(run.index)).keys == run.keys()
    for start, step in ((0, 1), (0, 2), (1, 2), (1, 3)):
        places = np.arange(len(run))[start::step]
        few = run.index.only(places)
        assert [few[i] for i in range(len(few))] == [run.index[int(i)] for i in places]
        assert few.parts_in_use() <= run.index.parts_in_use()
        assert {few.keys[i] for i in np.flatnonzero(few.stored_in(stored))} == inside & set(few.keys)
        for name, receipt in few.parts_by_name.items():
            assert replace(receipt, rows=()) == replace(run.index.parts_by_name[name], rows=(), void=())
            assert few.tokens_in[name] == run.index.tokens_in[name]
        named = [few.parts[i].id for i in few.group_of]
        assert named == [run.index.parts[i].id for i in run.index.group_of[places]]


def test_samples_are_selected_by_key_length_split_and_metadata(tmp_path: Path) -> None:
    samples = [random_sample(f"k{i:03d}", 3 + i % 10, seed=i) for i in range(200)]
    store = open_store(str(tmp_path / "run"))
    store_run(
        store, samples, per_part=50, attached=lambda s: {"loss_mask": np.arange(len(s.token_ids)) < int(s.key[1:]) % 4}
    )
    run = open_run(store.url)
    assert run.select(keys=["k007", "k003"]).keys() == ["k003", "k007"]
    assert {len(s.token_ids()) for s in run.select(min_tokens=5, max_tokens=6)} == {5, 6}
    train, val = (run.select(split=s, val_fraction=0.2).keys() for s in ("train", "val"))
    assert sorted([*train, *val]) == run.keys()
    assert 20 <= len(val) <= 60
    store_run(open_store(str(tmp_path / "half")), samples[:100])
    assert set(open_run(str(tmp_path / "half")).select(split="val", val_fraction=0.2).keys()) <= set(val)
    assert run.select(min_loss_tokens=3).keys() == [f"k{i:03d}" for i in range(200) if i % 4 == 3]
    assert len(run.select(where=lambda meta: "finish_reason" in meta)) == 0
    assert len(run.select(where=lambda meta: not meta, max_tokens=3)) == 20
    assert run.select(max_tokens=3)[1:3].keys() == ["k010", "k020"]
    with pytest.raises(SampleNotFound, match="nobody"):
        run.select(keys=["nobody"])
    wrong: Any
    for wrong in (5, "k007", [7], [["k007"]]):
        with pytest.raises(ConfigError, match=r"^keys: expected"):
            run.select(keys=wrong)
    for wrong in ({"split": "test"}, {"split": "val", "val_fraction": 2.0}, {"keys": "k001"}):
        with pytest.raises(ConfigError):
            run.select(**wrong)


def test_selections_by_position_keep_their_samples_when_the_run_grows(tmp_path: Path) -> None:
    samples = [random_sample(f"s{i}", 5 + i, seed=i) for i in range(12)]
    store = open_store(str(tmp_path))
    start_run(store, {"meaning": {"layers": [2, 15, 30]}})
    writer = RunWriter(store)
    writer.put([whole(samples[i], i) for i in (1, 3, 5, 7, 9)])
    run = open_run(store.url)
    before = {s.key for s in run}
    one, val = run.select(keys=["s5"]), run.select(split="val", val_fraction=0.5)
    expected = val.keys(), val.lengths.tolist()
    plain, by_position = HiddenStatesDataset(run, framework="numpy"), HiddenStatesMapDataset(run, framework="numpy")
    iterating, under_way = iter(run), iter(HiddenStatesDataset(run, framework="numpy", prefetch_bytes=1, threads=1))
    seen = [next(iterating).key], [next(under_way)["key"]]
    writer.put([whole(samples[i], i) for i in (0, 2, 4, 6)])
    run.refresh()
    assert len(run) == 9
    assert [s.key for s in one] == ["s5"] == one[:1].keys()
    assert ([s.key for s in val], val.lengths.tolist()) == expected == (val.keys(), [s.num_tokens for s in val])
    assert {item["key"] for item in plain} == before == {by_position[i]["key"] for i in range(len(by_position))}
    assert {*seen[0], *(s.key for s in iterating)} == before == {*seen[1], *(item["key"] for item in under_way)}
    assert sorted(plain.run.keys()) == sorted(s.key for s in run)


def test_a_key_gives_its_own_sample_while_another_thread_refreshes(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    start_run(store, {"meaning": {"layers": [2, 15, 30]}})
    writer = RunWriter(store)
    writer.put([whole(random_sample("z", 5), 9)])
    run = Run(store)
    found = Index.place

    def refreshed_meanwhile(index: Index, key: str) -> int | None:
        place = found(index, key)
        if len(run) == 1:
            writer.put([whole(random_sample("a", 3), 1)])
            run.refresh()
        return place

    monkeypatch.setattr(Index, "place", refreshed_meanwhile)
    assert run["z"].load()["key"] == "z"
    assert run.select(keys=["z"]).keys() == ["z"]
