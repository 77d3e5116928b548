"""Every reader can read a run that ``hsx verify`` calls sound. Verify names the damage of each flipped bit."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hsx_dist.errors import FormatError, IntegrityError
from hsx_dist.format import container_write, manifest
from hsx_dist.format.codecs import NoneCodec, ZstdCodec
from hsx_dist.format.container import Part
from hsx_dist.format.manifest import Receipt, RowFate
from hsx_dist.format.names import complete_name
from hsx_dist.format.place import start_run
from hsx_dist.format.receipt_log import ReceiptLog
from hsx_dist.format.runs import load_manifest, read_complete, take_attempt, write_complete
from hsx_dist.page import Segment, token_hash
from hsx_dist.reading import Run, verify, verify_report
from hsx_dist.reading.verify import verify_run
from hsx_dist.testing.faulty_stores import CountingStore
from hsx_dist.testing.samples import RandomSample, random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import RunWriter, Stored, store_run, whole
from tests.harness.traced_memory import trace_memory

IDS = np.arange(20)


def sample(**facts: Any) -> RandomSample:
    made = random_sample("a", 20, **{"layer_ids": (3,), "hidden_size": 8, "odd": False, **facts})
    return replace(made, token_ids=IDS)


SAMPLE = sample()
WHOLE = replace(SAMPLE.segments()[0], sample_hash=token_hash(IDS))
FIRST, SECOND = (replace(s, sample_hash=token_hash(IDS)) for s in SAMPLE.segments(8))
OTHER = replace(SAMPLE, token_ids=IDS[::-1].copy())


def of(segment: Segment, column: int, point: str, shards: int = 1, shard: int = 0) -> Segment:
    return replace(segment, column=column, columns=2, point=point, shard=shard, shards=shards)


BROKEN: dict[str, list[list[Stored]]] = {
    "dtype": [[(SAMPLE, FIRST, 0)], [(sample(dtype="float16"), SECOND, 0)]],
    "width": [[(SAMPLE, FIRST, 0)], [(sample(hidden_size=16), SECOND, 0)]],
    "layers": [[(SAMPLE, FIRST, 0)], [(sample(layer_ids=(4,)), SECOND, 0)]],
    "a layer is missing": [[(sample(layer_ids=(3, 4)), FIRST, 0)], [(SAMPLE, SECOND, 0)]],
    "point": [
        [(SAMPLE, of(FIRST, 0, "q"), 0), (SAMPLE, of(FIRST, 1, "k"), 0)],
        [(SAMPLE, of(SECOND, 0, "q"), 0), (SAMPLE, of(SECOND, 1, "v"), 0)],
    ],
    "shards swapped": [
        [(SAMPLE, of(FIRST, 0, "q", 2, 0), 0), (SAMPLE, of(FIRST, 1, "q", 2, 1), 0)],
        [(SAMPLE, of(SECOND, 0, "q", 2, 1), 0), (SAMPLE, of(SECOND, 1, "q", 2, 0), 0)],
    ],
    "ids of a shard": [[(SAMPLE, of(WHOLE, 0, "q", 2, 0), 0), (OTHER, of(WHOLE, 1, "q", 2, 1), 0)]],
}
#: Faults that no reader of one point, or of one segment, can detect.
ONLY_VERIFY: dict[str, list[list[Stored]]] = {
    "ids of a point": [[(SAMPLE, of(WHOLE, 0, "q"), 0), (OTHER, of(WHOLE, 1, "k"), 0)]],
    "hash of the sample": [[(SAMPLE, replace(WHOLE, sample_hash="0" * 16), 0)]],
    "hash of segments": [[(SAMPLE, replace(s, sample_hash="0" * 16), 0) for s in (FIRST, SECOND)]],
}


def run_of(parts: Sequence[Sequence[Stored]], attached: Any = None) -> Run:
    store = MemoryStore()
    start_run(store, {"meaning": {}, "settings": {}})
    writer = RunWriter(store, attached=attached)
    for part in parts:
        writer.put(part)
    writer.complete()
    return Run(store)


@pytest.mark.parametrize("parts", [*BROKEN.values(), *ONLY_VERIFY.values()], ids=[*BROKEN, *ONLY_VERIFY])
def test_segments_that_are_not_one_sample_are_named(parts: list[list[Stored]]) -> None:
    run = run_of(parts)
    assert run.keys() == ["a"]
    [problem] = verify_run(run.place.root).problems
    assert problem.part.startswith("data/")
    assert "'a'" in problem.message or "a:" in problem.message


@pytest.mark.parametrize("parts", BROKEN.values(), ids=BROKEN)
def test_readers_refuse_segments_that_are_not_one_sample(parts: list[list[Stored]]) -> None:
    sample = run_of(parts)["a"]
    columns = parts[0][0][1].columns
    with pytest.raises(FormatError) as e:
        [sample.load(points=[name]) for name in (["q", "k"] if columns > 1 else ["hidden_states"])]
    assert len(str(e.value)) < 600


def test_a_run_that_becomes_complete_while_it_is_verified_is_sound() -> None:
    root = MemoryStore()
    start_run(root, {"meaning": {}, "settings": {}})
    writer = RunWriter(root)
    writer.put([(SAMPLE, WHOLE, 0)])

    def complete(*_: Any) -> None:
        writer.put([whole(random_sample("later", 4), 1)])
        writer.complete()

    report = verify_run(root, on_part=complete)
    assert report.problems == []
    assert report.samples == 1


def test_a_missing_part_is_named_for_each_share_of_checked_parts() -> None:
    store = MemoryStore()
    store_run(store, [random_sample(f"s{i}", 2) for i in range(12)], per_part=1)
    parts = Run(store).place.store
    gone = next(info.name for info in parts.list("data/"))
    parts.delete(gone)
    for seed in range(4):
        assert [p.part for p in verify_run(store, sample=0.1, seed=seed).problems] == [gone]


@pytest.mark.traced
def test_verify_takes_the_memory_of_one_chunk() -> None:
    wide = sample(hidden_size=1 << 18)  # one chunk of 10 MiB
    wide = replace(wide, states=np.zeros_like(wide.states), chunk_tokens=20)
    store = MemoryStore()
    store_run(store, [wide], codec=ZstdCodec())
    trace_memory()
    report = verify_run(store)
    peak = tracemalloc.get_traced_memory()[1]
    assert (report.problems, report.all_zero) == ([], 1)
    assert peak < 1.5 * wide.states.nbytes


def test_each_header_is_read_few_times_if_samples_have_segments_in_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [replace(sample(), key=f"s{i}") for i in range(6)]
    pieces = [[(s, piece, 0) for piece in s.segments(*range(2, 20, 2))] for s in samples]
    run = run_of([list(part) for part in zip(*pieces, strict=True)])
    opened: list[str] = []
    real = Part.open.__func__  # type: ignore[attr-defined]
    counted = classmethod(lambda cls, store, name, **facts: opened.append(name) or real(cls, store, name, **facts))
    monkeypatch.setattr(Part, "open", counted)
    assert verify_run(run.place.root).ok
    assert len(set(opened)) == 10
    assert len(opened) <= 2 * 10


def test_messages_do_not_repeat_the_metadata_of_a_hostile_part() -> None:
    long = replace(SECOND, meta={"metadata": {"x": "y" * 1_000_000}})
    run = run_of([[(SAMPLE, FIRST, 0)], [(sample(dtype="float16"), long, 0)]])
    with pytest.raises(FormatError, match=r"expected segments of segment 0 of 'a', tokens \[0, 8\) of 20") as e:
        run["a"].load()
    assert len(str(e.value)) < 600


@pytest.mark.parametrize("shape", [(7,), (20, 2), ()])
def test_a_loss_mask_of_another_shape_is_named(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container_write, "_check_attached", lambda _, attached: dict(attached or {}))
    run = run_of([[(SAMPLE, WHOLE, 0)]], attached={"loss_mask": np.ones(shape, np.uint8)})
    with pytest.raises(FormatError, match="expected a loss mask of 20 tokens"):
        run["a"].load()
    [problem] = verify_run(run.place.root).problems
    assert "expected a loss mask of 20 tokens" in problem.message


def test_a_loss_mask_is_0_or_1_for_any_attached_numbers() -> None:
    weights = np.where(IDS % 2, 0.5, 0.0)
    weights[4] = np.nan
    loaded = run_of([[(SAMPLE, WHOLE, 0)]], attached={"loss_mask": weights})["a"].load(framework="numpy")
    assert loaded["loss_mask"].tolist() == [int(i % 2 == 1 or i == 4) for i in IDS]


def test_a_mean_has_the_hash_of_the_requests_ids() -> None:
    mean = replace(SAMPLE, token_ids=np.array([-1]), states=SAMPLE.states[:1], dtype="bfloat16")
    segment = replace(mean.segments()[0], sample_hash=token_hash(IDS), meta={"tokens": {"mean": True, "of": 20}})
    assert verify_run(run_of([[(mean, segment, 0)]]).place.root).ok


@pytest.mark.parametrize("name", ["run.json", "complete"])
def test_every_flipped_bit_of_a_description_is_detected(name: str) -> None:
    store = MemoryStore()
    place = store_run(store, [sample()]).place
    name = name if name == "run.json" else f"{place.folder}/{complete_name(1)}"
    before, objects = read(store), dict(store.objects)
    for bit in range(8 * len(objects[name])):
        damaged = bytearray(objects[name])
        damaged[bit // 8] ^= 1 << bit % 8
        store.objects = {**objects, name: bytes(damaged)}
        try:
            found = read(store)
        except FormatError:
            continue
        # The flipped bit is in the checksum's name: nothing else may differ.
        assert all({**now, **then} == now for now, then in zip(found, before, strict=True)), damaged
    store.objects = {**objects, name: objects[name].replace(b"hsx", b"hsy", 1)}
    assert not verify_run(store).ok


def read(store: MemoryStore) -> list[dict[str, Any]]:
    run = Run(store)
    return [{"keys": run.keys(), "complete": run.complete}, run.info, read_complete(run.store) or {}]


def test_a_description_without_a_checksum_is_read_and_a_changed_id_is_named() -> None:
    store = MemoryStore()
    place = store_run(store, [sample()]).place
    lines = store.objects["run.json"].decode().splitlines()
    plain = "\n".join(line for line in lines if "crc32c" not in line).replace("},\n}", "}\n}")
    store.objects["run.json"] = plain.encode()
    assert verify_run(store).ok
    assert Run(store).keys() == ["a"]
    store.objects["run.json"] = plain.replace(place.id, "0" * 16).encode()
    [problem] = verify_run(store).problems
    assert f"but objects in run-{place.id}/ that nothing names" in problem.message


def test_a_checksum_that_does_not_match_is_a_typed_error() -> None:
    store = MemoryStore()
    store_run(store, [sample()])
    store.objects["run.json"] = store.objects["run.json"].replace(b"tiny", b"tine")
    with pytest.raises(IntegrityError, match=r"run\.json: expected crc32c .*: the object changed\. Restore it"):
        Run(store)


@pytest.mark.parametrize("layers", [[3, 4], [4], []], ids=["more", "another", "none"])
def test_a_part_with_other_layers_than_the_run_lists_is_named(layers: list[int]) -> None:
    store = MemoryStore()
    store_run(store, [SAMPLE], info={"meaning": {"layers": layers}})
    problems = [p for p in verify_run(store).problems if "layers of run.json" in p.message]
    assert len(problems) == (1 if layers else 0)
    if problems:
        assert "only one of the two has layer" in problems[0].message
        assert problems[0].part.startswith("data/")


@pytest.mark.traced
def test_receipts_of_a_complete_run_are_in_memory_once() -> None:
    def row(i: int) -> RowFate:
        return RowFate(f"row-{i}", i, "failed", "", 0)

    def receipt(rows: Iterable[RowFate]) -> Receipt:
        return Receipt(1, "driver", 1, None, 0, "00000000", 0, 0, (), tuple(rows), "")

    store = MemoryStore()
    place = start_run(store, {"meaning": {"model": "tiny", "layers": []}, "settings": {}})
    take_attempt(place.store, {})
    first = ReceiptLog(place.store, 1, "driver")
    for k in range(8):
        first.append(receipt(row(1000 * k + i) for i in range(1000)))
    write_complete(place.store, 1, load_manifest(place.store), {})
    take_attempt(place.store, {})
    ReceiptLog(place.store, 2, "driver").append(receipt([row(9999)]))
    trace_memory()
    held = load_manifest(place.store)
    once = tracemalloc.get_traced_memory()[0]
    assert len(held.failed) == 8001
    del held
    gc.collect()  # a manifest refers to itself
    tracemalloc.reset_peak()
    report = verify_run(store)
    peak = tracemalloc.get_traced_memory()[1]
    assert report.problems == []
    assert peak < 1.6 * once


def test_verify_fetches_and_parses_the_compacted_manifest_once() -> None:
    fetched = []

    class Named(MemoryStore):
        def get(self, name: str, most: int | None = None) -> bytes:
            fetched.append(name)
            return super().get(name, most)

    store = Named()
    store_run(store, [sample()])
    fetched.clear()
    assert verify_run(store).problems == []
    assert sum("compacted" in name for name in fetched) == 1


def test_few_requests_read_a_part_whose_states_are_stored_in_another_order_than_its_segments() -> None:
    narrow = sample()
    wide = replace(random_sample("b", 200, dtype="float32", hidden_size=1, odd=False), chunk_tokens=1)
    store = CountingStore(MemoryStore())
    store_run(store, [narrow, wide, replace(narrow, key="c")], codec=NoneCodec(), info={"meaning": {}})
    before = store.calls["get_ranges"]
    assert verify_run(store).ok
    assert store.calls["get_ranges"] - before < 5


def test_a_report_lists_a_limited_number_of_short_problems_and_counts_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verify_report, "MOST_PROBLEMS", 50)
    store = MemoryStore()
    named = [replace(sample(), key=f"{i}{'k' * 1000}") for i in range(3 * 21)]
    store_run(store, named, per_part=21, info={"meaning": {"layers": [4]}})
    seen = dict[str, int]()
    report = verify_run(store, on_part=lambda part, problems: seen.update({part: len(problems)}))
    assert (len(report.problems), report.unlisted, report.ok) == (50, 13, False)
    assert list(seen.values()) == [20, 20, 20]
    assert max(len(problem.message) for problem in report.problems) < 200


def test_a_report_counts_conflicts_that_the_manifest_does_not_list(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (manifest, verify):
        monkeypatch.setattr(module, "MOST_CONFLICTS", 2)
    store = MemoryStore()
    start_run(store, {"meaning": {}, "settings": {}})
    writer = RunWriter(store)
    for made in (SAMPLE, OTHER):
        named = [replace(made, key=f"s{i}") for i in range(5)]
        writer.put([(s, s.segments()[0], 0) for s in named])
    report = verify_run(store)
    assert (len(report.problems), report.unlisted) == (2, 3)
    assert all("with different tokens" in problem.message for problem in report.problems)


@pytest.mark.parametrize("lost", [set(), {0}, {2}, {3}])
@pytest.mark.parametrize("writers", ["ww", "vw", "wv"])
def test_a_row_that_got_other_tokens_when_it_was_computed_again_is_no_conflict(lost: set[int], writers: str) -> None:
    """A replica that died may have shipped some or all of the row's segments."""
    copies = [replace(random_sample("a", n, dtype="float32"), token_ids=np.arange(n) + n) for n in (20, 24)]
    store = MemoryStore()
    start_run(store, {"meaning": {}, "settings": {}})
    made = {name: RunWriter(store, name=name, attempt=1) for name in writers}
    take_attempt(made["w"].store, {})
    stored = [(copy, s, name) for copy, name in zip(copies, writers, strict=True) for s in copy.segments(8, 16)]
    for copy, segment, name in (pair for n, pair in enumerate(stored) if n not in lost):
        made[name].put([(copy, replace(segment, sample_hash=token_hash(copy.token_ids)), 0)])
    report = verify_run(store)
    assert report.ok, report.problems
    loaded = Run(store)["a"].load()
    [chosen] = [copy for copy in copies if len(copy.token_ids) == len(loaded["token_ids"])]
    assert copies.index(chosen) == (min(lost) < 3 if lost else writers == "wv")
    assert loaded["token_ids"].tolist() == chosen.token_ids.tolist()
    assert loaded["hidden_states"].numpy().tobytes() == chosen.states.tobytes()
    again = load_manifest(made["w"].store)
    again._conflicts.add("as an earlier version counted")
    write_complete(made["w"].store, 1, again, {})
    assert verify_run(store).ok
