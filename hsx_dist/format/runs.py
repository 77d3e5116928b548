"""A run's own objects in a store: ``run.json``, attempts, heartbeats, receipts, completion."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from hsx_dist.errors import AlreadyExists, Fenced, FormatError, IntegrityError, NotFound, RunError
from hsx_dist.format.checksum import crc32c, crc32c_hex
from hsx_dist.format.compacted import pack_receipts, read_compacted
from hsx_dist.format.description import MAX_HEADER_BYTES
from hsx_dist.format.json_objects import MAX_JSON_BYTES, Check, check_members, get_small, read_json, shown
from hsx_dist.format.json_objects import count as count_check
from hsx_dist.format.manifest import (
    ATTEMPT_DIGITS,
    COMPLETE,
    LARGEST_NUMBER,
    RUN,
    Manifest,
    Receipt,
    attempt_name,
    compacted_name,
    heartbeat_name,
    parse_receipt_name,
    receipt_name,
)
from hsx_dist.format.run_members import ATTEMPT_MEMBERS, COMPLETE_MEMBERS, HEARTBEAT_MEMBERS, RUN_MEMBERS
from hsx_dist.store import Store

__all__ = [
    "COMPLETE",
    "RUN",
    "attempts_of",
    "beat",
    "is_fenced",
    "load_manifest",
    "newest_attempt",
    "read_attempt",
    "read_complete",
    "read_heartbeat",
    "read_receipt",
    "read_run",
    "receipts_of",
    "scan_receipts",
    "take_attempt",
    "write_complete",
    "write_run",
]

_RUN_FORMAT = "hsx-run/1"
_COMPLETE_FORMAT = "hsx-complete/1"
_ATTEMPT = re.compile(rf"attempts/({ATTEMPT_DIGITS})\.json")
_READERS = 16
#: No part has a longer header, and a segment takes more of it than of a receipt.
_LARGEST_RECEIPT = MAX_HEADER_BYTES


def write_run(store: Store, info: Mapping[str, Any]) -> None:
    """Make the run: store ``run.json``, which must hold no credentials.

    Raises:
        RunError: another one was made here in the meantime.
    """
    body = _dump({"format": _RUN_FORMAT, **info})
    if not _put_own(store, RUN, body):
        raise RunError(
            f"{store.url}: expected no {RUN}, and there is one: another driver has just started a run here. Start "
            "again to go on with it, or choose another output"
        )


def read_run(store: Store) -> dict[str, Any]:
    """What ``run.json`` says. Raises ``RunError`` when there is none, ``FormatError`` when it cannot be read."""
    found = _read_json(store, RUN, RUN_MEMBERS)
    if found is None:
        raise RunError(f"no run at {store.url}: expected {RUN} there; check the path, or that the run has been started")
    _check_format(found, _RUN_FORMAT, f"{store.url}/{RUN}")
    return found


def take_attempt(store: Store, info: Mapping[str, Any]) -> int:
    """Take the run's next attempt, which fences off all before it; returns its number, from 1.

    ``info`` (host, settings, …; no credentials) is stored for people to read.
    """
    # The token makes the body ours alone: read back, it tells a lost answer from a lost race.
    own = {"token": uuid.uuid4().hex, "created": datetime.now(UTC).isoformat(timespec="seconds")}
    attempt = newest_attempt(store) + 1
    while not _put_own(store, attempt_name(attempt), _dump({**info, "attempt": attempt, **own})):
        attempt += 1
    return attempt


def read_attempt(store: Store, attempt: int) -> dict[str, Any] | None:
    """What the holder of an attempt said of itself (host, pid, settings, created); ``None`` when nobody took it."""
    return _read_json(store, attempt_name(attempt), ATTEMPT_MEMBERS)


def newest_attempt(store: Store) -> int:
    """The highest attempt that anybody took; 0 when none was."""
    return max(attempts_of(store), default=0)


def attempts_of(store: Store) -> list[int]:
    """The attempts that were taken, as listed: a name may claim any number, so that counting up to it is no way."""
    found = (_ATTEMPT.fullmatch(info.name) for info in store.list("attempts/"))
    return sorted(int(m[1]) for m in found if m)


def is_fenced(store: Store, attempt: int) -> bool:
    """Whether a newer attempt was taken. Attempts have no gaps, so that one request tells."""
    try:
        store.head(attempt_name(attempt + 1))
    except NotFound:
        return False
    return True


def beat(store: Store, attempt: int, value: int, state: str, progress: Mapping[str, Any] | None = None) -> None:
    """Store the attempt's heartbeat: a ``value`` other than the last says that its holder lives, by nobody's clock.

    ``progress``: what its holder knows and receipts do not tell (JSON types), for people, ``hsx top`` and
    ``hsx report``; no decision rests on it.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    body = {"attempt": attempt, "value": value, "state": state, "time": now, "progress": dict(progress or {})}
    store.put(heartbeat_name(attempt), [_dump(body)])


def read_heartbeat(store: Store, attempt: int) -> dict[str, Any] | None:
    """``{"attempt", "value", "state", "time", "progress"}`` as last stored; ``None`` before the first beat."""
    return _read_json(store, heartbeat_name(attempt), HEARTBEAT_MEMBERS)


def load_manifest(store: Store) -> Manifest:
    """The manifest of the run: the compacted one where the run is complete, and the receipts since.

    Raises:
        IntegrityError: a receipt is missing or damaged.
        FormatError: something is there that is no receipt.
    """
    return Manifest(scan_receipts(store))


def scan_receipts(store: Store) -> Iterator[Receipt]:
    """The receipts that ``load_manifest`` reads, one after the other, with the same errors."""
    complete = read_complete(store)
    after = 0
    if complete is not None:
        yield from read_compacted(store, complete)
        after = int(complete["attempt"])
    found = _receipt_sizes(store, after)
    with ThreadPoolExecutor(_READERS, thread_name_prefix="hsx-receipts") as pool:
        yield from pool.map(lambda item: read_receipt(store, *item), found.items())


