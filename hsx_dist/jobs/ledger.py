"""The driver's receipts: rows that end without a sample, and why."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain

from hsx_dist.errors import FormatError
from hsx_dist.format.manifest import Manifest, Receipt, RowFate
from hsx_dist.format.receipt_log import Log, ReceiptLog, new_receipts
from hsx_dist.format.runs import DRIVER
from hsx_dist.inputs.refused import RefusedRows
from hsx_dist.store import Store

#: Limit of the names in one receipt. The receipt then stays far below the largest that readers accept.
_PARTS_A_RECEIPT = 10_000


class RowLedger:
    """Collects outcomes of rows and stores them in batches, each as one receipt."""

    #: Seconds after which a small batch is stored, for ``hsx status``, which reads the store.
    OLDEST_S = 15.0

    #: Rows, and characters of keys and reasons, after which a batch is stored. A character takes up to 12 bytes in a
    #: receipt, and readers refuse receipts above 100 MB.
    MOST_ROWS, MOST_CHARACTERS = 1000, 1 << 20

    def __init__(self, store: Store, attempt: int, manifest: Manifest):
        self.store = store
        self._attempt = attempt
        self._manifest = manifest
        self._log = ReceiptLog(store, attempt, DRIVER)
        self._rows: list[RowFate] = []
        self._characters = 0
        self._since = 0.0
        self._refused = RefusedRows(chain(manifest.refused.values(), manifest.failed.values()))

    def add(self, fate: RowFate) -> None:
        """Add a row's outcome. It is stored in the next batch, or at once if it is ``poison``: to find out again would
        kill engines."""
        if not self._rows:
            self._since = time.monotonic()
        self._rows.append(fate)
        known = fate.key in self._manifest.refused or fate.key in self._manifest.failed
        if fate.fate != "withdrawn" and not known:
            self._refused.add(fate)
        self._characters += len(fate.key) + len(fate.reason)
        full = len(self._rows) >= self.MOST_ROWS or self._characters >= self.MOST_CHARACTERS
        if full or fate.fate == "poison":
            self.flush()

    def excess(self, usable: int) -> FormatError | None:
        """The error of a run with too many rows without a sample, for ``usable`` others. ``None`` within the limits.

        The reader cannot count the rows that a replica refuses.
        """
        return self._refused.excess(usable, "so far (failed rows count as refused)")

    def flush_old(self) -> None:
        """Store a batch that is old enough."""
        if self._rows and time.monotonic() - self._since >= self.OLDEST_S:
            self.flush()

    def flush(self) -> None:
        """Store all outcomes since the last flush.

        Raises:
            Fenced: a newer attempt owns the run.
        """
        if not self._rows:
            return
        self._append(rows=tuple(self._rows))
        self._rows.clear()
        self._characters = 0

    def declare_lost(self, parts: Sequence[str]) -> None:
        """Record that ``parts`` are missing although receipts name them. Their samples count as missing from now on,
        even if the rows end without a sample. Outcomes from before the samples do not count again.

        Raises:
            Fenced: a newer attempt owns the run.
        """
        # Before the parts are void: no reader may get an old outcome as the reason of a row that is computed again.
        for fate in self._manifest.outcomes_under(parts):
            self.add(replace(fate, fate="withdrawn", reason="its sample was stored later, and is lost", tries=0))
        self.flush()
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

    def read_new_receipts(self, sealed: Iterable[Log] = ()) -> None:
        """Add receipts to the manifest that writers of this attempt stored and did not report.

        ``sealed``: the logs of ``close_attempt``, after which there are no others.

        Raises:
            StoreError: the store's listing lacks a seal of ``sealed``, or that of ``close_attempt`` lacked a log.
        """
        for receipt in new_receipts(self.store, self._manifest.has_receipt, self._attempt, sealed):
            self._manifest.add(receipt)
