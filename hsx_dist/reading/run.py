"""A run, opened for reading: what its receipts prove, and nothing else."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from hsx_dist.errors import SampleNotFound
from hsx_dist.format.container import Part
from hsx_dist.format.manifest import Manifest, RowFate
from hsx_dist.format.runs import load_manifest, newest_attempt, read_complete, read_run
from hsx_dist.reading.sample import Piece, Sample
from hsx_dist.store import Store, open_store

#: Headers kept: neighbours in a run lie in the same few parts.
_HEADERS = 64


def open_run(path: str, *, storage_options: Mapping[str, Any] | None = None) -> Run:
    """The run at ``path`` (a folder or a URL). Nothing but its manifest is read.

    Raises:
        RunError: there is no run.
        StoreError: the store's.
        FormatError: its manifest is damaged.
    """
    return Run(open_store(str(path), storage_options))


class Run:
    """The durable samples of a run, by key; safe to share between threads.

    Iterates in the order of the input rows; samples of unknown rows come last, by key.
    What is written after opening appears with ``refresh``.
    """

    def __init__(self, store: Store):
        self._store = store
        self._lock = threading.Lock()
        self._parts: OrderedDict[str, Part] = OrderedDict()
        #: ``run.json``: what was asked for.
        self.info: dict[str, Any] = read_run(store)
        self.refresh()

    def refresh(self) -> None:
        """Read the manifest again."""
        # In this order: what is said to be complete must have been so before the receipts were read.
        complete = read_complete(self._store)
        self._complete = complete is not None and complete["attempt"] >= newest_attempt(self._store)
        self.manifest: Manifest = load_manifest(self._store)
        self._keys: list[str] | None = None

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def complete(self) -> bool:
        """Whether the newest attempt ended and said so; until then, samples may still appear."""
        return self._complete

    @property
    def refused(self) -> Mapping[str, RowFate]:
        """Input rows that can never give a sample, and why."""
        return self.manifest.refused

    @property
    def failed(self) -> Mapping[str, RowFate]:
        """Input rows that were given up; a resumed run tries them again."""
        return self.manifest.failed

    def keys(self) -> list[str]:
        """The keys of all samples, in the order of iteration."""
        if self._keys is None:
            self._keys = self.manifest.keys_by_row()
        return list(self._keys)

    def __len__(self) -> int:
        return len(self.manifest.samples)

    def __contains__(self, key: object) -> bool:
        return key in self.manifest.samples

    def __iter__(self) -> Iterator[Sample]:
        return map(self.__getitem__, self.keys())

    def __getitem__(self, key: str) -> Sample:
        """The sample of ``key``. ``SampleNotFound`` says what is known of the key."""
        record = self.manifest.samples.get(key)
        if record is None:
            raise SampleNotFound(f"{self.url}: no sample {key!r}: {self._why_not(key)}")
        pieces = [Piece(part, proof.slot, proof.segment, proof.token_hash) for part, proof in record.segments]
        return Sample(key, pieces, self._open_part, self.url)

    def __repr__(self) -> str:
        return f"Run({self.url!r}, {len(self)} samples{'' if self.complete else ', not complete'})"

    def _why_not(self, key: str) -> str:
        fate = self.refused.get(key) or self.failed.get(key)
        if fate is not None:
            return f"its row was {'refused' if fate.fate == 'refused' else 'given up'}: {fate.reason}"
        if not self.complete:
            return f"it is not stored yet; the run has {len(self)} samples and is not complete"
        return f"the run is complete, with {len(self)} samples, and none has this key; see Run.keys()"

    def _open_part(self, name: str) -> Part:
        with self._lock:
            part = self._parts.get(name)
            if part is not None:
                self._parts.move_to_end(name)
                return part
        receipt = self.manifest.parts[name]
        part = Part.open(self._store, name, header_bytes=receipt.header_bytes, size=receipt.size)
        with self._lock:
            self._parts[name] = part
            while len(self._parts) > _HEADERS:
                self._parts.popitem(last=False)
        return part
