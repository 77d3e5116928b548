from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsx_dist.format.manifest import Manifest, Receipt, RowFate, SegmentProof
from hsx_dist.format.names import attempt_name, heartbeat_name, parse_receipt_name, part_name, receipt_name
from hsx_dist.format.segments import SegmentTable
from hsx_dist.page import Segment, token_hash
from hsx_dist.reading.index import Index
from tests.harness.traced_memory import trace_memory
from tests.unit.growth import check_linear


def _receipt(
    attempt: int, seq: int, *segments: Segment, writer: str = "w", rows: tuple[RowFate, ...] = (), tokens: int = 0
) -> Receipt:
    proofs = tuple(
        SegmentProof(s, i, token_hash(np.arange(s.start, s.stop) + tokens), 10, 7, 0) for i, s in enumerate(segments)
    )
    part = part_name(attempt, writer, seq) if segments else None
    return Receipt(attempt, writer, seq, part, 99, "00000000", 9, 10, proofs, rows, "t")


def _whole(key: str, n: int = 5) -> Segment:
    return Segment(key, 0, 0, n, n)


def _fate(key: str, fate: str = "failed") -> RowFate:
    return RowFate(key, 1, fate, "why", 1)  # type: ignore[arg-type]


def test_names() -> None:
    assert attempt_name(1) == "attempts/0001.json"
    assert heartbeat_name(12345) == "attempts/12345.heartbeat.json"
    assert receipt_name(1, "w-1", 2) == "manifest/0001/w-1/000002.json"
    assert part_name(1, "w-1", 2) == "data/part-0001-w-1-000002.safetensors"
    assert parse_receipt_name(receipt_name(3, "a.b", 1234567)) == (3, "a.b", 1234567)
    assert parse_receipt_name("manifest/compacted-0001.jsonl.zst") is None


@pytest.mark.parametrize("writer", ["", "a/b", "..", ".hidden", "a b", "x" * 129, "ä"])
def test_writer_names_that_leave_the_folder_are_refused(writer: str) -> None:
    with pytest.raises(ValueError, match="expected a writer's name"):
        part_name(1, writer, 1)
    with pytest.raises(ValueError, match="expected a number from 1 on"):
        receipt_name(0, "w", 1)


def test_a_sample_exists_when_its_segments_cover_it() -> None:
    first, second, third = Segment("k", 0, 0, 4, 10), Segment("k", 1, 4, 8, 10), Segment("k", 2, 8, 10, 10)
    manifest = Manifest([_receipt(1, 1, third, _whole("other")), _receipt(1, 2, first)])
    assert list(manifest.samples) == ["other"]
    manifest.add(_receipt(1, 1, second, writer="v"))
    sample = manifest.samples["k"]
    assert (sample.num_tokens, sample.attempt, sample.row) == (10, 1, 0)
    assert [(proof.part, proof.segment, proof.slot) for proof in sample.segments] == [
        (part_name(1, "w", 2), first, 0),
        (part_name(1, "v", 1), second, 0),
        (part_name(1, "w", 1), third, 0),
    ]
    assert manifest.conflicts == []


def test_segments_of_two_tries_with_other_tokens_are_never_joined() -> None:
    """Sampled answers differ from try to try: two joined halves would be a sample that never existed."""
    halves = [Segment("k", 0, 0, 5, 10), Segment("k", 1, 5, 10, 10)]

    def proof(half: int, sample: str) -> Receipt:
        r = _receipt(1, 1 + half + 2 * int(sample), halves[half], tokens=100 * int(sample))
        (p,) = r.segments
        return replace(r, segments=(replace(p, sample_hash=sample * 16),))

    manifest = Manifest([proof(1, "0"), proof(0, "1")])
    assert not manifest.samples
    manifest.add(proof(1, "1"))
    assert {p.sample_hash for p in manifest.samples["k"].segments} == {"1" * 16}
    assert [proof.part for proof in manifest.samples["k"].segments] == [part_name(1, "w", 3), part_name(1, "w", 4)]


def test_segments_of_two_attempts_make_no_sample() -> None:
    manifest = Manifest([_receipt(1, 1, Segment("k", 0, 0, 4, 8)), _receipt(2, 1, Segment("k", 1, 4, 8, 8))])
    assert dict(manifest.samples) == {}
    assert set(manifest.parts) == {part_name(1, "w", 1), part_name(2, "w", 1)}