def receipts_of(store: Store, attempt: int, *, known: Manifest) -> Iterator[Receipt]:
    """The stored receipts of one attempt that are not in ``known``."""
    listed = ((parse_receipt_name(info.name), info) for info in store.list(f"manifest/{attempt:04d}/"))
    found = [info for parsed, info in listed if parsed is not None and not known.has_receipt(parsed)]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="hsx-receipts") as pool:
        yield from pool.map(lambda info: read_receipt(store, info.name, info.size), found)


def check_receipts(store: Store) -> Iterator[tuple[str, str]]:
    """Of a complete run, the single receipts behind the compacted manifest: (name, what is wrong with it).

    Readers do not need them; but whoever removes a damaged compacted manifest does.
    """
    complete = read_complete(store)
    if complete is None:
        return  # ``load_manifest`` has read them
    compacted = {receipt_name(*r.id): r for r in read_compacted(store, complete)}
    found = {info.name: info.size for info in store.list("manifest/") if parse_receipt_name(info.name) is not None}
    for name, receipt in sorted(compacted.items()):
        if name not in found:
            yield name, f"expected the receipt that {COMPLETE} counts, it is not there"
            continue
        try:
            if read_receipt(store, name, found[name]) != receipt:
                yield name, "differs from what the compacted manifest says"
        except FormatError as e:
            yield name, str(e)


def write_complete(store: Store, attempt: int, manifest: Manifest, summary: Mapping[str, Any]) -> None:
    """Mark the run as complete: the compacted manifest, then ``complete.json`` with counts and ``summary``.

    Raises:
        Fenced: a newer attempt was taken.
    """
    if is_fenced(store, attempt):
        raise Fenced(
            f"attempt {attempt} of {store.url} is no longer the newest: another driver took over; it completes the run"
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
    store.put(COMPLETE, [_dump(body)])


def count(manifest: Manifest) -> dict[str, int]:
    """The counts that ``complete.json`` holds, of what readers see."""
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
        "conflicts": len(manifest.conflicts),
    }


def read_complete(store: Store) -> dict[str, Any] | None:
    """``complete.json``; ``None`` when the run is not complete. Raises ``FormatError`` when it cannot be read."""
    found = _read_json(store, COMPLETE, COMPLETE_MEMBERS)
    if found is None:
        return None
    where = f"{store.url}/{COMPLETE}"
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
            f"{where}: expected attempt, counts, and the compacted manifest's name and sizes. It is damaged"
        )
    found.setdefault("summary", {})
    return found


def _receipt_sizes(store: Store, after_attempt: int) -> dict[str, int]:
    """Names and sizes of the receipts of later attempts, each writer's checked to be without gaps."""
    # "~" sorts behind every writer's name.
    after = f"manifest/{after_attempt:04d}/~" if 0 < after_attempt < 9999 else None
    numbers: dict[tuple[int, str], dict[int, int]] = {}
    for info in store.list("manifest/", after=after):
        parsed = parse_receipt_name(info.name)
        if parsed is not None and parsed[0] > after_attempt:
            numbers.setdefault(parsed[:2], {})[parsed[2]] = info.size
    sizes: dict[str, int] = {}
    for (attempt, writer), found in sorted(numbers.items()):
        last = max(found)
        # Whatever number a name claims, as many are looked at as there are names.
        first = next((seq for seq in range(1, len(found) + 1) if seq not in found), None)
        if first is not None:
            raise IntegrityError(
                f"{store.url}/{receipt_name(attempt, writer, first)} is missing ({last - len(found)} of {last} "
                "of this writer): receipts have no gaps, so it was lost after it was written. Restore it; or remove "
                "the writer's later receipts, and run again: what they prove is then extracted anew"
            )
        sizes |= {receipt_name(attempt, writer, seq): found[seq] for seq in sorted(found)}
    return sizes


def read_receipt(store: Store, name: str, size: int | None = None) -> Receipt:
    """The receipt stored under ``name``, of ``size`` bytes if listed. Errors: ``NotFound``, ``load_manifest``'s."""
    where = f"{store.url}/{name}"
    receipt = Receipt.from_json(get_small(store, name, _LARGEST_RECEIPT, size), where)
    if receipt.id != parse_receipt_name(name):
        raise FormatError(f"{where}: expected the receipt of that name, got {receipt_name(*receipt.id)}")
    return receipt


def _put_own(store: Store, name: str, body: bytes) -> bool:
    """Create an object; whether it is ours, also when the answer to an earlier try was lost."""
    try:
        store.put_if_absent(name, body)
    except AlreadyExists:
        return get_small(store, name, MAX_JSON_BYTES) == body
    return True


def _dump(value: Mapping[str, Any]) -> bytes:
    body = json.dumps(value, indent=1, allow_nan=False).encode() + b"\n"
    if len(body) > MAX_JSON_BYTES:  # nothing is stored that is refused when it is read
        raise RunError(f"expected at most {MAX_JSON_BYTES} bytes of settings, got {len(body)}. Shorten them")
    return body


def _read_json(store: Store, name: str, checks: Mapping[str, Check]) -> dict[str, Any] | None:
    try:
        found = read_json(store, name)
    except NotFound:
        return None
    check_members(found, checks, f"{store.url}/{name}")
    return found


def _check_format(found: Mapping[str, Any], expected: str, where: str) -> None:
    if found.get("format") != expected:
        raise FormatError(
            f"{where}: expected format {expected!r}, got {shown(found.get('format'))}; update hsx_dist to read it"
        )
