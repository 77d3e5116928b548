"""Which columns make a sample: all columns of one attempt, if they agree on the sample's facts."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from hsx_dist.format.compacted import pack_receipts
from hsx_dist.format.manifest import Manifest, Receipt, SegmentProof
from hsx_dist.format.names import part_name
from hsx_dist.page import Segment
from hsx_dist.reading.index import Index
from tests.harness.traced_memory import trace_memory

#: Columns 0 and 2 in one segment, column 1 in three.
CUTS: tuple[tuple[int, ...], ...] = ((0, 10), (0, 3, 6, 10), (0, 10))


def proof(segment: Segment, sample: str = "a" * 16) -> SegmentProof:
    return SegmentProof(segment, 0, f"{segment.start:08x}{segment.stop:08x}", 10, 7, 0, sample)


def receipt(seq: int, *proofs: SegmentProof, attempt: int = 1) -> Receipt:
    segments = tuple(replace(p, slot=i) for i, p in enumerate(proofs))
    return Receipt(attempt, "w", seq, part_name(attempt, "w", seq), 99, "00000000", 9, 10, segments, (), "t")


def segments(key: str = "k", cuts: tuple[tuple[int, ...], ...] = CUTS) -> list[Segment]:
    return [
        Segment(key, i, *ends[i : i + 2], 10, column=column, columns=len(cuts))
        for column, ends in enumerate(cuts)
        for i in range(len(ends) - 1)
    ]


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(5)), st.booleans())
def test_a_sample_is_whole_with_the_last_segment_of_its_last_column(order: list[int], ask: bool) -> None:
    manifest, whole = Manifest(), segments()
    for n, i in enumerate(order, 1):
        assert len(manifest.samples) == 0
        if ask:
            assert "k" not in manifest.samples
        manifest.add(receipt(n, proof(whole[i])))
    record = manifest.samples["k"]
    assert [p.segment for p in record.segments] == whole
    assert (record.num_tokens, record.raw_bytes) == (10, 50)
    assert manifest.conflicts == []


def test_a_column_is_no_sample() -> None:
    """Each column covers all tokens, like a sample of hidden states."""
    manifest = Manifest([receipt(1, proof(segments()[0])), receipt(2, proof(segments()[4]))])
    assert list(manifest.samples) == []
    assert len(Index(manifest)) == 0
    assert manifest.totals().samples == 0


def test_tokens_count_once() -> None:
    one = proof(Segment("one", 0, 0, 4, 4), "")
    receipts = [receipt(1, one, *map(proof, segments()[:2])), receipt(2, *map(proof, segments()[2:]))]
    manifest = Manifest(receipts)
    totals, index = manifest.totals(), Index(manifest)
    assert (totals.samples, totals.tokens, totals.segments, totals.raw_bytes) == (2, 14, 6, 60)
    assert dict(zip(index.keys, index.tokens.tolist(), strict=True)) == {"k": 10, "one": 4}
    assert index.tokens_in == {receipts[0].part: 17, receipts[1].part: 17}  # all stored token ids
    assert dict(zip(index.keys, index.raw_bytes.tolist(), strict=True)) == {"k": 50, "one": 10}
    assert index.parts_in_use() == {r.part for r in receipts}
    assert not index.stored_in({receipts[0].part or ""})[index.place("k")]
    assert [p.segment for p in index[index.place("k") or 0].segments] == segments()


def test_the_digest_depends_on_tokens_and_not_on_captured_points() -> None:
    one = receipt(1, proof(Segment("k", 0, 0, 10, 10)))
    several = receipt(1, *map(proof, segments(cuts=((0, 10), (0, 5, 10)))))
    assert Index(Manifest([one])).digest() == Index(Manifest([several])).digest()


def test_columns_of_two_attempts_make_no_sample() -> None:
    whole = segments()
    for last, attempt in product(range(5), (1, 3)):
        others = [proof(s) for i, s in enumerate(whole) if i != last]
        manifest = Manifest([receipt(1, *others, attempt=2), receipt(1, proof(whole[last]), attempt=attempt)])
        assert list(manifest.samples) == [], (last, attempt)
        manifest.add(receipt(2, proof(whole[last]), attempt=2))
        assert {proof.part for proof in manifest.samples["k"].segments} == {part_name(2, "w", 1), part_name(2, "w", 2)}


@pytest.mark.parametrize("changes", [{"total": 11}, {"columns": 4}, {"sample": "b" * 16}])
@pytest.mark.parametrize("last", range(5))
def test_columns_that_say_other_things_of_their_sample_are_never_joined(last: int, changes: dict[str, Any]) -> None:
    sample = changes.get("sample", "a" * 16)
    changes = {name: value for name, value in changes.items() if name != "sample"}
    proofs = [proof(s) for s in segments()]
    proofs[last] = proof(replace(segments()[last], **changes), sample)
    manifest = Manifest([receipt(i, p) for i, p in enumerate(proofs, 1)])
    assert list(manifest.samples) == []
    assert len(manifest.conflicts) == (sample == "a" * 16)  # a row that is computed again may get other tokens
    manifest.add(receipt(9, proof(segments()[last])))
    assert [p.segment for p in manifest.samples["k"].segments] == segments()


def test_a_column_twice_is_not_two_columns() -> None:
    whole = segments(cuts=((0, 10), (0, 10)))
    manifest = Manifest([receipt(2, proof(whole[0])), receipt(1, proof(whole[0]))])
    assert list(manifest.samples) == []
    manifest.add(receipt(3, proof(whole[1])))
    assert [proof.part for proof in manifest.samples["k"].segments] == [part_name(1, "w", 1), part_name(1, "w", 3)]
    assert manifest.conflicts == []


def test_segments_that_contradict_each_other_are_not_joined() -> None:
    """As without columns: then a column counts only as one segment."""
    cut = [proof(s) for s in segments()]
    other = replace(cut[2], token_hash="f" * 16)
    for receipts in ([*cut, other], [other, *cut]):
        manifest = Manifest([receipt(i, p) for i, p in enumerate(receipts, 2)])
        assert list(manifest.samples) == []
        assert len(manifest.conflicts) == 1
        manifest.add(receipt(1, proof(Segment("k", 0, 0, 10, 10, column=1, columns=3))))
        assert [p.segment.num_tokens for p in manifest.samples["k"].segments] == [10, 10, 10]


def test_a_lost_column_takes_its_sample_away() -> None:
    whole = segments()
    manifest = Manifest([receipt(i, proof(s)) for i, s in enumerate(whole, 1)])
    assert "k" in manifest.samples
    for part in [part_name(1, "w", i) for i in range(1, 6)]:
        lost = Manifest([receipt(i, proof(s)) for i, s in enumerate(whole, 1)])
        lost.declare_void((part,))
        assert list(lost.samples) == []
        assert len(Index(lost)) == 0
        assert part not in lost.parts_of("k")


def test_receipts_of_columns_survive_compaction() -> None:
    receipts = [receipt(i, proof(s)) for i, s in enumerate(segments(), 1)]
    packed, size = pack_receipts(receipts)
    assert size == sum(len(r.to_json()) + 1 for r in receipts)
    again = [Receipt.from_json(line) for line in zstandard.ZstdDecompressor().stream_reader(packed).read().splitlines()]
    assert again == receipts
    assert [p.segment for p in Manifest(again).samples["k"].segments] == segments()


def test_a_claim_of_many_columns_costs_nothing() -> None:
    manifest = Manifest([receipt(i, proof(Segment(f"{i}", 0, 0, 10, 10, column=i, columns=1 << 16))) for i in (1, 9)])
    assert list(manifest.samples) == []
    assert np.array_equal(Index(manifest).tokens, [])


def test_the_receipt_with_the_first_segment_decides_among_copies():
    """Samples are ordered by this receipt, also if lost samples are computed again."""
    whole = segments()
    manifest = Manifest([receipt(1, proof(whole[1])), receipt(2, proof(whole[0])), receipt(3, *map(proof, whole[2:]))])
    assert [first for *_, first in manifest.several()] == [(1, "w", 2)]


def test_a_contradiction_in_one_column_undoes_the_pieces_of_all():
    """Two computations have other tokens. It is unknown which of them made the segments of the other columns."""
    manifest = Manifest([receipt(i, proof(s)) for i, s in enumerate(segments(), 2)])
    assert "k" in manifest.samples
    manifest.add(receipt(9, replace(proof(segments()[0]), token_hash="f" * 16)))
    assert list(manifest.samples) == []
    assert len(manifest.conflicts) == 1


@pytest.mark.traced
def test_an_index_gives_the_records_of_its_manifest_in_little_memory() -> None:
    """One object per segment would take four KiB for a sample of five columns."""
    cuts = ((0, 10), (0, 4, 10), (0, 10), (0, 10))
    receipts = [receipt(n, *(proof(s) for i in range(50) for s in segments(f"{n}-{i}", cuts))) for n in range(1, 21)]
    manifest = Manifest(receipts)
    trace_memory()
    index = Index(manifest)
    taken = tracemalloc.get_traced_memory()[0]
    assert len(index) == 1000
    assert taken < 1500 * len(index)
    assert {index[i].key: index[i] for i in range(1000)} == dict(manifest.samples)
