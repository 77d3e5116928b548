"""A run's manifest, brought up to date at the cost of what was stored since."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

from hsx_dist.format.compacted import read_compacted
from hsx_dist.format.manifest import Manifest, Receipt
from hsx_dist.format.receipt_log import LogReader
from hsx_dist.format.runs import read_completion
from hsx_dist.store import Store


@dataclass(frozen=True, slots=True)
class ManifestNews:
    """What a run's store has and a ``ManifestReader`` does not know."""

    manifest: Manifest
    receipts: list[Receipt]
    logs: LogReader
    completed: int
    complete: bool


class ManifestReader:
    """Reads a manifest, and then what is new. Not safe for concurrent use.

    A look costs a few requests and the new receipts. All receipts are read only at first, and when an attempt completes
    the run: what counts then is its compacted manifest.
    """

    def __init__(self) -> None:
        #: As of the last ``take``; the next one changes it. ``None`` before the first one, and after ``release``.
        self.manifest: Manifest | None = None
        #: Whether the newest attempt had ended and said so when it was last asked.
        self.complete = False
        self._logs = LogReader()
        self._completed = -1  # the last attempt that had ended and said so, 0: none

    def fetch(self, store: Store) -> ManifestNews | None:
        """What was stored since; ``None`` when nothing was. Changes nothing, so that it may fail.

        Raises:
            IntegrityError, FormatError: as ``load_manifest``.
        """
        # In this order: what is said to be complete must have been so before the receipts were read.
        complete, over = read_completion(store)
        completed = 0 if complete is None else int(complete["attempt"])
        if over and self.complete and completed == self._completed:
            return None
        manifest, logs = self.manifest, deepcopy(self._logs)
        if manifest is None or completed != self._completed:
            manifest = Manifest(() if complete is None else read_compacted(store, complete))
            logs = LogReader(completed)
        # Receipts of an attempt that has ended are all in its compacted manifest.
        receipts = [] if over else list(logs.read(store))
        if manifest is self.manifest and over == self.complete and not receipts:
            self._logs = logs  # of which some may be sealed now
            return None
        return ManifestNews(manifest, receipts, logs, completed, over)

    def take(self, news: ManifestNews | None) -> None:
        """Add what ``fetch`` has just found."""
        if news is not None:
            self.manifest, self._logs = news.manifest, news.logs
            self._completed, self.complete = news.completed, news.complete
            for receipt in news.receipts:
                self.manifest.add(receipt)

    def release(self) -> None:
        """Free the memory of a complete run's manifest. It is read again only if another attempt follows."""
        self.manifest = None
