"""A writer's receipts in one attempt: a log that grows by one object at a time, until a *seal* ends it.

Receipts are put only if absent under the numbers 1, 2, 3, …. Another process ends the log by putting a seal, only if
absent, under its next number. Exactly one of two puts of a number succeeds, so a seal makes the log's receipts final.
The writer finds the seal and stores nothing more, however long it paused before. A writer of version 1 continues after
the seal, but receipts after a seal are ignored.
"""

from __future__ import annotations

import json
import re
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from hsx_dist.errors import AlreadyExists, Fenced, FormatError, HsxError, IntegrityError, ObjectsMissing, Unavailable
from hsx_dist.format.byte_budget import ByteBudget
from hsx_dist.format.description import MAX_HEADER_BYTES
from hsx_dist.format.json_objects import get_small, holds_json
from hsx_dist.format.names import LARGEST_NUMBER, closed_name, parse_part_name, parse_receipt_name, receipt_name
from hsx_dist.format.presence import exists
from hsx_dist.format.receipt import Receipt, begins_receipt
from hsx_dist.store import ObjectInfo, Store

#: An attempt and one of its writers.
Log = tuple[int, str]

_SEAL = b'{"seal":'
_SEAL_FORMAT = "hsx-seal/1"
#: No part has a longer header, and a segment takes more bytes in the header than in a receipt.
_LARGEST_RECEIPT = MAX_HEADER_BYTES
#: Concurrent requests. Each waits for a round trip to the store.
_THREADS = 16
#: Bytes of receipts that are fetched and parsed at once. Parsed JSON takes many times the memory of its text.
_BYTES_AT_ONCE = 8 << 20
#: Names in one response of S3 to a listing.
_PAGE = 1000


class ReceiptLog:
    """The log of one writer, for appending. Safe to share between threads."""

    def __init__(self, store: Store, attempt: int, writer: str):
        self._store = store
        self._attempt = attempt
        self._writer = writer
        self._lock = threading.Lock()
        self._next = 1

    def append(self, receipt: Receipt) -> Receipt:
        """Store ``receipt`` under the next number. Returns it with attempt, writer and number filled in.

        Raises:
            Fenced: the attempt is closed, or the log is sealed. Nothing is stored, now or later.
            StoreError: raised by the store. The receipt may be stored nevertheless.
            Unavailable: an answer is neither a receipt nor a seal, such as a gateway's page. It may hide a seal.
        """
        with self._lock:
            # Seals stop only writers that had stored an object when the attempt was closed. This stops all others.
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
                    found = get_small(self._store, name, _LARGEST_RECEIPT)
                if found.startswith(_SEAL):
                    raise Fenced(
                        f"{self._store.url}/{name}: expected no object, got a seal ({_who(found)}): this writer stores "
                        "nothing more. Start the run again to resume it"
                    )
                if not begins_receipt(found):
                    raise Unavailable(
                        f"{self._store.url}/{name}: expected a receipt or a seal, got other bytes. Check that the "
                        "store answers"
                    )
                # Another body is an earlier receipt of this log, whose put succeeded although the store raised.
                self._next += 1
                if found == body:
                    return receipt


def is_closed(store: Store, attempt: int) -> bool:
    """Whether the attempt is closed, so that its writers must not store anything more."""
    return holds_json(store, closed_name(attempt))


def list_logs(store: Store) -> dict[Log, int]:
    """All logs of a run, and the highest number in each; 0 for a writer that has stored parts but no receipt.

    Raises ``StoreError``.
    """
    # List parts before receipts, because a part is stored before its receipt.
    writers = _writers(store)
    receipts: dict[Log, int] = {}
    for info in store.list("manifest/"):
        parsed = parse_receipt_name(info.name)
        if parsed is not None:
            receipts[parsed[:2]] = max(receipts.get(parsed[:2], 0), parsed[2])
    if receipts and not writers:
        writers = _writers(store)  # consumers have removed all parts, or the store's first answer was no listing
    return dict.fromkeys(writers, 0) | receipts


def _writers(store: Store) -> set[Log]:
    return {part[:2] for info in store.list("data/") if (part := parse_part_name(info.name)) is not None}


