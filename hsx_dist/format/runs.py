"""A run's objects in its store: attempts, heartbeats, the manifest, completion."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from hsx_dist.errors import Fenced, FormatError
from hsx_dist.format.checksum import crc32c, crc32c_hex
from hsx_dist.format.compacted import pack_receipts, read_compacted
from hsx_dist.format.json_objects import (
    MemberCheck,
    anything,
    dump_json,
    find_json,
    holds_json,
    members,
    number,
    object_of,
    or_null,
    put_own,
    shown,
    text,
)
from hsx_dist.format.json_objects import count as count_check
from hsx_dist.format.manifest import Manifest, Receipt
from hsx_dist.format.names import (
    ATTEMPT_DIGITS,
    LARGEST_NUMBER,
    attempt_name,
    closed_name,
    compacted_name,
    complete_name,
    heartbeat_name,
    parse_receipt_name,
    receipt_name,
)
from hsx_dist.format.place import RunFolder
from hsx_dist.format.presence import unlisted
from hsx_dist.format.receipt_log import Log, LogReader, list_logs, read_entry, seal_logs
from hsx_dist.store import Store

__all__ = [
    "DRIVER",
    "all_receipts",
    "attempts_of",
    "beat",
    "check_receipts",
    "count",
    "close_attempt",
    "is_complete",
    "is_fenced",
    "load_manifest",
    "newest_and_complete",
    "newest_attempt",
    "read_attempt",
    "read_complete",
    "read_completion",
    "read_heartbeat",
    "refuse_version_1",
    "receipts_after",
    "seal_attempts",
    "take_attempt",
    "version_1_refuses",
    "write_complete",
]

#: Writer name of an attempt's driver. Its log has the fates of rows without a sample.
DRIVER = "driver"
#: Writer name of a log that this version seals in each attempt that continues a version 1 run.
_VERSION_2 = "version-2"
#: Version 1's name for the object of ``complete_name``.
_COMPLETE_V1 = "complete.json"
_COMPLETE_FORMAT = "hsx-complete/1"
_ATTEMPT = re.compile(rf"attempts/({ATTEMPT_DIGITS})\.json")
_COMPLETED = re.compile(rf"attempts/({ATTEMPT_DIGITS})\.complete\.json")
#: Checks of the members of a run's objects. Members without a check may have any value.
_PROGRESS = {
    **dict.fromkeys(
        ("rows", "tokens", "raw_bytes", "stored_bytes", "in_flight", "replicas", "under_way"), or_null(count_check)
    ),
    **dict.fromkeys(("tokens_per_second", "seconds", "engines_timestamp"), or_null(number)),
    "fates": object_of(or_null(count_check)),
    "counted": object_of(number),
    "paused": or_null(text),
}

_ATTEMPT_MEMBERS: dict[str, MemberCheck] = {"created": text, "host": text, "settings": object_of(anything)}
_HEARTBEAT_MEMBERS: dict[str, MemberCheck] = {
    "attempt": count_check,
    "value": or_null(number),
    "state": text,
    "time": or_null(text),
    "progress": or_null(members(_PROGRESS)),
}
_COMPLETE_MEMBERS: dict[str, MemberCheck] = {
    "counts": object_of(count_check),
    "summary": members({"rows": or_null(count_check)}),
    "created": text,
}


def take_attempt(store: Store, info: Mapping[str, Any]) -> int:
    """Take the run's next attempt and close all earlier ones. Returns its number, from 1.

    ``info`` (host, settings, …; no credentials) is stored for people to read.
    """
    # The token makes the body unique. Read back, it shows whether our put succeeded with a lost response, or another
    # process took the attempt. Writers on other nodes compare it with their store's.
    own = {"token": uuid.uuid4().hex, "created": datetime.now(UTC).isoformat(timespec="seconds")}
    attempt = newest_attempt(store) + 1
    while not put_own(store, attempt_name(attempt), dump_json({**info, "attempt": attempt, **own})):
        attempt += 1
    # List after the put. An attempt is taken only after all earlier ones, so the listing has every earlier one.
    names = _listed(store, attempt)
    for earlier in _attempts(names):
        if earlier < attempt and closed_name(earlier) not in names:
            _close(store, earlier, attempt)
    return attempt


def _close(store: Store, attempt: int, by: int) -> None:
    store.put(closed_name(attempt), [dump_json({"by": by})])


def seal_attempts(store: Store, last: int, by: int) -> list[Log]:
    """Seal the logs of all writers of the attempts up to ``last``, which are closed. When this returns, the receipts of
    those attempts are final. ``by``: the attempt that seals them, which is taken. Returns the logs.

    A writer that has not stored a part yet has no log to seal. It cannot store a receipt either, because after it has
    stored a part it checks whether its attempt is closed.
    """
    return _seal(store, [attempt for attempt in _attempts(_listed(store, by)) if attempt <= last], by)


def _seal(store: Store, attempts: Sequence[int], by: int) -> list[Log]:
    # The name of a driver's log follows from its attempt, so that it can be sealed before it has an object.
    logs = {(attempt, DRIVER): 0 for attempt in attempts}
    logs |= {log: number for log, number in list_logs(store).items() if log[0] in attempts}
    seal_logs(store, logs, f"attempt {by}")
    return list(logs)


def refuse_version_1(store: Store, attempt: int) -> None:
    """Prevent a version 1 driver from running at the same time. It reads the seal as a damaged receipt, and refuses to
    start."""
    seal_logs(store, {(attempt, _VERSION_2): 0}, f"attempt {attempt}")


def version_1_refuses(store: Store, attempt: int) -> bool:
    """Whether ``refuse_version_1`` was called in ``attempt``, which this version or a later one then took."""
    return holds_json(store, receipt_name(attempt, _VERSION_2, 1))


def close_attempt(store: Store, attempt: int) -> list[Log]:
    """Stop the writers of the caller's attempt, after the last row. When this returns, their receipts are final.
    Returns their logs.

    Without this, a writer that the driver has abandoned could prove a sample after the manifest was compacted. A reader
    would see that sample only until the attempt is complete.
    """
    _close(store, attempt, attempt)
    return _seal(store, [attempt], attempt)


def read_attempt(store: Store, attempt: int) -> dict[str, Any] | None:
    """The attempt's object, from its holder (host, pid, settings, created); ``None`` when the attempt is not taken."""
    return find_json(store, attempt_name(attempt), _ATTEMPT_MEMBERS)


