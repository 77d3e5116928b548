"""Limits that end or pause a run before its last row."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from hsx_dist.config import ExtractConfig
from hsx_dist.errors import StoreError
from hsx_dist.format.manifest import Manifest
from hsx_dist.format.names import parse_part_name
from hsx_dist.logger import get_logger
from hsx_dist.store import Store

log = get_logger(__name__)

#: Seconds between two listings of ``data/``, for a run with ``max_stored_bytes``.
LIST_EVERY_S = 15.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many rows may be handed out now: at most ``capacity`` new ones (``None``: any number).

    ``ended``: why no more rows will be handed out. ``paused``: why none is handed out at present.
    """

    capacity: int | None = None
    ended: str = ""
    paused: str = ""


class Limits:
    """The limits of one attempt. Without arguments: no limits."""

    def __init__(
        self,
        *,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        seconds: float | None = None,
        held: Callable[[], int] | None = None,
        max_held_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """``seconds``: from now to the deadline. ``held()`` returns the stored bytes, for ``max_held_bytes``."""
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._clock = clock
        self._end = None if seconds is None else clock() + seconds
        self._held = held
        self._max_held = max_held_bytes

    def past_deadline(self) -> bool:
        return self._end is not None and self._clock() >= self._end

    def verdict(self, rows: int, nbytes: int, under_way: int, row_bytes: float) -> Verdict:
        """Check the limits. ``rows`` are stored, in parts of ``nbytes``. ``under_way`` rows of about ``row_bytes`` each
        have no receipt yet; they count as stored, because handed out rows are not taken back."""
        coming = row_bytes * under_way
        if self._max_bytes is not None:
            if nbytes >= self._max_bytes:
                return Verdict(0, ended=f"max_bytes: {nbytes} bytes are stored")
            if nbytes + coming >= self._max_bytes:
                return Verdict(0)
        capacity = None
        if self._max_rows is not None:
            if rows >= self._max_rows:
                return Verdict(0, ended=f"max_rows: {rows} samples are stored")
            capacity = max(self._max_rows - rows - under_way, 0)
        if self._held is not None and self._max_held is not None:
            held = self._held()
            if held + coming >= self._max_held:
                return Verdict(0, paused=f"max_stored_bytes: data/ holds {held} bytes; waiting for deletions")
        return Verdict(capacity)


def removable(manifest: Manifest, attempt: int) -> Callable[[Mapping[str, int]], int]:
    """A function that sums the sizes of the parts that consumers can remove before the run is complete.

    They cannot remove parts without a receipt, for example of a writer that died, and parts with a segment of a sample
    that will not be whole: of a row that failed, or of an earlier attempt. Parts that ``attempt`` is storing at present
    have no receipt yet. Their rows are under way, and so count as stored. Other objects below ``data/`` count.

    ``manifest``: the receipts at the begin of ``attempt``. The driver adds to it, and calls the function.
    """
    fixed = {name for name, receipt in manifest.parts.items() if receipt.attempt < attempt}
    whole = {name for name in fixed if all(map(manifest.samples.__contains__, manifest.parts[name].table.keys()))}
    unfinished = fixed - whole

    def counted(sizes: Mapping[str, int]) -> int:
        # Not of refused rows, which may be a million: they are refused before any of their states are shipped.
        kept = unfinished.union(*map(manifest.parts_of, manifest.failed))
        proven = manifest.parts
        return sum(
            size
            for name, size in sizes.items()
            if (name in proven and name not in kept) or parse_part_name(name) is None
        )

    return counted


class HeldBytes:
    """Bytes below ``data/`` that consumers can remove. A thread lists them every few seconds; receipts in between are
    added."""

    def __init__(
        self,
        store: Store,
        proven: Callable[[], int],
        count: Callable[[Mapping[str, int]], int] = lambda sizes: sum(sizes.values()),
        *,
        every: float = LIST_EVERY_S,
    ):
        """``proven()`` returns the bytes of all parts that ever had a receipt; it only grows. ``count(sizes)`` returns
        the sum of the sizes that count. Waiting for objects that no consumer can remove would never end."""
        self._store = store
        self._proven = proven
        self._count = count
        self._listed = 0
        self._proven_then = 0
        self._listing: tuple[Mapping[str, int], int] | None = None
        self._end = threading.Event()
        self._every = every
        self._list()  # raises to the caller: without listing, the limit cannot be held
        self._thread = threading.Thread(target=self._loop, name="hsx-held-bytes", daemon=True)
        self._thread.start()

    def __call__(self) -> int:
        """Only for the driver's thread, which also changes what ``count`` reads."""
        if (listing := self._listing) is not None:
            self._listing = None
            self._listed, self._proven_then = self._count(listing[0]), listing[1]
        return self._listed + max(self._proven() - self._proven_then, 0)

    def _list(self) -> None:
        before = self._proven()  # before the listing: a part that appears meanwhile is counted twice rather than never
        self._listing = {info.name: info.size for info in self._store.list("data/")}, before

    def _loop(self) -> None:
        while not self._end.wait(self._every):
            try:
                self._list()
            except StoreError as e:
                log.warning("data/ was not listed, its last size is used: %s", e)

    def close(self) -> None:
        self._end.set()
        self._thread.join(1.0)  # a listing may take long, and its result is not needed


def seconds_left(config: ExtractConfig) -> float | None:
    """Seconds from now to the configured deadline. ``None`` without one."""
    if isinstance(config.deadline, datetime):
        return (config.deadline - datetime.now(UTC)).total_seconds()
    return config.deadline
