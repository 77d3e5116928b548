"""The driver's own receipts: rows that end without a sample, and why."""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime

from hsx_dist.errors import AlreadyExists, Fenced
from hsx_dist.format.manifest import Manifest, Receipt, RowFate, receipt_name
from hsx_dist.format.runs import is_fenced, receipts_of
from hsx_dist.store import Store


class RowLedger:
    """Collects the fates of rows and stores them, a batch to a receipt."""

    #: Seconds after which what was added is stored, be it ever so little: ``hsx status`` reads the store.
    OLDEST_S = 15.0

    def __init__(self, store: Store, attempt: int, manifest: Manifest, *, batch: int = 1000):
        self.store = store
        self._attempt = attempt
        self._manifest = manifest
        self._writer = f"driver-{uuid.uuid4().hex[:8]}"
        self._rows: list[RowFate] = []
        self._batch = batch
        self._since = 0.0
        self._seq = 0

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
        if is_fenced(self.store, self._attempt):
            raise Fenced(f"attempt {self._attempt} of {self.store.url} is no longer the newest")
        receipt = Receipt(
            attempt=self._attempt,
            writer=self._writer,
            seq=self._seq + 1,
            part=None,
            size=0,
            crc32c="00000000",
            header_bytes=0,
            raw_bytes=0,
            segments=(),
            rows=tuple(self._rows),
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )
        name, body = receipt_name(self._attempt, self._writer, receipt.seq), receipt.to_json()
        try:
            self.store.put_if_absent(name, body)
        except AlreadyExists:
            if self.store.get(name) != body:  # the name is ours alone: a put that was sent twice
                raise
        self._seq += 1
        self._rows.clear()
        self._manifest.add(receipt)

    def read_new_receipts(self) -> None:
        """Add to the manifest what writers of this attempt have proven, and could not tell."""
        for receipt in receipts_of(self.store, self._attempt, known=self._manifest):
            self._manifest.add(receipt)
