"""The table of a part's segments, compared with segment objects."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsx_dist.format.manifest import Manifest
from hsx_dist.format.names import part_name
from hsx_dist.format.receipt import Receipt, SegmentProof
from hsx_dist.format.segments import SegmentTable, whole
from hsx_dist.page import Segment
from hsx_dist.reading.index import Index

hashes = st.text("0123456789abcdef", min_size=16, max_size=16)
counts = st.integers(0, 2**39)


@st.composite
def proofs(draw):
    start, length, more = draw(counts), draw(st.integers(1, 1000)), draw(st.integers(0, 1000))
    segment = Segment(draw(st.text(min_size=1)), draw(st.integers(0, 99)), start, start + length, start + length + more)
    return SegmentProof(
        segment,
        0,
        draw(hashes),
        draw(counts),
        draw(counts),
        draw(st.none() | st.integers(0, 2**40)),
        draw(st.just("") | hashes),
        content=draw(st.just("") | hashes),
    )


@given(st.lists(proofs(), max_size=20))
def test_it_is_the_same_as_its_items(items):
    items = tuple(replace(p, slot=i) for i, p in enumerate(items))
    table = SegmentTable.of(items)
    assert tuple(table) == items == table
    assert [table[i] for i in range(len(table))] == list(items)
    assert [table.key(i) for i in range(len(table))] == list(table.keys()) == [p.segment.key for p in items]
    assert whole(table.numbers).tolist() == [
        p.segment.index == 0 == p.segment.start and p.segment.stop == p.segment.total for p in items
    ]
    assert pickle.loads(pickle.dumps(table)) == table
    part = part_name(1, "w", 1) if items else None
    receipt = Receipt(1, "w", 1, part, 9 if items else 0, "00000000", 0, 0, items, (), "t")
    assert Receipt.from_json(receipt.to_json()) == receipt


def test_a_slot_that_is_not_there():
    table = SegmentTable.of([SegmentProof(Segment("k", 0, 0, 1, 1), 0, "0" * 16, 1, 1)])
    assert table[-1] == table[0]
    with pytest.raises(IndexError):
        table[1]


def test_the_order_of_rows_is_that_of_the_input_and_unknown_rows_come_last():
    def receipt(seq, *items):
        made = [SegmentProof(Segment(k, 0, 0, 3, 3), i, "0" * 16, 1, 1, row) for i, (k, row) in enumerate(items)]
        return Receipt(1, "w", seq, f"data/{seq}", 9, "00000000", 0, 0, made, (), "t")

    manifest = Manifest([receipt(1, ("c", 2), ("z", None), ("a", 7)), receipt(2, ("y", None), ("b", 0), ("aa", 7))])
    assert Index(manifest).keys == ["b", "c", "a", "aa", "y", "z"]
    totals = manifest.totals()
    assert (totals.samples, totals.tokens, totals.parts, totals.part_bytes) == (6, 18, 2, 18)
