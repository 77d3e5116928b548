"""A run's small objects in a store: who may write (attempts), what was asked, what is proven.

Everything here is small, whole-object, and created at most once, but for the heartbeat.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import zstandard

from hsx_dist.errors import AlreadyExists, FormatError, IntegrityError, NotFound, RunError
from hsx_dist.format.checksum import crc32c
from hsx_dist.format.manifest import (
    COMPLETE,
    FORMAT,
    RUN,
    Manifest,
    Receipt,
    attempt_name,
    compacted_name,
    heartbeat_name,
    receipts_prefix,
)
from hsx_dist.store import Store

#: Receipts fetched at once: they are small, and a store's latency is not.
FETCHES = 16
#: A compacted manifest of a million samples takes about 200 MB; what says to be larger than this is not believed.
MAX_COMPACTED_BYTES = 16 << 30

_ATTEMPT = re.compile(r"attempts/(\d{4,})\.json")


def newest_attempt(store: Store) -> int:
    """The newest attempt's number; 0 when there is none."""
    return max((int(m[1]) for o in store.list("attempts/") if (m := _ATTEMPT.fullmatch(o.name))), default=0)


def take_attempt(store: Store, info: Mapping[str, Any]) -> int:
    """Become the run's newest attempt; every earlier one is fenced off from here. Returns its number (from 1)."""
    number = newest_attempt(store)
    body = {"format": FORMAT, "started": datetime.now(UTC).isoformat(timespec="seconds"), **info}
    while True:
        number += 1
        try:
            store.put_if_absent(attempt_name(number), _dump({**body, "attempt": number}))
        except AlreadyExists:
            continue  # another driver was quicker: ours must be newer than its
        return number


def is_fenced(store: Store, attempt: int) -> bool:
    """Whether a newer attempt exists. Numbers have no gaps, so the next one tells."""
    try:
        store.head(attempt_name(attempt + 1))
    except NotFound:
        return False
    return True


def beat(store: Store, attempt: int, value: int, state: str) -> None:
    """Change the attempt's heartbeat (observers compare values, not clocks); ``state``: running, finished, failed …"""
    store.put(heartbeat_name(attempt), [_dump({"value": value, "state": state})])


def read_heartbeat(store: Store, attempt: int) -> dict[str, Any] | None:
    """``{"value", "state"}``, or None before the first beat."""
    try:
        return _load(store.get(heartbeat_name(attempt)), heartbeat_name(attempt))
    except NotFound:
        return None


def write_run(store: Store, run: Mapping[str, Any]) -> None:
    """Say what was asked for; the first to say so wins, and ``AlreadyExists`` goes to the others."""
    store.put_if_absent(RUN, _dump({"format": FORMAT, **run}))


def read_run(store: Store) -> dict[str, Any]:
    """Raises:
    RunError: there is no run here.
    FormatError: it is of a format that is not known here.
    """
    try:
        run = _load(store.get(RUN), RUN)
    except NotFound:
        raise RunError(
            f"no run at {store.url}: expected {RUN} there; check the path, or the credentials' view of it"
        ) from None
    if run.get("format") != FORMAT:
        raise FormatError(f"{RUN}: expected format {FORMAT}, got {run.get('format')!r}; read it with a newer hsx-dist")
    return run


def read_complete(store: Store) -> dict[str, Any] | None:
    """What the last attempt that ended said, or None while no attempt has ended."""
    try:
        return _load(store.get(COMPLETE), COMPLETE)
    except NotFound:
        return None


def load_manifest(store: Store) -> Manifest:
    """All receipts: those of the attempts that ended from the compacted manifest, later ones one by one.

    Raises:
        IntegrityError: a receipt or the compacted manifest was changed, or a writer's numbers have a gap.
        FormatError: something that is no receipt lies among them.
    """
    complete = read_complete(store)
    manifest, after = Manifest(), 0
    if complete is not None:
        manifest = _read_compacted(store, complete)
        after = int(complete["attempt"])
    names = [
        info.name
        for attempt in range(after + 1, newest_attempt(store) + 1)
        for info in store.list(receipts_prefix(attempt))
        if info.name.endswith(".json")
    ]
    with ThreadPoolExecutor(FETCHES) as pool:
        for name, data in zip(names, pool.map(store.get, names), strict=True):
            manifest.add(Receipt.from_json(data, name))
    manifest.check_gapless()
    return manifest


def write_complete(store: Store, attempt: int, manifest: Manifest, summary: Mapping[str, Any]) -> None:
    """Store the compacted manifest, then ``complete.json``, which names it with size and CRC-32C.

    The compacted manifest holds every receipt of the run as one JSON line, in order, compressed with zstd.
    """
    receipts = [manifest.receipts[identity] for identity in sorted(manifest.receipts)]
    body = zstandard.ZstdCompressor(level=3).compress(b"\n".join(r.to_json() for r in receipts) + b"\n")
    store.put(compacted_name(attempt), [body])
    complete = {
        **summary,
        "format": FORMAT,
        "attempt": attempt,
        "samples": len(manifest.samples),
        "parts": len(manifest.parts),
        "refused": len(manifest.refused),
        "failed": len(manifest.failed),
        "receipts": len(receipts),
        "manifest": {"name": compacted_name(attempt), "size": len(body), "crc32c": f"{crc32c(body):08x}"},
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    store.put(COMPLETE, [_dump(complete)])


def _read_compacted(store: Store, complete: Mapping[str, Any]) -> Manifest:
    try:
        name, size, crc = (complete["manifest"][k] for k in ("name", "size", "crc32c"))
        count = int(complete["receipts"])
    except (KeyError, TypeError, ValueError) as e:
        raise FormatError(f"{COMPLETE}: expected the compacted manifest's name, size and crc32c ({e!r})") from e
    data = store.get(name)
    if len(data) != size or f"{crc32c(data):08x}" != crc:
        raise IntegrityError(f"{name}: expected {size} bytes of CRC-32C {crc}, got {len(data)} of {crc32c(data):08x}")
    lines = _decompress(data, name).splitlines()
    if len(lines) != count:
        raise IntegrityError(f"{name}: expected {count} receipts, got {len(lines)}")
    return Manifest.of(Receipt.from_json(line, f"{name}:{i + 1}") for i, line in enumerate(lines))


def _decompress(data: bytes, name: str) -> bytes:
    try:
        if zstandard.frame_content_size(data) > MAX_COMPACTED_BYTES:
            raise FormatError(f"{name}: says to hold more than {MAX_COMPACTED_BYTES} bytes")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as e:
        raise FormatError(f"{name}: expected a zstd frame: {e}") from e


def _dump(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode()


def _load(data: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as e:
        raise FormatError(f"{name}: expected JSON: {e}") from e
    if not isinstance(value, dict):
        raise FormatError(f"{name}: expected a JSON object, got {type(value).__name__}")
    return value
