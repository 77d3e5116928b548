"""The driver's own receipts: rows that end without a sample, and why."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime

from hsx_dist.format.manifest import Manifest, Receipt, RowFate
from hsx_dist.format.receipt_log import ReceiptLog, new_receipts
from hsx_dist.format.runs import DRIVER
from hsx_dist.store import Store

#: A receipt of so many names stays far below the largest that is read.
_PARTS_A_RECEIPT = 10_000


class RowLedger:
    """Collects the fates of rows and stores them, a batch to a receipt."""

    #: Seconds after which what was added is stored, be it ever so little: ``hsx status`` reads the store.
    OLDEST_S = 15.0

    def __init__(self, store: Store, attempt: int, manifest: Manifest, *, batch: int = 1000):
        self.store = store
        self._attempt = attempt
        self._manifest = manifest
        self._log = ReceiptLog(store, attempt, DRIVER)
        self._rows: list[RowFate] = []
        self._batch = batch
        self._since = 0.0

    def add(self, fate: RowFate) -> None:
        """Note a row's fate; it is stored with others soon (``poison`` at once: finding it out again costs engines)."""
        if not self._rows:
            self._since = time.monotonic()
        self._rows.append(fate)
        if len(self._rows) >= self._batch or fate.fate == "poison":
            self.flush()

    def flush_old(self) -> None:
        """Store what has waited long enough."""
        if self._rows and time.monotonic() - self._since >= self.OLDEST_S:
            self.flush()

    def flush(self) -> None:
        """Store what was added since the last flush.

        Raises:
            Fenced: a newer attempt owns the run.
        """
        if not self._rows:
            return
        self._append(rows=tuple(self._rows))
        self._rows.clear()

    def declare_lost(self, parts: Sequence[str]) -> None:
        """Store that ``parts`` are gone though receipts name them: their samples count as missing from now on, also
        where the rows end without a sample.

        Raises:
            Fenced: a newer attempt owns the run.
        """
        for start in range(0, len(parts), _PARTS_A_RECEIPT):
            self._append(void=tuple(parts[start : start + _PARTS_A_RECEIPT]))

    def _append(self, rows: tuple[RowFate, ...] = (), void: tuple[str, ...] = ()) -> None:
        created = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._manifest.add(
            self._log.append(
                Receipt(
                    attempt=0,
                    writer="",
                    seq=0,
                    part=None,
                    size=0,
                    crc32c="00000000",
                    header_bytes=0,
                    raw_bytes=0,
                    segments=(),
                    rows=rows,
                    created=created,
                    void=void,
                )
            )
        )

    def read_new_receipts(self) -> None:
        """Add to the manifest what writers of this attempt have proven, and could not tell."""
        for receipt in new_receipts(self.store, self._manifest.has_receipt, self._attempt):
            self._manifest.add(receipt)
