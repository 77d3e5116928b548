"""``docs/receipts.md``: its reader finds the same samples as this package, and it names all fields of receipts."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np

import hsx_dist
from hsx_dist.format.manifest import Manifest, Receipt, RowFate, SegmentProof
from hsx_dist.format.names import part_name, receipt_name
from hsx_dist.format.place import open_place
from hsx_dist.format.receipt import Fate
from hsx_dist.format.runs import load_manifest
from hsx_dist.page import Segment, token_hash
from hsx_dist.store import open_store
from hsx_dist.testing.samples import random_sample
from tests.harness.runs import RunWriter, store_run, whole, write_v1_run

PAGE = (Path(hsx_dist.__file__).parents[1] / "docs" / "receipts.md").read_text()


#: By key: the input row, and (part, slot, start, stop) of each segment.
Found = dict[str, tuple[int | None, list[tuple[Any, ...]]]]


def program() -> dict[str, Any]:
    """Return the functions of the page's program."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    return namespace


def read_run(folder: Path) -> Found:
    return program()["read_run"](folder)


def ours(folder: Path) -> Found:
    return found_in(load_manifest(open_place(open_store(str(folder))).store))


def found_in(manifest: Manifest) -> Found:
    return {
        key: (s.row, [(p.part, p.slot, p.segment.start, p.segment.stop) for p in s.segments])
        for key, s in manifest.samples.items()
    }


def test_a_run_of_whole_samples(tmp_path: Path):
    store_run(open_store(str(tmp_path)), [random_sample(f"k{i}", 10 + i) for i in range(9)])
    found = read_run(tmp_path)
    assert len(found) == 9
    assert found == ours(tmp_path)


def test_segments_in_several_parts_and_attempts(tmp_path: Path):
    store = open_store(str(tmp_path))
    write_v1_run(store, {"meaning": {}, "settings": {}})
    long, other, half, late = (
        random_sample(key, 64, seed=i) for i, key in enumerate(("long", "other", "half", "late"))
    )
    one, two, three = long.segments(16, 48)
    first = RunWriter(store)
    first.put([(long, two, 0), whole(other, 1), (half, half.segments(32)[0], 2)])
    first.put([(long, three, 0)])
    first.put([(long, one, 0), (long, two, 0)], [RowFate("none", 7, "refused", "too long", 1)])
    second = RunWriter(store, name="v")
    second.put([whole(other, 1), (late, late.segments(32)[1], 3)])
    second.put([(late, late.segments(32)[0], 3)])
    found = read_run(tmp_path)
    assert set(found) == {"long", "other", "late"}
    assert found == ours(tmp_path)
    assert [len(places) for _, places in found.values()] == [3, 1, 2]


def test_copies_that_are_cut_at_other_tokens(tmp_path: Path):
    store = open_store(str(tmp_path))
    write_v1_run(store, {"meaning": {}, "settings": {}})
    sample = random_sample("k", 40)
    for name, cuts, stored in (("v", (16, 32), (0, 1)), ("w", (24,), (0,)), ("x", (16, 24, 30), (2, 1, 0, 3))):
        writer = RunWriter(store, name=name)
        segments = [replace(s, sample_hash=token_hash(sample.token_ids)) for s in sample.segments(*cuts)]
        writer.put([(sample, segments[i], 0) for i in stored])
    assert read_run(tmp_path) == ours(tmp_path)
    assert [place[2:] for place in read_run(tmp_path)["k"][1]] == [(0, 16), (16, 24), (24, 30), (30, 40)]


