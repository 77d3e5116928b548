from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsx_dist.errors import AlreadyExists, ConfigError, Fenced, FormatError, IntegrityError, StoreError
from hsx_dist.format import runs
from hsx_dist.format.conditional_puts import require_conditional_puts
from hsx_dist.format.manifest import Receipt, RowFate, SegmentProof
from hsx_dist.format.names import attempt_name, complete_name, part_name, receipt_name
from hsx_dist.page import Segment, token_hash
from hsx_dist.store import ObjectInfo
from hsx_dist.store.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run")


def _prove(store: LocalStore, attempt: int, writer: str, seq: int, key: str) -> Receipt:
    proof = SegmentProof(Segment(key, 0, 0, 4, 4), 0, token_hash(np.arange(4)), 32, 20, seq)
    rows = (RowFate(f"{key}-refused", None, "refused", "empty", 1),)
    receipt = Receipt(attempt, writer, seq, part_name(attempt, writer, seq), 50, "0" * 8, 8, 32, (proof,), rows, "t")
    store.put_if_absent(receipt_name(*receipt.id), receipt.to_json())
    return receipt


def test_attempts_are_numbered_and_fence(store: LocalStore) -> None:
    assert runs.newest_attempt(store) == 0
    assert [runs.take_attempt(store, {"host": "h"}) for _ in range(3)] == [1, 2, 3]
    runs.beat(store, 3, 1, "running")
    assert runs.newest_attempt(store) == 3
    assert [runs.is_fenced(store, a) for a in (1, 2, 3)] == [True, True, False]
    assert json.loads(store.get(attempt_name(2)))["host"] == "h"


def test_racing_drivers_get_different_attempts(store: LocalStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda i: runs.take_attempt(store, {"driver": i}), range(24)))
    assert sorted(taken) == list(range(1, 25))


def test_an_attempt_whose_answer_was_lost_is_still_ours(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    create = store.put_if_absent

    def stored_but_answered_wrongly(name: str, data: bytes) -> None:
        create(name, data)
        raise AlreadyExists(name)

    monkeypatch.setattr(store, "put_if_absent", stored_but_answered_wrongly)
    assert runs.take_attempt(store, {}) == 1
    assert runs.newest_attempt(store) == 1
    require_conditional_puts(store)
    assert [info.name for info in store.list()] == ["attempts/0001.json"]


def test_heartbeats(store: LocalStore) -> None:
    assert runs.read_heartbeat(store, 1) is None
    runs.beat(store, 1, 7, "running")
    runs.beat(store, 1, 8, "finished")
    beat = runs.read_heartbeat(store, 1)
    assert beat is not None
    assert (beat["attempt"], beat["value"], beat["state"]) == (1, 8, "finished")


def test_the_manifest_of_a_run_that_goes_on(store: LocalStore) -> None:
    for writer in ("w", "w-1"):
        for seq in (1, 2, 3):
            _prove(store, 1, writer, seq, f"{writer}-{seq}")
    manifest = runs.load_manifest(store)
    assert len(manifest.samples) == 6
    assert len(manifest.refused) == 6
    assert runs.read_complete(store) is None


def test_a_completed_run_can_be_continued_by_a_newer_attempt(store: LocalStore) -> None:
    assert runs.take_attempt(store, {}) == 1
    _prove(store, 1, "w", 1, "a")
    before = runs.load_manifest(store)
    runs.write_complete(store, 1, before, {"rows": 2})
    complete = runs.read_complete(store)
    assert complete is not None
    assert complete["summary"] == {"rows": 2}
    assert complete["counts"] == {
        "samples": 1, "tokens": 4, "segments": 1, "parts": 1, "raw_bytes": 32, "stored_bytes": 20,
        "refused": 1, "failed": 0, "conflicts": 0,
    }  # fmt: skip
    store.delete(receipt_name(1, "w", 1))  # the compacted manifest is enough
    again = runs.load_manifest(store)
    assert dict(again.samples) == dict(before.samples)
    assert again.receipts == before.receipts

    assert runs.take_attempt(store, {}) == 2
    _prove(store, 2, "v", 1, "b")
    assert set(runs.load_manifest(store).samples) == {"a", "b"}
    with pytest.raises(Fenced, match="attempt 1"):
        runs.write_complete(store, 1, before, {})
    runs.write_complete(store, 2, runs.load_manifest(store), {})
    assert set(runs.load_manifest(store).samples) == {"a", "b"}


def test_a_missing_receipt_raises(store: LocalStore) -> None:
    for seq in (1, 2, 3, 4):
        _prove(store, 1, "w", seq, f"{seq}")
    for seq in (2, 3):
        store.delete(receipt_name(1, "w", seq))
    with pytest.raises(IntegrityError, match=r"manifest/0001/w/000002\.json: expected a receipt, .* 2 missing"):
        runs.load_manifest(store)


def test_a_receipt_that_is_stored_while_a_listing_goes_on_is_no_gap(store: LocalStore) -> None:
    class Between(LocalStore):
        """A first listing that passes number 2 before it is stored, and reaches number 3 after that."""

        hidden = False

        def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
            for info in super().list(prefix, after):
                if self.hidden or not info.name.endswith("000002.json"):
                    yield info
                else:
                    self.hidden = True

    for seq in (1, 2, 3):
        _prove(store, 1, "w", seq, f"{seq}")
    assert set(runs.load_manifest(Between(store.url)).samples) == {"1"}


def test_a_damaged_receipt_raises(store: LocalStore) -> None:
    body = bytearray(_prove(store, 1, "w", 1, "a").to_json())
    body[60] ^= 1
    store.put(receipt_name(1, "w", 1), [body])
    with pytest.raises(IntegrityError, match=r"manifest/0001/w/000001\.json"):
        runs.load_manifest(store)


def test_a_receipt_under_a_wrong_name_raises(store: LocalStore) -> None:
    receipt = _prove(store, 1, "w", 1, "a")
    store.put(receipt_name(1, "w", 2), [receipt.to_json()])
    with pytest.raises(FormatError, match="expected the receipt of that name"):
        runs.load_manifest(store)


def test_other_objects_next_to_receipts_are_ignored(store: LocalStore) -> None:
    _prove(store, 1, "w", 1, "a")
    store.put("manifest/0001/w/notes.txt", [b"hello"])
    assert set(runs.load_manifest(store).samples) == {"a"}


def test_a_damaged_compacted_manifest_raises(store: LocalStore) -> None:
    runs.take_attempt(store, {})
    _prove(store, 1, "w", 1, "a")
    runs.write_complete(store, 1, runs.load_manifest(store), {})
    name = "manifest/compacted-0001.jsonl.zst"
    good = store.get(name)
    for bad in (good[:-1], bytes([good[0] ^ 1]) + good[1:], b""):
        store.put(name, [bad])
        with pytest.raises(IntegrityError, match="compacted-0001"):
            runs.load_manifest(store)
    store.delete(name)
    with pytest.raises(IntegrityError, match=r"the compacted manifest of a completed attempt"):
        runs.load_manifest(store)


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": 0},
        {"attempt": "1"},
        {"counts": None},
        {"manifest": {}},
        {"manifest": {"name": "../../x", "size": 1, "raw_size": 1, "receipts": 1, "crc32c": "0"}},
        {"manifest": {"name": "manifest/compacted-0001.jsonl.zst", "size": 1, "raw_size": 2**60, "receipts": 1}},
    ],
)
def test_a_wrong_completion_raises(store: LocalStore, change: dict[str, object]) -> None:
    runs.take_attempt(store, {})
    runs.write_complete(store, 1, runs.load_manifest(store), {})
    complete = runs.read_complete(store)
    assert complete is not None
    store.put(complete_name(1), [json.dumps({**complete, **change}).encode()])
    with pytest.raises(FormatError, match=r"complete\.json"):
        runs.load_manifest(store)


