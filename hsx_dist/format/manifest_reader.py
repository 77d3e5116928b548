"""A run's manifest, brought up to date at the cost of what was stored since."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

from hsx_dist.format.compacted import read_compacted
from hsx_dist.format.manifest import Manifest
from hsx_dist.format.receipt_log import LogReader
from hsx_dist.format.runs import read_completion
from hsx_dist.store import Store


class ManifestReader:
    """Reads a manifest, and then what is new. Not safe for concurrent use.

    A look costs a few requests and the new receipts. All receipts are read only at first, and when an attempt completes
    the run: what counts then is its compacted manifest.
    """

    def __init__(self) -> None:
        #: As of the last news that was taken. ``None`` before the first news, and after ``release``.
        self.manifest: Manifest | None = None
        #: Whether the newest attempt had ended and said so when it was last asked.
        self.complete = False
        self._logs = LogReader()
        self._completed = -1  # the last attempt that had ended and said so, 0: none

    def fetch(self, store: Store) -> Callable[[], None] | None:
        """Read what was stored since.

        Returns:
            A function that adds what was read, to be called before the next ``fetch``; ``None`` when nothing is new.
            Until that call nothing changes: reads may fail, and a caller needs its lock for the second step only.

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

        def take() -> None:
            self.manifest, self._logs = manifest, logs
            self._completed, self.complete = completed, over
            for receipt in receipts:
                manifest.add(receipt)

        return take

    def release(self) -> None:
        """Free the memory of a complete run's manifest. It is read again only if another attempt follows."""
        self.manifest = None
