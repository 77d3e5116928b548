"""The result of a check of ``hsx doctor``, and the checks that run on each node."""

from __future__ import annotations

import os
import resource
import shutil
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hsx_dist.config import ExtractConfig
from hsx_dist.config.redaction import redact_text
from hsx_dist.errors import AlreadyExists, ConfigError, StoreError
from hsx_dist.store import open_store

State = Literal["ok", "warn", "fail"]

#: Free shared memory that vLLM's ranks and Ray's object store need.
MIN_SHM_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of one check. ``message``: the finding; if it is not ok, also the expected value and what to do.

    The message is redacted, because it may have a library's error.
    """

    name: str
    state: State
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", redact_text(self.message))


def machine_limits(in_flight: int, *, has_gpu: bool) -> Iterator[Diagnosis]:
    """Check the limits of this machine. ``in_flight``: bytes of one replica's ring."""
    shm = Path("/dev/shm")  # noqa: S108 (the system's)
    if shm.exists():
        usage = shutil.disk_usage(shm)
        message = f"{usage.free >> 20:,} MiB free of {usage.total >> 20:,} in /dev/shm"
        if usage.free < MIN_SHM_BYTES:
            message += (
                f": expected at least {MIN_SHM_BYTES >> 20:,} for Ray's object store and vLLM's ranks. Start "
                "the container with a larger --shm-size, or mount an emptyDir of medium Memory there"
            )
        yield Diagnosis("shared memory", "ok" if usage.free >= MIN_SHM_BYTES else "warn", message)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if has_gpu and locked != resource.RLIM_INFINITY and locked < in_flight:
        message = (
            f"{locked >> 10:,} KiB may be locked: expected {in_flight >> 10:,} KiB for the ring, which is pinned for "
            "copies from the GPU. Raise the limit (ulimit -l unlimited), or lower in_flight_bytes"
        )
        yield Diagnosis("locked memory", "warn", message)
    available = _available_memory()
    if available is not None and in_flight > available:
        message = (
            f"{available >> 20:,} MiB available: expected more than in_flight_bytes ({in_flight >> 20:,} MiB) of one "
            "replica. Lower in_flight_bytes, or use a larger machine"
        )
        yield Diagnosis("memory", "fail", message)


def _available_memory() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def probe_store(config: ExtractConfig) -> str:
    """Do each operation of a run once at its output: put, put-if-absent (twice), get, range, list, delete.

    Raises:
        ConfigError: the store refused an operation, or gave a wrong result. The message has the store's reason.
    """
    try:
        store = open_store(
            config.output,
            storage_options=config.store.storage_options,
            backend=config.store.backend,
            retry_seconds=min(config.store.retry_seconds, 10.0),
        )
        folder = f"probe-{uuid.uuid4().hex}"
        name, body = f"{folder}/a", os.urandom(1000)
        try:
            store.put(name, [body[:400], body[400:]])
            if store.get(name) != body or bytes(store.get_ranges(name, [(100, 200)])[0]) != body[100:200]:
                raise StoreError(f"{store.url}: expected the bytes that were written, got others. Use another store")
            if [info.name for info in store.list(f"{folder}/")] != [name]:
                raise StoreError(
                    f"{store.url}: expected one object in a new folder's list, got another list. Allow listing"
                )
            store.put_if_absent(f"{folder}/b", b"first")
            with suppress(AlreadyExists):
                store.put_if_absent(f"{folder}/b", b"second")
                raise StoreError(
                    f"{store.url}: expected a refusal of the second put-if-absent of a name, got none: two drivers "
                    "could own one run. Use a store with conditional writes"
                )
        finally:
            for rest in ("a", "b"):
                with suppress(StoreError):
                    store.delete(f"{folder}/{rest}")
        if list(store.list(f"{folder}/")):
            raise StoreError(f"{store.url}: expected permission to delete objects, got a refusal. Allow it")
    except StoreError as e:
        raise ConfigError(f"output: {e}") from e
    return f"{store.url}: put, put-if-absent, get, ranges, list, delete"