def newest_attempt(store: Store) -> int:
    """The highest attempt that was taken; 0 without one."""
    return max(attempts_of(store), default=0)


def attempts_of(store: Store) -> list[int]:
    """The numbers of the attempts, from a listing. A forged name may have any number, so callers must not loop up to
    it."""
    return _attempts(_listed(store))


def _listed(store: Store, taken: int = 0) -> set[str]:
    """The names below ``attempts/``. Raises ``ObjectsMissing`` if the listing lacks the attempt ``taken``, or has no
    attempt although the first one exists."""
    names = {info.name for info in store.list("attempts/")}
    if not taken and not _attempts(names) and is_fenced(store, 0):
        taken, names = 1, {info.name for info in store.list("attempts/")}  # perhaps it was taken since
    if taken and attempt_name(taken) not in names:
        raise unlisted(store, attempt_name(taken), "other attempts")
    return names


def _attempts(names: Iterable[str]) -> list[int]:
    return sorted(int(m[1]) for m in map(_ATTEMPT.fullmatch, names) if m)


def is_complete(store: Store) -> bool:
    """Whether the newest attempt accounted for every row. The completion of an earlier attempt does not count."""
    return read_completion(store)[1]


def read_completion(store: Store) -> tuple[dict[str, Any] | None, bool]:
    """The completion object of the last completed attempt, and whether the run is complete: no attempt follows it."""
    newest, complete = newest_and_complete(store)
    # Check the next attempt after the listing, which may miss an attempt that was taken during it.
    over = complete is not None and complete["attempt"] >= newest and not is_fenced(store, complete["attempt"])
    return complete, over


