"""A run's own objects in a store: ``run.json``, attempts, heartbeats, receipts, completion."""

from __future__ import annotations

import io
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import zstandard

from hsx_dist.errors import AlreadyExists, Fenced, FormatError, IntegrityError, NotFound, RunError
from hsx_dist.format.checksum import crc32c, crc32c_hex
from hsx_dist.format.manifest import (
    COMPLETE,
    RUN,
    Manifest,
    Receipt,
    attempt_name,
    compacted_name,
    heartbeat_name,
    parse_receipt_name,
    receipt_name,
)
from hsx_dist.store import Store

__all__ = [
    "COMPLETE",
    "RUN",
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
_ATTEMPT = re.compile(r"attempts/(\d{4,})\.json")
_READERS = 16
_LARGEST_JSON = 256 << 20
_LARGEST_COMPACTED = 64 << 30


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
    found = _read_json(store, RUN)
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
    return _read_json(store, attempt_name(attempt))


def newest_attempt(store: Store) -> int:
    """The highest attempt that anybody took; 0 when none was."""
    found = (_ATTEMPT.fullmatch(info.name) for info in store.list("attempts/"))
    return max((int(m[1]) for m in found if m), default=0)


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
    return _read_json(store, heartbeat_name(attempt))


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
        yield from _read_compacted(store, complete)
        after = int(complete["attempt"])
    names = _receipt_names(store, after)
    with ThreadPoolExecutor(_READERS, thread_name_prefix="hsx-receipts") as pool:
        yield from pool.map(lambda name: read_receipt(store, name), names)


def receipts_of(store: Store, attempt: int, *, known: Manifest) -> Iterator[Receipt]:
    """The stored receipts of one attempt that are not in ``known``."""
    found = (parse_receipt_name(info.name) for info in store.list(f"manifest/{attempt:04d}/"))
    names = [receipt_name(*parsed) for parsed in found if parsed is not None and not known.has_receipt(parsed)]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="hsx-receipts") as pool:
        yield from pool.map(lambda name: read_receipt(store, name), names)


def check_receipts(store: Store) -> Iterator[tuple[str, str]]:
    """Of a complete run, the single receipts behind the compacted manifest: (name, what is wrong with it).

    Readers do not need them; but whoever removes a damaged compacted manifest does.
    """
    complete = read_complete(store)
    if complete is None:
        return  # ``load_manifest`` has read them
    compacted = {receipt_name(*r.id): r for r in _read_compacted(store, complete)}
    found = {info.name for info in store.list("manifest/") if parse_receipt_name(info.name) is not None}
    for name, receipt in sorted(compacted.items()):
        if name not in found:
            yield name, f"expected the receipt that {COMPLETE} counts, it is not there"
            continue
        try:
            if read_receipt(store, name) != receipt:
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
    packed, raw_size = _pack(manifest.receipts)
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


def _pack(receipts: Sequence[Receipt]) -> tuple[bytes, int]:
    """One line a receipt, compressed; and the lines' size. A line at a time: all of them may be gigabytes."""
    compressor = zstandard.ZstdCompressor(level=3).compressobj()
    packed, size = [], 0
    for receipt in receipts:
        line = receipt.to_json() + b"\n"
        size += len(line)
        packed.append(compressor.compress(line))
    packed.append(compressor.flush())
    return b"".join(packed), size


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
    found = _read_json(store, COMPLETE)
    if found is None:
        return None
    where = f"{store.url}/{COMPLETE}"
    _check_format(found, _COMPLETE_FORMAT, where)
    about = found.get("manifest")
    numbers = ("size", "raw_size", "receipts")
    if (
        type(found.get("attempt")) is not int
        or found["attempt"] < 1
        or not isinstance(found.get("counts"), dict)
        or not isinstance(about, dict)
        or any(type(about.get(n)) is not int or not 0 <= about[n] <= _LARGEST_COMPACTED for n in numbers)
        or about.get("name") != compacted_name(found["attempt"])
    ):
        raise FormatError(
            f"{where}: expected attempt, counts, and the compacted manifest's name and sizes. It is damaged"
        )
    return found


