"""Where a run ends before its rows do, and where it pauses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from hsx_dist.config import ExtractConfig
from hsx_dist.errors import StoreError
from hsx_dist.logger import get_logger
from hsx_dist.store import Store

log = get_logger(__name__)

#: How often what the store holds is listed, where a run pauses by it.
LIST_EVERY_S = 15.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What may be handed out now: at most ``room`` new rows (``None``: any number).

    ``ended``: why no row will be handed out any more. ``paused``: why none is for now.
    """

    room: int | None = None
    ended: str = ""
    paused: str = ""


class Limits:
    """The limits of one attempt. Without arguments there are none."""

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
        """``seconds`` from now to the deadline. ``held()``: bytes that the store holds, against ``max_held_bytes``."""
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._clock = clock
        self._end = None if seconds is None else clock() + seconds
        self._held = held
        self._max_held = max_held_bytes

    def past_deadline(self) -> bool:
        return self._end is not None and self._clock() >= self._end

    def verdict(self, rows: int, nbytes: int, under_way: int, row_bytes: float) -> Verdict:
        """``rows`` are stored, in parts of ``nbytes``; ``under_way`` rows, of about ``row_bytes`` each, are computed or
        not proven yet. They count as if they were stored: what was handed out cannot be taken back."""
        coming = row_bytes * under_way
        if self._max_bytes is not None:
            if nbytes >= self._max_bytes:
                return Verdict(0, ended=f"max_bytes: {nbytes} bytes are stored")
            if nbytes + coming >= self._max_bytes:
                return Verdict(0)
        room = None
        if self._max_rows is not None:
            if rows >= self._max_rows:
                return Verdict(0, ended=f"max_rows: {rows} samples are stored")
            room = max(self._max_rows - rows - under_way, 0)
        if self._held is not None and self._max_held is not None:
            held = self._held()
            if held + coming >= self._max_held:
                return Verdict(0, paused=f"max_stored_bytes: data/ holds {held} bytes; waiting for room")
        return Verdict(room)


class HeldBytes:
    """Bytes below ``data/``, listed by a thread every few seconds; what is proven in between is added to it."""

    def __init__(self, store: Store, proven: Callable[[], int], *, every: float = LIST_EVERY_S):
        """``proven()``: bytes of all parts that were ever proven, which only grows."""
        self._store = store
        self._proven = proven
        self._listed = 0
        self._proven_then = 0
        self._end = threading.Event()
        self._every = every
        self._list()  # an error here is the caller's: a limit that cannot be kept is not accepted
        self._thread = threading.Thread(target=self._loop, name="hsx-held-bytes", daemon=True)
        self._thread.start()

    def __call__(self) -> int:
        return self._listed + max(self._proven() - self._proven_then, 0)

    def _list(self) -> None:
        before = self._proven()  # before the listing: a part that appears meanwhile is counted twice rather than never
        listed = sum(info.size for info in self._store.list("data/"))
        self._listed, self._proven_then = listed, before

    def _loop(self) -> None:
        while not self._end.wait(self._every):
            try:
                self._list()
            except StoreError as e:
                log.warning("data/ was not listed, and is taken to hold what it held: %s", e)

    def close(self) -> None:
        self._end.set()
        self._thread.join(1.0)  # not for as long as a listing may take: nobody needs it any more


def seconds_left(config: ExtractConfig) -> float | None:
    """From now to the configured deadline; ``None`` without one."""
    if isinstance(config.deadline, datetime):
        return (config.deadline - datetime.now(UTC)).total_seconds()
    return config.deadline