def is_fenced(store: Store, attempt: int) -> bool:
    """Whether a newer attempt was taken. Attempts have no gaps, so one request is enough."""
    return holds_json(store, attempt_name(attempt + 1))


def beat(store: Store, attempt: int, value: int, state: str, progress: Mapping[str, Any] | None = None) -> None:
    """Store the attempt's heartbeat. A changed ``value`` shows that the holder is alive, without comparing clocks.

    ``progress``: the holder's counts and rates that receipts do not have (JSON types), for people, ``hsx top`` and
    ``hsx report``. No decision depends on it.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    body = {"attempt": attempt, "value": value, "state": state, "time": now, "progress": dict(progress or {})}
    store.put(heartbeat_name(attempt), [dump_json(body)])


def read_heartbeat(store: Store, attempt: int) -> dict[str, Any] | None:
    """``{"attempt", "value", "state", "time", "progress"}`` as last stored; ``None`` before the first beat."""
    return find_json(store, heartbeat_name(attempt), _HEARTBEAT_MEMBERS)


def load_manifest(store: Store, sealed: Iterable[Log] = ()) -> Manifest:
    """The manifest of the run: the compacted manifest of the last completed attempt, if any, and all later receipts.

    ``sealed``: the logs of ``seal_attempts``, if the caller relies on their receipts.

    Raises:
        IntegrityError: a receipt is missing or damaged.
        FormatError: an object with a receipt's name is not a receipt.
        StoreError: the store's listing lacks a seal of ``sealed``, or the listing of ``seal_attempts`` lacked a log.
    """
    return Manifest(receipts_after(store, read_complete(store), sealed))


def receipts_after(store: Store, complete: Mapping[str, Any] | None, sealed: Iterable[Log] = ()) -> Iterator[Receipt]:
    """Iterate over the receipts that ``load_manifest`` reads. Raises the same errors.

    ``complete``: the result of ``read_complete``, called before this.
    """
    after = 0
    if complete is not None:
        yield from read_compacted(store, complete)
        after = int(complete["attempt"])
    logs = LogReader(after)
    yield from logs.read(store)
    logs.require_ended(store, sealed, whole=True)


def all_receipts(store: Store, sealed: Iterable[Log] = ()) -> Iterator[Receipt]:
    """Every receipt that any reader may use: those of the compacted manifest, then all single ones. A receipt may occur
    twice.

    Raises:
        StoreError: the listing lacks the seal of a ``sealed`` log. Also raises like ``load_manifest``.
    """
    complete = read_complete(store)
    if complete is not None:
        yield from read_compacted(store, complete)
    logs = LogReader()
    yield from logs.read(store)
    logs.require_ended(store, sealed)


def check_receipts(store: Store, compacted: Iterable[Receipt]) -> Iterator[tuple[str, str]]:
    """Compare the single receipts of a complete run with ``compacted``, those of its compacted manifest. Yields (name,
    error) for wrong ones.

    Readers do not need the single receipts, unless an operator removes a damaged compacted manifest.
    """
    found = {info.name: info.size for info in store.list("manifest/") if parse_receipt_name(info.name) is not None}
    for receipt in compacted:
        name = receipt_name(*receipt.id)
        if name not in found:
            yield name, "expected a receipt, as in the compacted manifest, got no object"
            continue
        try:
            if read_entry(store, name, found[name]) != receipt:
                yield name, "expected the same receipt as in the compacted manifest, got another"
        except FormatError as e:
            yield name, str(e)


def write_complete(store: Store, attempt: int, manifest: Manifest, summary: Mapping[str, Any]) -> None:
    """Mark the run as complete: the compacted manifest, then ``complete_name``'s object with counts and ``summary``.

    Raises:
        Fenced: a newer attempt was taken.
    """
    if is_fenced(store, attempt):
        raise Fenced(
            f"attempt {attempt} of {store.url} is no longer the newest: another driver took over, and completes the run"
        )
    packed, raw_size = pack_receipts(manifest.receipts)
    name = compacted_name(attempt)
    store.put(name, [packed])
    body = {
        "format": _COMPLETE_FORMAT,
        "attempt": attempt,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "manifest": {
            "name": name,
            "size": len(packed),
            "crc32c": crc32c_hex(crc32c(packed)),
            "raw_size": raw_size,
            "receipts": len(manifest.receipts),
        },
        "counts": count(manifest),
        "summary": dict(summary),
    }
    store.put(complete_name(attempt), [dump_json(body)])


def count(manifest: Manifest) -> dict[str, int]:
    """The counts over what readers see, as a completed attempt stores them."""
    totals = manifest.totals()
    return {
        "samples": totals.samples,
        "tokens": totals.tokens,
        "segments": totals.segments,
        "parts": totals.parts,
        "raw_bytes": totals.raw_bytes,
        "stored_bytes": totals.stored_bytes,
        "refused": len(manifest.refused),
        "failed": len(manifest.failed),
        "conflicts": manifest.num_conflicts,
    }


def newest_and_complete(store: Store) -> tuple[int, dict[str, Any] | None]:
    """The newest attempt (0: none) and the completion object of the last completed one, from one listing.

    Raises ``FormatError`` like ``read_complete``.
    """
    names = _listed(store)
    completed = max((int(m[1]) for m in map(_COMPLETED.fullmatch, names) if m), default=0)
    return max(_attempts(names), default=0), _find_complete(store, completed)


def read_complete(store: Store, attempt: int | None = None) -> dict[str, Any] | None:
    """The completion object of ``attempt``, by default of the last completed attempt; ``None`` when there is none.

    Raises ``FormatError`` when it is not valid.
    """
    if attempt is None:
        return newest_and_complete(store)[1]
    found = _find_complete(store, attempt)
    return found if found is not None and found["attempt"] == attempt else None


def _find_complete(store: Store, attempt: int) -> dict[str, Any] | None:
    """The completion object of ``attempt``, else that of version 1. ``attempt`` 0: only that of version 1."""
    names = [complete_name(attempt)] if attempt else []
    if not isinstance(store, RunFolder):
        names.append(_COMPLETE_V1)
    for name in names:
        found = find_json(store, name, _COMPLETE_MEMBERS)
        if found is not None:
            break
    else:
        return None
    where = f"{store.url}/{name}"
    _check_format(found, _COMPLETE_FORMAT, where)
    about = found.get("manifest")
    numbers = ("size", "raw_size", "receipts")
    if (
        type(found.get("attempt")) is not int
        or not 1 <= found["attempt"] <= LARGEST_NUMBER
        or "counts" not in found
        or not isinstance(about, dict)
        or any(count_check(about.get(n)) is not None for n in numbers)
        or about.get("name") != compacted_name(found["attempt"])
    ):
        raise FormatError(
            f"{where}: expected attempt, counts, and the compacted manifest's name and sizes, got {shown(found)} "
            "without one of them or with a wrong value. Restore the object"
        )
    if name != _COMPLETE_V1 and found["attempt"] != attempt:
        raise FormatError(
            f"{where}: expected the object of attempt {attempt}, got that of attempt {found['attempt']}: it was copied "
            "to another name. Remove it"
        )
    found.setdefault("summary", {})
    return found


def _check_format(found: Mapping[str, Any], expected: str, where: str) -> None:
    if found.get("format") != expected:
        raise FormatError(
            f"{where}: expected format {expected!r}, got {shown(found.get('format'))}. Update hsx_dist to read it"
        )
