"""Logs of receipts and their seals: of two puts of a number one succeeds, and after a seal a log is final."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from hsx_dist.errors import Fenced, FormatError, StoreError
from hsx_dist.format import receipt_log
from hsx_dist.format.byte_budget import ByteBudget
from hsx_dist.format.checksum import crc32c, crc32c_hex
from hsx_dist.format.manifest import Receipt, RowFate
from hsx_dist.format.names import part_name, receipt_name
from hsx_dist.format.receipt_log import LogReader, ReceiptLog, list_logs, new_receipts, read_entry, seal_logs
from hsx_dist.format.runs import DRIVER, seal_attempts, take_attempt
from hsx_dist.store import ObjectInfo
from hsx_dist.testing.stores import MemoryStore
from tests.harness.traced_memory import trace_memory


def receipt(created: str = "t") -> Receipt:
    return Receipt(1, "w", 1, None, 0, "0" * 8, 0, 0, (), (), created)


def test_a_log_numbers_its_receipts_and_a_lost_answer_is_no_gap() -> None:
    store = MemoryStore()
    log = ReceiptLog(store, 1, "w")
    assert log.append(receipt("a")).seq == 1
    # The second receipt is stored, but its writer gets no answer.
    store.put_if_absent(receipt_name(1, "w", 2), Receipt(1, "w", 2, None, 0, "0" * 8, 0, 0, (), (), "b").to_json())
    assert log.append(receipt("c")).seq == 3
    assert [r.created for r in LogReader().read(store)] == ["a", "b", "c"]


@pytest.mark.parametrize(("after", "later"), [(7, 8), (998, 1000), (999, 10_000), (1000, 10_000), (9998, 10_000)])
def test_receipts_of_later_attempts_are_read(after: int, later: int) -> None:
    """Names sort by their text: attempt 10000 is before attempt 1001."""
    store = MemoryStore()
    for attempt in (after, later):
        ReceiptLog(store, attempt, "w").append(replace(receipt(str(attempt)), attempt=attempt))
    assert [r.created for r in LogReader(after).read(store)] == [str(later)]


def test_a_sealed_writer_stores_nothing_more() -> None:
    store = MemoryStore()
    log = ReceiptLog(store, 1, "w")
    log.append(receipt("a"))
    seal_logs(store, list_logs(store), "gc")
    for _ in range(2):
        with pytest.raises(Fenced, match=r"got a seal \(gc\)"):
            log.append(receipt("b"))
    assert [r.created for r in LogReader().read(store)] == ["a"]
    assert read_entry(store, receipt_name(1, "w", 2)) is None
    before = dict(store.objects)
    seal_logs(store, list_logs(store), "attempt 2")  # one seal is enough
    assert store.objects == before


def test_receipts_after_a_seal_are_ignored() -> None:
    store = MemoryStore()
    seal_logs(store, {(1, "w"): 0}, "gc")
    for number in (2, 5):  # a writer of version 1 writes past the seal; a gap after it does not matter
        store.put(
            receipt_name(1, "w", number), [Receipt(1, "w", number, None, 0, "0" * 8, 0, 0, (), (), "t").to_json()]
        )
    assert list(LogReader().read(store)) == []
    assert list(new_receipts(store, lambda _: False, 1)) == []


class Cut(MemoryStore):
    """A store of which the first listings lack an object that exists."""

    lacking = 1

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        lacks = receipt_name(1, "w", 2) if self.lacking > 0 else None
        self.lacking -= 1
        return iter([info for info in super().list(prefix, after) if info.name != lacks])


def test_an_object_in_a_gap_is_listed_later_or_an_error() -> None:
    store, reader = Cut(), LogReader()
    log = ReceiptLog(store, 1, "w")
    for created in "abc":
        log.append(receipt(created))
    assert [[r.created for r in reader.read(store)] for _ in range(2)] == [["a"], ["b", "c"]]
    store.lacking = 2
    with pytest.raises(StoreError, match=r"000002.json: expected a listing with this object, which exists"):
        list(LogReader().read(store))


def test_a_newer_attempt_seals_every_log_that_can_still_grow() -> None:
    store = MemoryStore()
    assert take_attempt(store, {}) == 1
    with_receipts, with_part, with_nothing = (ReceiptLog(store, 1, name) for name in "abc")
    driver = ReceiptLog(store, 1, DRIVER)
    with_receipts.append(receipt())
    store.put(part_name(1, "b", 1), [b"x"])
    assert take_attempt(store, {}) == 2
    seal_attempts(store, 1, 2)
    for log in (with_receipts, with_part, with_nothing, driver):
        # Also a writer that checked for a newer attempt before it began, if an object of that writer is stored.
        with pytest.raises(Fenced):
            log.append(receipt())
    sealed = {name for name, data in store.objects.items() if data.startswith(b'{"seal":')}
    assert sealed == {receipt_name(1, "a", 2), receipt_name(1, "b", 1), receipt_name(1, DRIVER, 1)}
    ReceiptLog(store, 2, "d").append(receipt())


def test_a_racing_seal_and_receipt_store_one_object() -> None:
    for _ in range(50):
        store = MemoryStore()
        log = ReceiptLog(store, 1, "w")
        with ThreadPoolExecutor(2) as pool:
            sealing = pool.submit(seal_logs, store, {(1, "w"): 0}, "gc")
            stored = 0
            try:
                while True:
                    log.append(receipt(str(stored)))
                    stored += 1
            except Fenced:
                pass
            sealing.result()
        assert len(list(LogReader().read(store))) == stored


@pytest.mark.parametrize(("last", "new"), [(1_000_005, 1_000_006), (999_999, 1_000_000)])
def test_a_later_read_finds_receipts_of_more_digits(last: int, new: int) -> None:
    """Names sort by their text: 1,000,000 is before 100,001."""

    class Counted(MemoryStore):
        listings = 0

        def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
            self.listings += 1
            assert self.listings < 10, f"listed again after {after}"
            return super().list(prefix, after)

    store = Counted()
    for number in (*range(1, 1200), *range(99_990, 101_500), *range(999_990, last + 1)):
        store.put(receipt_name(1, "w", number), [b""])
    for log, number in ((1, "w"), new), ((1, "x"), 1):
        store.put(receipt_name(*log, number), [Receipt(*log, number, None, 0, "0" * 8, 0, 0, (), (), "t").to_json()])
    logs = LogReader()
    logs._read = {(1, "w"): last}
    assert [r.id for r in logs.read(store)] == [(1, "w", new), (1, "x", 1)]
    assert list(logs.read(store)) == []


@pytest.mark.traced
def test_receipts_that_are_refused_take_the_memory_of_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some have a hundred thousand objects or members in an unknown member. Others are long, and no receipts."""
    store = MemoryStore()
    wide = b"{" + b",".join(b'"%d":0' % i for i in range(100_000)) + b"}"
    for more, what in (b"[" + b'{"":0},' * 100_000 + b"0]", "lists and objects"), (wide, "members of objects"):
        body = receipt().to_json()[:-2].partition(b'"receipt":')[2] + b',"x":' + more + b"}"
        refused = b'{"crc32c":"' + crc32c_hex(crc32c(body)).encode() + b'","receipt":' + body + b"}"
        with pytest.raises(FormatError, match=f"expected at most .* {what}, got more"):
            Receipt.from_json(refused)
    for number in range(1, 41):
        store.put(receipt_name(1, "w", number), [bytes(2 << 20)])

    def get(name: str, size: int) -> bytes:
        data = bytes(memoryview(store.objects[name])[:size])
        time.sleep(0.02)
        return data

    monkeypatch.setattr(store, "get", get)
    monkeypatch.setattr(receipt_log, "_BYTES_AT_ONCE", 4 << 20)
    trace_memory()
    with pytest.raises(FormatError, match=r"expected a receipt, which begins with"):
        list(LogReader().read(store))
    peak = tracemalloc.get_traced_memory()[1]
    assert peak < 16 << 20


def test_a_key_of_brackets_is_no_list() -> None:
    made = replace(receipt(), rows=(RowFate("[{:" * 2500 + '"\\', 1, "refused", "[" * 5000, 1),))
    assert Receipt.from_json(made.to_json()) == made


def test_a_budget_lets_a_larger_claim_through_alone() -> None:
    budget, held, most = ByteBudget(10), 0, 0
    lock = threading.Lock()

    def work(n: int) -> None:
        nonlocal held, most
        with budget.hold(n):
            with lock:
                held += n
                most = max(most, held)
            time.sleep(0.002)
            with lock:
                held -= n

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [3, 4, 5, 30, 1] * 8))
    assert most == 30
