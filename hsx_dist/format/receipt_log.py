"""A writer's receipts in one attempt: a log that grows by one object at a time, until a *seal* ends it.

Receipts are put only if absent under the numbers 1, 2, 3, …. Another process ends the log by putting a seal, only if
absent, under its next number. Exactly one of the two puts of a number succeeds, so that after a seal the log's receipts
are final: the writer meets the seal and stores nothing more, however long it paused before. A writer of version 1 steps
over the seal; receipts behind a seal count for nothing.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime

from hsx_dist.errors import AlreadyExists, Fenced, FormatError, IntegrityError, NotFound
from hsx_dist.format.manifest import closed_name, parse_part_name, parse_receipt_name, receipt_name
from hsx_dist.format.receipt import Receipt
from hsx_dist.store import Store

#: An attempt and one of its writers.
Log = tuple[int, str]

_SEAL = b'{"seal":'
_SEAL_FORMAT = "hsx-seal/1"
#: A seal is smaller; the last object of a log is read to see whether it is one only if it is not larger.
_LARGEST_SEAL = 1024
_LARGEST_RECEIPT = 256 << 20
_THREADS = 16


class ReceiptLog:
    """The log of one writer, from the writer's side. Safe to share between threads."""

    def __init__(self, store: Store, attempt: int, writer: str):
        self._store = store
        self._attempt = attempt
        self._writer = writer
        self._lock = threading.Lock()
        self._next = 1

    def append(self, receipt: Receipt) -> Receipt:
        """Store ``receipt`` under the next number; returns it with attempt, writer and number filled in.

        Raises:
            Fenced: the attempt is closed, or the log is sealed. Nothing is stored, now or later.
            StoreError: the store's. The receipt may be stored all the same.
        """
        with self._lock:
            # A seal stops every writer of which something was stored when the attempt was closed. This stops the rest.
            if is_closed(self._store, self._attempt):
                raise Fenced(
                    f"attempt {self._attempt} of {self._store.url} is closed: another driver took over, or no row is "
                    "left. Its writers store nothing more"
                )
            while True:
                receipt = replace(receipt, attempt=self._attempt, writer=self._writer, seq=self._next)
                name, body = receipt_name(*receipt.id), receipt.to_json()
                try:
                    self._store.put_if_absent(name, body)
                    found = body
                except AlreadyExists:
                    found = self._store.get(name)
                if found.startswith(_SEAL):
                    raise Fenced(
                        f"{self._store.url}/{name}: expected room for a receipt, got a seal ({_who(found)}): this "
                        "writer stores nothing more. Start the run again to resume it"
                    )
                # Another body is a receipt of this log: its put went through though the store answered otherwise.
                self._next += 1
                if found == body:
                    return receipt


def is_closed(store: Store, attempt: int) -> bool:
    """Whether the attempt's writers must store nothing more."""
    try:
        store.head(closed_name(attempt))
    except NotFound:
        return False
    return True


def list_logs(store: Store) -> dict[Log, int]:
    """All logs of a run, and how many objects each has: those with receipts, and those of which there are only parts.

    Raises ``StoreError``.
    """
    # Parts first: a part is stored before its receipt.
    logs: dict[Log, int] = {}
    for info in store.list("data/"):
        part = parse_part_name(info.name)
        if part is not None:
            logs.setdefault(part[:2], 0)
    for info in store.list("manifest/"):
        parsed = parse_receipt_name(info.name)
        if parsed is not None:
            logs[parsed[:2]] = max(logs.get(parsed[:2], 0), parsed[2])
    return logs


def seal_logs(store: Store, logs: Mapping[Log, int], by: str) -> None:
    """Seal each log; ``logs`` says up to which number each is known to reach. When this returns, the receipts of these
    logs are final.

    Raises:
        StoreError: the store's. Some of the logs may be sealed.
    """
    seal = {"format": _SEAL_FORMAT, "by": by, "created": datetime.now(UTC).isoformat(timespec="seconds")}
    body = json.dumps({"seal": seal}, separators=(",", ":")).encode()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="hsx-seal") as pool:
        for _ in pool.map(lambda item: _seal(store, item[0], item[1], body), logs.items()):
            pass