def random_receipts(rng: random.Random) -> list[Receipt]:
    """Make receipts that do not contradict each other. Rows are computed twice, cut at other tokens, and lost."""
    receipts, parts = list[Receipt](), list[str]()
    for attempt, writer, seq in product(range(1, rng.randint(2, 4)), ("a", "b", "c"), range(1, rng.randint(2, 4))):
        name, proofs = part_name(attempt, writer, seq), dict[tuple[str, int, int], SegmentProof]()
        for _ in range(rng.randint(1, 4)):
            key, total, columns = rng.choice([("one", 6, 1), ("two", 6, 2)])
            ends = [0, *sorted(rng.sample(range(1, total), rng.randint(0, 2))), total]
            index, column = rng.randrange(len(ends) - 1), rng.randrange(columns)
            span = ends[index], ends[index + 1]
            sample = token_hash(np.array([attempt, rng.randint(0, 1), *key.encode()]))
            tokens = token_hash(np.array([*span, *sample.encode()]))
            segment = Segment(key, index, *span, total, column=column, columns=columns)
            # A part has each segment once.
            proofs.setdefault(
                (key, column, index), SegmentProof(segment, len(proofs), tokens, 10, 10, rng.randint(0, 5), sample)
            )
        parts.append(name)
        void = (rng.choice(parts),) if rng.random() < 0.1 else ()
        sizes = 100, "00000000", 8, 10 * len(proofs)
        receipts.append(Receipt(attempt, writer, seq, name, *sizes, tuple(proofs.values()), (), "now", void))
    return receipts


def test_the_program_finds_the_samples_of_random_receipts():
    page, several, count = program(), 0, 0
    for seed in range(300):
        receipts = random_receipts(random.Random(seed))
        page["read_receipts"] = lambda _, receipts=receipts: (json.loads(r.to_json())["receipt"] for r in receipts)
        found = page["read_run"](None)
        assert found == found_in(Manifest(receipts)), f"seed {seed}"
        count += len(found)
        several += sum(len(places) > 1 for _, places in found.values())
    assert (count, several) > (200, 50)


def test_of_two_computations_the_one_with_the_lower_part_counts(tmp_path: Path):
    samples = [random_sample("k", 10, seed=seed) for seed in (0, 1)]
    for at, order in enumerate((samples, samples[::-1])):
        store = open_store(str(tmp_path / str(at)))
        write_v1_run(store, {"meaning": {}, "settings": {}})
        writer = RunWriter(store)
        for sample in order:
            writer.put([(sample, replace(sample.segments()[0], sample_hash=token_hash(sample.token_ids)), 0)])
        assert read_run(tmp_path / str(at))["k"][1][0][0] == part_name(1, "w", 1)
        assert read_run(tmp_path / str(at)) == ours(tmp_path / str(at))


def test_the_page_names_every_member_column_and_fate():
    body = json.loads(Receipt(1, "w", 1, None, 0, "00000000", 0, 0, (), (), "now", ("p",)).to_json())["receipt"]
    names = [*body, *body["segment_columns"], *body["row_columns"], *get_args(Fate)]
    assert [name for name in names if f"`{name}`" not in PAGE] == []
    assert f"`{body['format']}`" in PAGE


def test_columns_in_several_parts_and_attempts(tmp_path: Path):
    store = open_store(str(tmp_path))
    write_v1_run(store, {"meaning": {}, "settings": {}})
    samples = {key: random_sample(key, 20, seed=i) for i, key in enumerate(("whole", "half", "late"))}
    columns = {
        key: [
            (sample, replace(s, column=i, columns=2, point="q", shard=i, shards=2, sample_hash=token_hash(ids)), n)
            for i in range(2)
            for s in (sample.segments() if i else sample.segments(8))
        ]
        for n, (key, sample) in enumerate(samples.items())
        for ids in (sample.token_ids,)
    }
    first = RunWriter(store)
    first.put([*columns["whole"][1:], columns["half"][2], *columns["late"][:2]])
    first.put([columns["whole"][0], columns["half"][0]])
    second = RunWriter(store, name="v")
    second.put([columns["late"][2]])
    second.put(columns["late"][1::-1])
    found = read_run(tmp_path)
    assert set(found) == {"whole", "late"}
    assert found == ours(tmp_path)
    assert [place[2:] for place in found["whole"][1]] == [(0, 8), (8, 20), (0, 20)]


def test_a_seal_whose_number_has_more_digits_ends_no_earlier_receipts(tmp_path: Path):
    store = open_store(str(tmp_path))
    write_v1_run(store, {"meaning": {}, "settings": {}})
    writer = RunWriter(store)
    writer.seq = 999_998
    writer.put([whole(random_sample("a"), 0)])
    store.put(receipt_name(1, "w", 1_000_000), [b'{"seal":{}}'])
    assert set(read_run(tmp_path)) == {"a"}