def test_the_highest_attempt_counts_then_the_lowest_part() -> None:
    receipts = [_receipt(1, 1, _whole("k")), _receipt(2, 2, _whole("k")), _receipt(2, 1, _whole("k"), writer="x")]
    assert Manifest(receipts).samples["k"].segments[0].part == part_name(2, "w", 2)
    assert Manifest(receipts).samples["k"].attempt == 2
    assert Manifest(receipts).conflicts == []


def test_an_incomplete_newer_attempt_does_not_hide_an_older_sample() -> None:
    manifest = Manifest([_receipt(1, 1, _whole("k", 8)), _receipt(2, 1, Segment("k", 0, 0, 4, 8))])
    assert manifest.samples["k"].attempt == 1


def test_other_tokens_in_the_same_attempt_are_a_conflict() -> None:
    manifest = Manifest([_receipt(1, 2, _whole("k"), tokens=7), _receipt(1, 1, _whole("k"))])
    assert manifest.samples["k"].segments[0].part == part_name(1, "w", 1)
    [told] = manifest.conflicts
    assert "'k'" in told
    assert part_name(1, "w", 1) in told
    assert part_name(1, "w", 2) in told


def test_other_tokens_in_another_attempt_are_no_conflict() -> None:
    manifest = Manifest([_receipt(1, 1, _whole("k")), _receipt(2, 1, _whole("k", 6), tokens=7)])
    assert manifest.conflicts == []
    assert manifest.samples["k"].num_tokens == 6


def test_a_newer_attempt_settles_a_conflict() -> None:
    manifest = Manifest([_receipt(1, 1, _whole("k")), _receipt(1, 2, _whole("k"), tokens=7)])
    manifest.add(_receipt(2, 1, _whole("k")))
    assert manifest.conflicts == []


def test_runs_of_different_tokens_are_never_joined() -> None:
    a, b = Segment("k", 0, 0, 4, 8), Segment("k", 1, 4, 8, 8)
    manifest = Manifest([_receipt(1, 1, a), _receipt(1, 2, b), _receipt(1, 3, b, tokens=7)])
    assert "k" not in manifest.samples
    assert len(manifest.conflicts) == 1


def test_segments_that_overlap_or_miss_make_no_sample() -> None:
    for pieces in (
        [Segment("k", 0, 0, 4, 8), Segment("k", 1, 3, 8, 8)],
        [Segment("k", 0, 0, 4, 8), Segment("k", 1, 5, 8, 8)],
        [Segment("k", 0, 0, 4, 8), Segment("k", 2, 4, 8, 8)],
        [Segment("k", 1, 4, 8, 8)],
        [Segment("k", 0, 0, 4, 8), Segment("k", 1, 4, 8, 9)],
    ):
        assert dict(Manifest([_receipt(1, 1, *pieces)]).samples) == {}


def test_fates() -> None:
    manifest = Manifest([_receipt(1, 1, rows=(_fate("f"), _fate("g"), _fate("r", "refused")))])
    assert (set(manifest.failed), set(manifest.refused)) == ({"f", "g"}, {"r"})
    manifest.add(_receipt(2, 1, _whole("f")))
    assert set(manifest.failed) == {"g"}
    manifest.add(_receipt(2, 2, rows=(_fate("g", "refused"), _fate("f"))))
    assert (set(manifest.failed), set(manifest.refused)) == (set(), {"r", "g"})


def test_a_lost_part_takes_its_segments_out_of_samples() -> None:
    halves = Segment("k", 0, 0, 4, 8), Segment("k", 1, 4, 8, 8)
    manifest = Manifest([_receipt(1, 1, halves[0], _whole("l")), _receipt(1, 2, halves[1], _whole("m"))])
    manifest.add(_receipt(2, 1, rows=(_fate("k"), _fate("l"))))
    assert (set(manifest.samples), set(manifest.failed)) == ({"k", "l", "m"}, set())
    manifest.add(replace(_receipt(2, 2), void=(part_name(1, "w", 1),)))
    assert (set(manifest.samples), set(manifest.failed)) == ({"m"}, {"k", "l"})
    assert (len(manifest.samples), manifest.parts_of("l"), Index(manifest).keys) == (1, set(), ["m"])
    assert (list(manifest.parts), manifest.stored_bytes, manifest.totals().parts) == ([part_name(1, "w", 2)], 99, 1)
    manifest.add(_receipt(1, 3, halves[0]))
    assert manifest.parts_of("k") == {part_name(1, "w", 2), part_name(1, "w", 3)}
    assert [proof.part for proof in manifest.samples["k"].segments] == [part_name(1, "w", 3), part_name(1, "w", 2)]


