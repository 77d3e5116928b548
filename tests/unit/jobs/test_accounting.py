"""The rows that a resumed run still has to compute."""

from __future__ import annotations

from collections import deque

import pytest

from hsx_dist.errors import RunMismatch
from hsx_dist.format.manifest import Manifest, Receipt, RowFate, SegmentProof
from hsx_dist.inputs.rows import Row
from hsx_dist.jobs.accounting import accounted, remaining, same_rows
from hsx_dist.page import Segment

HASH = "0" * 16


def receipt(seq: int, *, keys: tuple[str, ...] = (), fates: tuple[RowFate, ...] = ()) -> Receipt:
    proofs = tuple(SegmentProof(Segment(k, 0, 0, 3, 3), i, HASH, 10, 5, i) for i, k in enumerate(keys))
    part = f"data/p{seq}.safetensors" if keys else None
    size = 100 if keys else 0
    return Receipt(
        1, "w", seq, part, size, "00000000", size // 2, 10 * len(keys), proofs, fates, "2026-01-01T00:00:00Z"
    )


def row(key: str, number: int, text: str) -> Row:
    return Row(key, number, text=text, number_key=f"in#{number:08d}")


def refused(r: Row) -> RowFate:
    return RowFate(r.key, r.row, "refused", "too long", 0, r.content)


def test_an_input_that_changes_between_two_passes_is_refused():
    """The driver would mark a run as complete without the rows that it never read."""
    files = [row(key, i, "text") for i, key in enumerate("abcd")]
    read = same_rows(lambda: iter(files))
    assert list(read()) == list(read()) == files
    for changed in (files[:2], files[::-1], [*files, row("e", 4, "text")], [*files[:3], row("x", 3, "text")]):
        now = iter([files, changed])
        read = same_rows(lambda now=now: iter(next(now)))
        list(read())
        with pytest.raises(RunMismatch, match="got others after row 0: the input changed"):
            next(read())  # before a row of another input is computed
    long = [row(f"r{i}", i, "text") for i in range(200)]
    other = [*long[:150], row("r150", 150, "other"), *long[151:]]
    for changed, blocks in ((other, 2), (long[:192], 3), (long[:-1], 3), ([*long, row("new", 200, "text")], 3)):
        now, seen = iter([long, changed]), []
        read = same_rows(lambda now=now: iter(next(now)))
        assert list(read()) == long
        with pytest.raises(RunMismatch, match="the input changed"):
            deque(map(seen.append, read()))
        assert seen == long[: 64 * blocks]


def test_comparing_large_rows_reads_few_ahead():
    """A row may have 16 MiB, and 12 times as much as Python objects."""
    taken = []
    large = (taken.append(i) or row(f"r{i}", i, "x" * 400_000) for i in range(64))
    assert next(same_rows(lambda: large)()).key == "r0"
    assert len(taken) == 3


def test_a_refused_row_is_done_until_it_is_corrected():
    before, after = row("a", 0, "too long"), row("a", 0, "short")
    manifest = Manifest([receipt(1, fates=(refused(before),))])
    assert accounted(before, manifest)
    assert not accounted(after, manifest)
    assert list(remaining(lambda: iter([after]), manifest)) == [after]
    manifest.add(receipt(2, keys=("a",)))
    assert accounted(after, manifest)
    assert not manifest.refused


def test_a_line_that_could_not_be_read_and_now_can_is_run_and_its_refusal_withdrawn():
    broken = RowFate("in#00000003", 3, "refused", "not JSON", 0)
    manifest = Manifest([receipt(1, fates=(broken,))])
    assert accounted(broken, manifest)
    mended = row("c", 3, "text")
    withdrawal, again = remaining(lambda: iter([mended]), manifest)
    assert again is mended
    assert (withdrawal.key, withdrawal.fate) == (broken.key, "withdrawn")
    manifest.add(receipt(2, keys=("c",)))
    assert not accounted(mended, manifest)  # the withdrawal is not stored yet
    assert [r.fate for r in remaining(lambda: iter([mended]), manifest)] == ["withdrawn"]
    manifest.add(receipt(3, fates=(withdrawal,)))
    assert accounted(mended, manifest)
    assert not manifest.refused


def test_a_row_that_is_refused_for_another_reason_gets_this_reason():
    before, now = (RowFate("a", 3, "refused", why, 0) for why in ("not JSON", "text: expected text, got a number"))
    manifest = Manifest([receipt(1, fates=(before,))])
    assert accounted(now, manifest)  # no fleet starts to store a reason
    assert list(remaining(lambda: iter([now]), manifest)) == [now]
    manifest.add(receipt(2, fates=(now,)))
    assert list(remaining(lambda: iter([now]), manifest)) == [None]
    assert manifest.refused["a"].reason == now.reason


def test_a_refusal_under_another_rows_id_never_hides_that_row():
    good = row("1", 5, "text")
    manifest = Manifest([receipt(1, fates=(RowFate("1", 7, "refused", "duplicate id", 0),))])
    assert not accounted(good, manifest)


def test_a_failed_row_gets_another_chance():
    r = row("a", 0, "text")
    assert not accounted(r, Manifest([receipt(1, fates=(RowFate("a", 0, "failed", "died", 3, r.content),))]))


def test_a_row_that_killed_its_engine_stays_aside_until_it_is_changed_or_asked_for():
    r = row("a", 0, "text")
    manifest = Manifest([receipt(1, fates=(RowFate("a", 0, "poison", "its engine died", 3, r.content),))])
    assert accounted(r, manifest)
    assert list(remaining(lambda: iter([r]), manifest)) == [None]
    assert list(remaining(lambda: iter([r]), manifest, retry_poison=True)) == [r]
    assert not accounted(row("a", 0, "other text"), manifest)
