"""A run's manifest, with updates that read only new receipts."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

from hsx_dist.format.compacted import read_compacted
from hsx_dist.format.manifest import Manifest
from hsx_dist.format.receipt_log import LogReader
from hsx_dist.format.runs import read_completion
from hsx_dist.store import Store


class ManifestReader:
    """Reads a manifest, and then only new receipts. Not safe for concurrent use.

    An update takes a few requests and reads the new receipts. The whole manifest is read only by the first ``fetch``
    and when an attempt completes the run, as its compacted manifest then replaces the receipts.
    """

    def __init__(self) -> None:
        #: The manifest as of the last update. ``None`` before the first update, and after ``release``.
        self.manifest: Manifest | None = None
        #: Whether the newest attempt was complete at the last update.
        self.complete = False
        self._logs = LogReader()
        self._completed = -1  # the last attempt that is complete, 0: none
        self._lent = False

    def fetch(self, store: Store) -> Callable[[], None] | None:
        """Read the receipts that were stored since the last call.

        Returns:
            A function that adds the receipts, to be called before the next ``fetch``; ``None`` without new receipts.
            Nothing changes before that call, so a read may fail, and a caller needs its lock only for that call.

        Raises:
            IntegrityError, FormatError: like ``load_manifest``.
        """
        # Read the completion first: a run reported as complete must have been so before its receipts were read.
        complete, over = read_completion(store)
        completed = 0 if complete is None else int(complete["attempt"])
        if over and self.complete and completed == self._completed:
            return None
        manifest, logs = self.manifest, deepcopy(self._logs)
        if manifest is None or completed != self._completed:
            manifest = Manifest(() if complete is None else read_compacted(store, complete))
            logs = LogReader(completed)
        # All receipts of a complete attempt are in its compacted manifest.
        receipts = [] if over else list(logs.read(store))
        if manifest is self.manifest and over == self.complete and not receipts:
            self._logs = logs  # some may have been sealed since
            return None

        def take() -> None:
            shared = self._lent and manifest is self.manifest
            held = manifest.copy() if shared and receipts else manifest
            self._lent = shared and not receipts
            self.manifest, self._logs = held, logs
            self._completed, self.complete = completed, over
            for receipt in receipts:
                held.add(receipt)

        return take

    def lend(self) -> Manifest | None:
        """The manifest, for a caller that keeps it. It never changes: an update with new receipts copies it."""
        if self.manifest is not None:
            len(self.manifest.samples)  # decides all samples, so that look-ups of other threads change nothing
            self._lent = True
        return self.manifest

    def release(self) -> None:
        """Free the memory of a complete run's manifest. It is read again only after another attempt."""
        self.manifest = None