def test_adding_again_changes_nothing() -> None:
    receipt = _receipt(1, 1, _whole("k"), rows=(_fate("f"),))
    manifest = Manifest([receipt, receipt, Receipt.from_json(receipt.to_json())])
    assert manifest.receipts == [receipt]
    assert manifest.conflicts == []


def test_contradicting_receipts_are_listed_as_conflicts() -> None:
    manifest = Manifest([_receipt(1, 1, _whole("k")), _receipt(1, 1, _whole("l"))])
    assert manifest.conflicts == ["manifest/0001/w/000001.json: two receipts of this name differ"]


@settings(deadline=None)
@given(st.data())
def test_the_order_of_receipts_does_not_matter(data: st.DataObject) -> None:
    cuts = st.sampled_from([(0, 8), (0, 4, 8), (0, 2, 8), (0, 6)])
    receipts = []
    for seq in range(1, data.draw(st.integers(1, 8)) + 1):
        bounds = data.draw(cuts)
        pieces = [
            Segment(data.draw(st.sampled_from("kl")), i, a, b, bounds[-1])
            for i, (a, b) in enumerate(pairwise(bounds))
            if data.draw(st.booleans())
        ]
        rows = tuple(
            _fate(k, data.draw(st.sampled_from(["failed", "refused"])))
            for k in data.draw(st.sets(st.sampled_from("klm")))
        )
        attempt, tokens = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([0, 0, 0, 5]))
        lost = tuple(r.part for r in receipts if r.part is not None and data.draw(st.integers(0, 5)) == 0)
        receipts.append(replace(_receipt(attempt, seq, *pieces, rows=rows, tokens=tokens), void=lost))
    shuffled = receipts * 2
    random.Random(data.draw(st.integers(0, 9))).shuffle(shuffled)
    one, other = Manifest(receipts), Manifest()
    for receipt in shuffled:
        other.add(receipt)
        for key in data.draw(st.sets(st.sampled_from("klm"))):
            other.samples.get(key)  # a result between receipts is not final
    assert (one.parts, one.void, one.stored_bytes) == (other.parts, other.void, other.stored_bytes)
    assert (one.totals(), Index(one).keys) == (other.totals(), Index(other).keys)
    assert dict(one.samples) == dict(other.samples)
    assert (one.conflicts, dict(one.failed), dict(one.refused)) == (
        other.conflicts,
        dict(other.failed),
        dict(other.refused),
    )
    for sample in one.samples.values():
        bounds = [(p.segment.start, p.segment.stop) for p in sample.segments]
        assert bounds[0][0] == 0
        assert bounds[-1][1] == sample.num_tokens
        assert all(a[1] == b[0] for a, b in pairwise(bounds))


def _leads(segments: set[tuple[int, int, int]], total: int, index: int = 0, start: int = 0) -> bool:
    return start == total or any(
        _leads(segments, total, index + 1, stop) for i, a, stop in segments if (i, a) == (index, start)
    )


@given(st.data())
def test_copies_that_are_cut_at_other_tokens_are_one_sample(data: st.DataObject) -> None:
    """Engines with cache blocks of other sizes cut a row at other tokens. A copy more never hides a sample."""
    total, columns = 12, data.draw(st.integers(1, 2))
    receipts, found = list[Receipt](), [set[tuple[int, int, int]]() for _ in range(columns)]
    manifest = Manifest()
    for seq in range(1, data.draw(st.integers(1, 8)) + 1):
        column = data.draw(st.integers(0, columns - 1))
        bounds = [0, *sorted(data.draw(st.sets(st.integers(1, total - 1), max_size=3))), total]
        pieces = [
            Segment("k", i, a, b, total, column=column, columns=columns)
            for i, (a, b) in enumerate(pairwise(bounds))
            if data.draw(st.integers(0, 3))
        ]
        receipt = _receipt(1, seq, *pieces, writer=data.draw(st.sampled_from("vw")))
        receipt = replace(receipt, segments=tuple(replace(p, sample_hash="0" * 16) for p in receipt.segments))
        receipts.append(receipt)
        manifest.add(receipt)
        found[column] |= {(s.index, s.start, s.stop) for s in pieces}
        assert ("k" in manifest.samples) == all(_leads(segments, total) for segments in found)
    shuffled = data.draw(st.permutations(receipts))
    assert dict(Manifest(shuffled).samples) == dict(manifest.samples)
    assert not manifest.conflicts
    for sample in manifest.samples.values():
        for column in range(columns):
            of = [p.segment for p in sample.segments if p.segment.column == column]
            assert [s.index for s in of] == list(range(len(of)))
            assert [s.start for s in of] == [0, *(s.stop for s in of[:-1])]
            assert of[-1].stop == total