def seal_logs(store: Store, logs: Mapping[Log, int], by: str) -> None:
    """Seal each log. When this returns, the receipts of these logs are final.

    ``logs``: by log, its highest known number. ``by``: the sealing process, for error messages.

    Raises:
        StoreError: raised by the store. Some of the logs may be sealed.
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
                continue  # the writer has stored a receipt under this number first
        return


def _is_sealed(store: Store, name: str) -> bool:
    return store.get(name, len(_SEAL)) == _SEAL


class LogReader:
    """Reads the receipts of all logs of attempts after ``after_attempt``, each receipt once.

    A read fetches the receipts stored since the last read, and lists at most two pages of known names in each log.
    """

    def __init__(self, after_attempt: int = 0):
        self._after = after_attempt
        #: By log: the number of the last receipt that was read; for a sealed log ``LARGEST_NUMBER``.
        self._read: dict[Log, int] = {}

    def read(self, store: Store) -> Iterator[Receipt]:
        """The new receipts, by attempt, writer and number.

        Raises:
            IntegrityError: a receipt is missing or damaged.
            FormatError: an object with a receipt's name is not a receipt.
            StoreError: raised by the store. Or a receipt exists that its listings lack.
        """
        return _before_seals(store, self._new(store), self._read)

    def require_ended(self, store: Store, logs: Iterable[Log], *, whole: bool = False) -> None:
        """Check that all receipts of ``logs``, which are sealed, were read. Ignores logs that this does not read.

        ``whole``: also check that the attempts of ``logs`` have no other logs, which were not sealed.

        Raises:
            StoreError: a seal was not read. This listing of the store lacks names, or an earlier one did.
        """
        wanted = {log for log in logs if log[0] > self._after}
        ended = {log for log, last in self._read.items() if last == LARGEST_NUMBER}
        _require_seals(store, wanted, self._read if whole else (), ended)

    def _new(self, store: Store) -> Iterator[ObjectInfo]:
        # "~" sorts after every writer's name. From 1000 on, later attempts may sort earlier: 10000 is before 1001.
        after = f"manifest/{self._after:04d}/~" if 0 < self._after < 1000 else None
        while True:
            log, known = None, 0
            for info in store.list("manifest/", after=after):
                entry = parse_receipt_name(info.name)
                if entry is None or entry[0] <= self._after:
                    continue
                last = self._read.get(entry[:2], 0)
                if entry[2] > last:
                    yield info
                    continue
                log, known = entry[:2], known + 1 if entry[:2] == log else 1
                if known == _PAGE and entry[2] < last:
                    after = _behind(log, last, info.name)
                    break
            else:
                return


def _behind(log: Log, last: int, name: str) -> str:
    """The name after which a listing finds the receipts of ``log`` with numbers above ``last``.

    ``name``: the name that the listing has reached. Names sort by their text: number 1,000,000 is before 100,001. If
    the wanted place is before ``name``, the result skips the rest of the log. All new receipts have then been listed,
    or the next read lists the others.
    """
    rest = f"{receipt_name(*log, 1).rpartition('/')[0]}/~"
    if last == LARGEST_NUMBER:
        return rest
    following = receipt_name(*log, last + 1)
    # 999,999 is followed by 1,000,000, whose name is next to that of 100,000.
    after = receipt_name(*log, last) if receipt_name(*log, last) < following else receipt_name(*log, (last + 1) // 10)
    return after if after > name else rest


def new_receipts(
    store: Store, known: Callable[[tuple[int, str, int]], bool], attempt: int, sealed: Iterable[Log] = ()
) -> Iterator[Receipt]:
    """The receipts of one ``attempt`` that are not ``known``. Raises like ``LogReader.read``, but does not detect
    gaps.

    ``sealed``: all logs of the attempt, if they are sealed. Raises like ``LogReader.require_ended`` with ``whole``.
    """
    listed = {e: i for i in store.list(f"manifest/{attempt:04d}/") if (e := parse_receipt_name(i.name))}
    ended: set[Log] = set()
    yield from _before_seals(store, (info for entry, info in listed.items() if not known(entry)), None, ended)
    _require_seals(store, set(sealed), (entry[:2] for entry in listed), ended)


def _require_seals(store: Store, sealed: set[Log], listed: Iterable[Log], ended: set[Log]) -> None:
    """Check that the ``sealed`` logs, and the ``listed`` logs of their attempts, are ``ended``."""
    attempts = {attempt for attempt, _ in sealed}
    for log in sorted(sealed.union(log for log in listed if log[0] in attempts) - ended):
        raise ObjectsMissing(
            f"{store.url}/{receipt_name(*log, 1).rpartition('/')[0]}: expected a listing with the seal stored "
            "there, got none: receipts may be missing too. Try again, or use another store"
        )


def receipts_up_to(store: Store, attempt: int) -> Iterator[Receipt]:
    """The receipts of the attempts up to ``attempt``, in order. Raises like ``LogReader.read``."""
    listed = store.list("manifest/")
    return _before_seals(store, (i for i in listed if (e := parse_receipt_name(i.name)) and e[0] <= attempt), {})


def _before_seals(
    store: Store, listed: Iterable[ObjectInfo], done: dict[Log, int] | None, ended: set[Log] | None = None
) -> Iterator[Receipt]:
    """The receipts of ``listed``, in each log up to its seal.

    ``done``: by log, the last number that was read. It is updated, and a missing number after it is an error. ``None``:
    gaps are not detected. ``ended``: gets the logs whose seal was read.
    """
    ended = set() if ended is None else ended
    sizes = {entry: info.size for info in listed if (entry := parse_receipt_name(info.name)) is not None}
    entries, budget = sorted(sizes), ByteBudget(_BYTES_AT_ONCE)

    def read(entry: tuple[int, str, int]) -> Receipt | HsxError | None:
        try:
            with budget.hold(sizes[entry]):
                return read_entry(store, receipt_name(*entry), sizes[entry])
        except HsxError as e:
            _clear_frames(e)
            return e  # raised below, unless the log ends before this entry

    unlisted: set[str] = set()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="hsx-receipts") as pool, ExitStack() as after:
        after.callback(pool.shutdown, cancel_futures=True)  # after an error no other receipt is read
        for (attempt, writer, number), found in zip(entries, pool.map(read, entries), strict=True):
            log = attempt, writer
            expected = number if done is None else done.get(log, 0) + 1
            if log in ended:
                continue
            if number != expected:
                _check_gap(store, log, expected, number)
                # The listing passed the name before the writer stored the object, or lacks names.
                unlisted.add(receipt_name(*log, expected))
                ended.add(log)
            elif isinstance(found, HsxError):
                raise found
            elif found is not None:
                yield found
                if done is not None:
                    done[log] = number
            else:
                ended.add(log)
                if done is not None:
                    done[log] = LARGEST_NUMBER
        # A web server's page may lack the last names without a word. Other stores say that a listing has more pages.
        if done is not None and store.url.startswith(("http://", "https://")):
            growing = [log for log, last in done.items() if last != LARGEST_NUMBER and log not in ended]
            following = [receipt_name(*log, done[log] + 1) for log in growing]
            unlisted |= {
                name
                for name, there in zip(following, pool.map(partial(exists, store), following), strict=True)
                if there
            }
    if unlisted:
        _require_listed(store, unlisted)


def _require_listed(store: Store, names: set[str]) -> None:
    """Check that a new listing has ``names`` of objects that exist. Raises ``ObjectsMissing``."""
    missing = names.difference(info.name for info in store.list("manifest/"))
    if missing:
        raise ObjectsMissing(
            f"{store.url}/{min(missing)}: expected a listing with this object, which exists, got one without it: "
            "receipts may be missing too. Let the server list whole folders, or use another store"
        )


def _clear_frames(error: BaseException | None) -> None:
    """Release the variables of the functions that raised ``error``, which hold the fetched bytes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _check_gap(store: Store, log: Log, expected: int, number: int) -> None:
    name = receipt_name(*log, expected)
    if not exists(store, name):
        raise IntegrityError(
            f"{store.url}/{name}: expected a receipt, got no object: {number - expected} missing before number "
            f"{number} of this writer. They were lost after they were written. Restore them. Or remove the writer's "
            "later receipts and run again, which extracts their samples again"
        )


def read_entry(store: Store, name: str, size: int | None = None) -> Receipt | None:
    """The receipt stored under ``name``; ``None`` for a seal. ``size``: the object's size, if known from a listing.

    Raises:
        NotFound, StoreError: raised by the store.
        IntegrityError, FormatError: the object is neither a receipt nor a seal.
    """
    data = get_small(store, name, _LARGEST_RECEIPT, size)
    if data.startswith(_SEAL):
        return None
    where = f"{store.url}/{name}"
    receipt = Receipt.from_json(data, where)
    if receipt.id != parse_receipt_name(name):
        raise FormatError(
            f"{where}: expected the receipt of that name, got {receipt_name(*receipt.id)}: an object was copied to "
            "another name. Restore it"
        )
    return receipt


def _who(seal: bytes) -> str:
    """The process that sealed a log, for error messages."""
    found = re.search(rb'"by":"([A-Za-z0-9 ]{1,80})"', seal)
    return found[1].decode() if found else "unknown"