def test_runs_that_version_1_completed_are_read(store: LocalStore) -> None:
    runs.take_attempt(store, {})
    _prove(store, 1, "w", 1, "a")
    runs.write_complete(store, 1, runs.load_manifest(store), {})
    store.put("complete.json", [store.get(complete_name(1))])
    store.delete(complete_name(1))
    for found in (runs.read_complete(store), runs.read_complete(store, 1)):
        assert found is not None
        assert found["attempt"] == 1
    assert runs.read_complete(store, 2) is None


def test_an_earlier_attempt_that_pauses_does_not_replace_a_later_completion(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.take_attempt(store, {})
    before = runs.load_manifest(store)
    runs.take_attempt(store, {})
    _prove(store, 2, "w", 1, "a")
    runs.write_complete(store, 2, runs.load_manifest(store), {})
    with monkeypatch.context() as m:
        m.setattr(runs, "is_fenced", lambda *_: False)  # checked before the second attempt began
        runs.write_complete(store, 1, before, {})
    complete = runs.read_complete(store)
    assert complete is not None
    assert complete["attempt"] == 2
    assert set(runs.load_manifest(store).samples) == {"a"}


class Replacing(LocalStore):
    """A store that ignores the condition of a put, as some S3 servers do."""

    def put_if_absent(self, name: str, data: Any) -> None:
        self.put(name, [data])


def test_a_store_without_conditional_puts_is_refused(store: LocalStore) -> None:
    require_conditional_puts(store)
    with pytest.raises(ConfigError, match=r"\(If-None-Match\), got a store that replaces it"):
        require_conditional_puts(Replacing(store.url))
    assert list(store.list()) == []


class Unable(LocalStore):
    """A store that refuses the header. S3 services answer so if they do not implement a header."""

    def put_if_absent(self, name: str, data: Any) -> None:  # noqa: ARG002
        raise StoreError("NotImplemented: a header that you provided")


def test_a_store_that_refuses_conditional_puts_is_refused(store: LocalStore) -> None:
    with pytest.raises(ConfigError, match=r"expected a store that refuses to create.*NotImplemented"):
        require_conditional_puts(Unable(store.url))
    assert list(store.list()) == []


def test_an_attempt_of_number_zero_is_ignored(store: LocalStore) -> None:
    for name in ("attempts/0000.json", "attempts/0000.complete.json"):
        store.put(name, [b"{}"])
    assert runs.take_attempt(store, {}) == 1
    assert runs.take_attempt(store, {}) == 2
    assert runs.attempts_of(store) == [1, 2]
    assert not runs.is_complete(store)