def _half(seq: int, key: str = "k", index: int = 1, attempt: int = 1, sample: str = "") -> Receipt:
    """A receipt of the second of a sample's two or more segments."""
    receipt = _receipt(attempt, seq, Segment(key, index, 4 * index, 4 * index + 4, 1 << 20))
    return replace(receipt, segments=(replace(receipt.segments[0], sample_hash=sample),))


def _cut(seq: int, index: int, start: int, stop: int, sample: str = "0" * 16) -> Receipt:
    """A receipt of a segment, of a sample whose hash is known unless ``sample`` is empty."""
    receipt = _receipt(1, seq, Segment("k", index, start, stop, 1 << 20))
    return replace(receipt, segments=(replace(receipt.segments[0], sample_hash=sample),))


#: Receipts by number, all of one sample. The cost of each must not grow with the number of receipts before it.
ADDED: dict[str, Callable[[int], Receipt]] = {
    "the whole sample and its fate": lambda i: _receipt(1, i, _whole("k"), rows=(_fate("k"),)),
    "another part, and the part before is lost": lambda i: replace(
        _receipt(1, i, _whole("k")), void=(part_name(1, "w", i - 1),) if i > 1 else ()
    ),
    "one segment again": _half,
    "the next segment": lambda i: _half(i, index=i - 1),
    "the segment before": lambda i: _half(i, index=(1 << 15) - i),
    "the segment from 4 on with another end": lambda i: _cut(i, 1, 4, 4 + i),
    "the first segment with another end": lambda i: _cut(i, 0, 0, i),
    "the first segment with another end, of an unknown sample": lambda i: _cut(i, 0, 0, i, sample=""),
    "a segment with another end, of an unknown sample": lambda i: _cut(i, i % 9, 4 * (i % 9), 40 + i, sample=""),
    "the segment before a last one, with another end": lambda i: _cut(i, 1 + i % 2, 4 if i % 2 == 0 else 4 + i, 9 + i),
    "a step of a chain, and next to it another end": lambda i: _cut(i, i // 2, 9 * (i // 2), 9 * (i // 2) + 8 + i % 2),
    "the whole sample of another attempt": lambda i: _receipt(i, 1, _whole("k")),
    "a segment of another attempt": lambda i: _half(i, attempt=i),
    "a segment with other tokens": lambda i: _half(i, sample=f"{i:016x}"),
    "the same segment with other tokens": lambda i: _receipt(1, i, Segment("k", 1, 4, 8, 9), tokens=i),
}


@pytest.mark.parametrize("name", ADDED)
def test_time_grows_with_the_number_of_receipts_and_not_its_square(name: str) -> None:
    """A compacted manifest of 100 KB may hold ten thousand receipts. Reading it must not take an hour."""

    def make(n: int) -> Callable[[], object]:
        receipts = [ADDED[name](i) for i in range(1, n + 1)]

        def read() -> None:
            manifest = Manifest(receipts)
            assert manifest.totals().samples == len(manifest.samples)
            assert len(manifest.failed) + len(manifest.conflicts) <= 1

        return read

    check_linear(make, 256)


class Counting(Manifest):
    """Counts the segments that are read, because the time of a few thousand says little."""

    read = 0

    def _end(self, place: int) -> tuple[int, bytes]:
        self.read += 1
        return super()._end(place)

    def at(self, place: int) -> tuple[str, int, list[int], list[bytes]]:
        self.read += 1
        return super().at(place)


@pytest.mark.parametrize("name", ADDED)
def test_a_segment_is_compared_with_few_others(name: str) -> None:
    manifest = Counting([ADDED[name](i) for i in range(1, 513)])
    assert len(manifest.samples) <= 1
    assert manifest.read <= 8 * 512


@pytest.mark.parametrize("name", ADDED)
def test_asking_for_a_sample_after_each_receipt_adds_each_segment_once(name: str) -> None:
    """Also if the sample is whole and more copies follow, or if the part of each copy is lost before the next one."""
    manifest = Counting()
    for i in range(1, 513):
        manifest.add(ADDED[name](i))
        assert ("k" in manifest.samples) == ("whole" in name or "lost" in name)
    assert manifest.read <= 9 * 512


@pytest.mark.parametrize("name", [name for name in ADDED if "segment" in name])
def test_asking_for_a_sample_after_each_receipt_takes_no_longer_and_longer(name: str) -> None:
    """As a follower of a run does."""

    def make(n: int) -> Callable[[], object]:
        receipts = [ADDED[name](i) for i in range(1, n + 1)]

        def follow() -> None:
            manifest = Manifest()
            for receipt in receipts:
                manifest.add(receipt)
                assert "k" not in manifest.samples

        return follow

    check_linear(make, 256)


def test_places_whose_numbers_have_equal_hashes_take_no_longer() -> None:
    """Python's hash of an integer is the integer modulo 2^61 - 1."""

    def make(n: int) -> Callable[[], object]:
        segments = [Segment("k", i << 20, (1 << 19) - i, 1 << 19, 1 << 19) for i in range(1, n + 1)]
        receipt = _receipt(1, 1, *segments)
        return lambda: Manifest([receipt]).samples.get("k")

    check_linear(make, 4096)


@pytest.mark.traced
def test_segments_of_one_key_take_little_memory() -> None:
    """A compacted manifest of a megabyte may have half a million of them."""
    n = 20_000
    made = Receipt(1, "w", 1, "p", 9, "0" * 8, 9, 10, [], (), "t")
    numbers = [(i, i, i + 1, n, 0, 0, -1, 0, 1) for i in range(n)]
    object.__setattr__(made, "segments", SegmentTable(["k"] * n, numbers, [("0" * 16, "", "")] * n))
    trace_memory()
    index = Index(Manifest([made]))
    peak = tracemalloc.get_traced_memory()[1]
    assert index.keys == ["k"]
    assert peak / n < 700


@pytest.mark.parametrize("receipts", [16, 17, 64])
def test_a_segment_of_many_keys_is_compared_with_few_others(receipts: int) -> None:
    """Asked for each key after each receipt, as a follower does."""
    manifest = Counting()
    for i in range(1, receipts + 1):
        manifest.add(_receipt(1, i, *(Segment(f"{k}", i, i, i + 1, 1 << 20) for k in range(32))))
        assert not any(f"{k}" in manifest.samples for k in range(32))
    assert manifest.read <= 10 * 32 * receipts


@pytest.mark.traced
@pytest.mark.parametrize("each", [2, 17])
def test_keys_that_a_follower_looks_up_take_little_memory(each: int) -> None:
    """A compacted manifest of a megabyte may have two hundred thousand segments. Each key has a few of them, and each
    segment another number of tokens. Without the index of keys and the receipt."""
    n = 200 * 17
    made = Receipt(1, "w", 1, "p", 9, "0" * 8, 9, 10, [], (), "t")
    numbers = [(0, 0, 1, 2 + i % each, 0, 0, -1, 0, 1) for i in range(n)]
    keys = [f"{i // each}" for i in range(n)]
    object.__setattr__(made, "segments", SegmentTable(keys, numbers, [("0" * 16, "", "")] * n))
    trace_memory()
    manifest = Manifest([made])
    assert not any(map(manifest.samples.get, keys))
    held = tracemalloc.get_traced_memory()[0]
    assert held / n < {2: 400, 17: 860}[each]


def test_conflicts_are_listed_up_to_a_limit() -> None:
    """Each sentence has some parts, whose names may have 1,000 characters, and a key of any length."""
    long = "x" * 900
    keys = [_whole(f"{long}{i:05d}") for i in range(2000)]
    made = [replace(_receipt(1, seq, *keys, tokens=seq), part=f"{long}{seq}") for seq in range(1, 8)]
    manifest = Manifest(made)
    found = manifest.conflicts
    assert (manifest.num_conflicts, len(found), found[-1]) == (2000, 1001, "1000 more conflicts, which are not listed")
    assert found[0].count(", ") == 4
    assert max(map(len, found)) < 1500