def _read_compacted(store: Store, complete: Mapping[str, Any]) -> Iterator[Receipt]:
    about = complete["manifest"]
    where = f"{store.url}/{about['name']}"
    try:
        packed = store.get(about["name"])
    except NotFound as e:
        raise IntegrityError(f"{where}: {COMPLETE} names this compacted manifest, and it is not there") from e
    found = crc32c_hex(crc32c(packed))
    if len(packed) != about["size"] or found != about.get("crc32c"):
        raise IntegrityError(
            f"{where}: expected {about['size']} bytes with crc32c {about.get('crc32c')}, found {len(packed)} with "
            f"{found}. Restore it, or remove {COMPLETE} so that the single receipts are read"
        )
    size = number = 0
    try:
        with zstandard.ZstdDecompressor().stream_reader(packed) as reader:
            lines = io.BufferedReader(reader, 1 << 20)  # type: ignore[type-var]  # it has what is used of a raw stream
            # What is larger than promised is never allocated.
            while line := lines.readline(about["raw_size"] + 1 - size):
                size += len(line)
                number += 1
                if size > about["raw_size"] or number > about["receipts"]:
                    break
                yield Receipt.from_json(line.rstrip(b"\n"), f"{where}, line {number}")
    except zstandard.ZstdError as e:
        raise FormatError(f"{where}: expected a zstandard frame: {e}") from e
    if (size, number) != (about["raw_size"], about["receipts"]):
        raise FormatError(
            f"{where}: expected {about['receipts']} receipts of {about['raw_size']} bytes in all, found others"
        )


def _receipt_names(store: Store, after_attempt: int) -> list[str]:
    """The receipts of later attempts, each writer's checked to be without gaps."""
    # "~" sorts behind every writer's name.
    after = f"manifest/{after_attempt:04d}/~" if 0 < after_attempt < 9999 else None
    numbers: dict[tuple[int, str], list[int]] = {}
    for info in store.list("manifest/", after=after):
        parsed = parse_receipt_name(info.name)
        if parsed is None or parsed[0] <= after_attempt:
            continue
        if info.size > _LARGEST_JSON:
            raise FormatError(f"{store.url}/{info.name}: {info.size} bytes are no receipt")
        numbers.setdefault(parsed[:2], []).append(parsed[2])
    names: list[str] = []
    for (attempt, writer), found in sorted(numbers.items()):
        missing = sorted(set(range(1, max(found) + 1)).difference(found))
        if missing:
            raise IntegrityError(
                f"{store.url}/{receipt_name(attempt, writer, missing[0])} is missing ({len(missing)} of {max(found)} "
                "of this writer): receipts have no gaps, so it was lost after it was written. Restore it; or remove "
                "the writer's later receipts, and run again: what they prove is then extracted anew"
            )
        names += [receipt_name(attempt, writer, seq) for seq in sorted(found)]
    return names


def read_receipt(store: Store, name: str) -> Receipt:
    """The receipt stored under ``name``. ``NotFound``, or errors as ``load_manifest``'s."""
    where = f"{store.url}/{name}"
    receipt = Receipt.from_json(store.get(name), where)
    if receipt.id != parse_receipt_name(name):
        raise FormatError(f"{where}: it says that it is {receipt_name(*receipt.id)}; it lies under a wrong name")
    return receipt


def _put_own(store: Store, name: str, body: bytes) -> bool:
    """Create an object; whether it is ours, also when the answer to an earlier try was lost."""
    try:
        store.put_if_absent(name, body)
    except AlreadyExists:
        return store.get(name) == body
    return True


def _dump(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode() + b"\n"


def _read_json(store: Store, name: str) -> dict[str, Any] | None:
    try:
        data = store.get(name)
    except NotFound:
        return None
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{store.url}/{name}: not JSON: {e}") from e
    if not isinstance(found, dict):
        raise FormatError(f"{store.url}/{name}: expected a JSON object, came a {type(found).__name__}")
    return found


def _check_format(found: Mapping[str, Any], expected: str, where: str) -> None:
    if found.get("format") != expected:
        raise FormatError(
            f"{where}: expected format {expected!r}, came {found.get('format')!r}; update hsx_dist to read it"
        )