def _seal(store: Store, log: Log, last: int, body: bytes) -> None:
    if last and _is_sealed(store, receipt_name(*log, last)):
        return
    while True:
        last += 1
        name = receipt_name(*log, last)
        try:
            store.put_if_absent(name, body)
        except AlreadyExists:
            if not _is_sealed(store, name):
                continue  # the writer was quicker
        return


def _is_sealed(store: Store, name: str) -> bool:
    return store.head(name).size <= _LARGEST_SEAL and store.get(name).startswith(_SEAL)


def read_logs(store: Store, after_attempt: int = 0) -> Iterator[Receipt]:
    """The receipts of all logs of later attempts, by attempt, writer and number.

    Raises:
        IntegrityError: a receipt is missing or damaged.
        FormatError: something is there that is no receipt.
    """
    # "~" sorts behind every writer's name.
    after = f"manifest/{after_attempt:04d}/~" if 0 < after_attempt < 9999 else None
    found: dict[Log, list[int]] = {}
    for info in store.list("manifest/", after=after):
        parsed = parse_receipt_name(info.name)
        if parsed is None or parsed[0] <= after_attempt:
            continue
        if info.size > _LARGEST_RECEIPT:
            raise FormatError(f"{store.url}/{info.name}: expected a receipt, got {info.size} bytes. It is damaged")
        found.setdefault(parsed[:2], []).append(parsed[2])
    entries = [(*log, number) for log, numbers in sorted(found.items()) for number in sorted(numbers)]
    return _before_seals(store, entries, gapless=True)


def new_receipts(
    store: Store, known: Callable[[tuple[int, str, int]], bool], attempt: int | None = None
) -> Iterator[Receipt]:
    """The receipts (of one ``attempt``, or of all) that are not ``known``, with the errors of ``read_logs``; gaps are
    not looked for."""
    folder = "manifest/" if attempt is None else f"manifest/{attempt:04d}/"
    found = (parse_receipt_name(info.name) for info in store.list(folder))
    entries = sorted(entry for entry in found if entry is not None and not known(entry))
    return _before_seals(store, entries, gapless=False)


def _before_seals(store: Store, entries: Sequence[tuple[int, str, int]], *, gapless: bool) -> Iterator[Receipt]:
    """The receipts of ``entries`` (sorted), of each log as far as its seal; ``gapless``: every number must be there."""
    log: Log | None = None
    expected, ended = 1, False
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="hsx-receipts") as pool:
        bodies = pool.map(lambda entry: read_entry(store, receipt_name(*entry)), entries)
        for (attempt, writer, number), receipt in zip(entries, bodies, strict=True):
            if (attempt, writer) != log:
                log, expected, ended = (attempt, writer), 1, False
            if not ended and gapless and number != expected:
                _check_gap(store, log, expected, number)
                ended = True  # the listing passed the missing number before the writer stored it
            ended = ended or receipt is None
            if not ended and receipt is not None:
                yield receipt
            expected = number + 1


def _check_gap(store: Store, log: Log, expected: int, number: int) -> None:
    name = receipt_name(*log, expected)
    try:
        store.head(name)
    except NotFound:
        raise IntegrityError(
            f"{store.url}/{name} is missing: expected {number - expected} receipts more before number {number} of this "
            "writer. They were lost after they were written. Restore them; or remove the writer's later receipts and "
            "run again: what they prove is then extracted anew"
        ) from None


def read_entry(store: Store, name: str) -> Receipt | None:
    """The receipt stored under ``name``; ``None`` where a seal ends the log there.

    Raises:
        NotFound, StoreError: the store's.
        IntegrityError, FormatError: it is neither.
    """
    data = store.get(name)
    if data.startswith(_SEAL):
        return None
    where = f"{store.url}/{name}"
    receipt = Receipt.from_json(data, where)
    if receipt.id != parse_receipt_name(name):
        raise FormatError(
            f"{where}: expected the receipt of that name, got {receipt_name(*receipt.id)}. It lies under a wrong name"
        )
    return receipt


def _who(seal: bytes) -> str:
    """Who sealed a log, for people."""
    found = re.search(rb'"by":"([A-Za-z0-9 ]{1,80})"', seal)
    return found[1].decode() if found else "unknown"
