"""A run, opened for reading. It has only the samples that receipts prove."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from hsx_dist.errors import ConfigError, SampleNotFound
from hsx_dist.format.container import Part
from hsx_dist.format.manifest import Manifest, Receipt, RowFate, SampleRecord
from hsx_dist.format.manifest_reader import ManifestReader
from hsx_dist.format.place import Place, open_place
from hsx_dist.format.runs import load_manifest
from hsx_dist.home import with_home
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.reading.arguments import whole
from hsx_dist.reading.index import Index
from hsx_dist.reading.kept_parts import MOST_IDS, KeptParts
from hsx_dist.reading.proven_parts import ProvenParts
from hsx_dist.reading.sample import Sample
from hsx_dist.reading.select import Selection, select
from hsx_dist.store import Store, open_store
from hsx_dist.text import head


def open_run(path: str, *, storage_options: Mapping[str, Any] | None = None) -> Run:
    """Open the run at ``path``. Reads only the manifest: seconds for a million samples.

    Args:
        path: a folder or a URL.
        storage_options: options for fsspec.

    Returns:
        The run. It can be pickled, and it works in a forked process. Each process opens the store again.

    Raises:
        RunError: there is no run at ``path``.
        StoreError: the store failed.
        FormatError: the manifest is damaged.

    Example:
        >>> open_run("runs/demo")
        Run('...runs/demo', ... samples)
    """
    store = open_store(str(path), storage_options)
    again = str(path)
    if "://" not in again:  # a process that opens it again may have another working folder
        again = str(with_home(again).absolute())
    return Run(store, partial(open_store, again, storage_options))


class Run:
    """The durable samples of a run, by key. Safe to share between threads.

    Iterates in the order of the input rows. Samples without a known row follow at the end, sorted by key.
    ``refresh`` adds the samples that were written after opening.

    Example:
        >>> run = open_run("runs/demo")
        >>> run.complete, run.layer_ids, run.info["meaning"]["model"]
        (True, (2, 15, 27, 30), 'builtin:smollm2-135m-instruct')
        >>> run.url, len(run.id), run.version
        ('...runs/demo', 16, 2)
        >>> len(run.keys()), len(run.refused), len(run.failed)  # rows with a sample, and rows without
        (3, 0, 0)
        >>> print(run.fate_of(run.at(0).key), run.layers_of("hidden_states"))
        None (2, 15, 27, 30)
        >>> before = run.snapshot()
        >>> run.refresh()
        >>> len(run) - len(before)
        0
    """

    def __init__(self, root: Store, reopen: Callable[[], Store] | None = None):
        """``root``: the store at the run's path. ``reopen``: opens that store again in another process."""
        self._place = open_place(root)
        self._mine = self._place.store
        self._url = root.url
        self._reopen = reopen
        self._wrap: Callable[[Store], Store] | None = None
        self._wrapped: tuple[Store, Store] | None = None
        self._pid = os.getpid()
        self._parts = KeptParts()
        #: The run's settings, from ``run.json``.
        self.info: dict[str, Any] = self._place.info
        self._reader = ManifestReader()
        self._index: Index | None = None
        self._manifest: Manifest | None = None
        self._renew_locks()
        self.refresh()

    def refresh(self) -> None:
        """Read the receipts that were stored since the last refresh. Costs requests for new receipts only.

        Parts that could not be opened are tried again.

        Raises:
            RunError: the run was removed after it was opened.
            StoreError, FormatError: as ``open_run``.
        """
        self._require_process()
        self._parts.forget_errors()
        with self._refreshing:
            with self.place.reading():
                take = self._reader.fetch(self.store)
            if take is not None:
                with self._lock:
                    take()
                    self._index = self._manifest = None

    @property
    def index(self) -> Index:
        """The samples in columns, as of the last refresh. Built on first access.

        A refresh replaces the index and never changes it. Code that counts positions keeps one index and uses that.
        """
        self._require_process()
        with self._lock:
            if self._index is None and self._reader.manifest is not None:
                self._index = Index(self._reader.manifest, complete=self._reader.complete)
                if self._reader.complete:
                    self._reader.release()
            if self._index is not None:
                return self._index
        self.refresh()  # in a forked process that could not use its parent's manifest
        return self.index

    @property
    def manifest(self) -> Manifest:
        """All receipts, as of the last refresh. Read again on first access if the memory was freed since.

        Raises:
            RunError: the run was removed after it was opened.
        """
        if self._manifest is not None:
            return self._manifest
        with self.place.reading():
            with self._lock:
                held = self._reader.lend()
            found = load_manifest(self.store) if held is None else held
        with self._lock:
            if self._reader.manifest is held:  # no other thread has refreshed the run
                self._manifest = found
        return found

    @property
    def id(self) -> str:
        """The run's unique id, 16 hex digits. Another run at the same path has another id."""
        return self._place.id

    @property
    def version(self) -> int:
        """Version of the run's state, 1 or 2."""
        return self._place.version

    @property
    def place(self) -> Place:
        """The run's place, with the stores of this process."""
        self._require_process()
        return self._place

    @property
    def store(self) -> Store:
        """The store of the run's objects, opened by this process."""
        self._require_process()
        return self._mine

    def with_store(self, wrap: Callable[[Store], Store]) -> Run:
        """The same run, with parts read through ``wrap(store)``. The samples are shared, not read again."""
        other = self.snapshot()
        other._wrap = wrap
        other._parts = KeptParts()
        return other

    def snapshot(self, index: Index | None = None) -> Run:
        """A copy with the same samples, or those of ``index``. A later ``refresh`` of this run does not change it."""
        index = self.index if index is None else index
        other = object.__new__(type(self))  # copy.copy would call __setstate__, which opens the store again
        other.__dict__.update(self.__dict__, _index=index, _reader=ManifestReader())
        other._renew_locks()
        return other

    @property
    def url(self) -> str:
        """The run's path or URL."""
        return self._url

    @property
    def _source(self) -> Store:
        """The store that parts are read from."""
        store = self.store
        if self._wrap is None:
            return store
        if self._wrapped is None or self._wrapped[0] is not store:
            self._wrapped = (store, self._wrap(store))
        return self._wrapped[1]

    @property
    def complete(self) -> bool:
        """Whether the newest attempt recorded that it ended. Until then, samples may still appear."""
        return self._look_up()[2]

    @property
    def refused(self) -> Mapping[str, RowFate]:
        """Input rows that cannot produce a sample, with the reason."""
        return self.index.refused

    @property
    def failed(self) -> Mapping[str, RowFate]:
        """Input rows that failed. A resumed run tries them again."""
        return self.index.failed

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """vLLM's ids of the requested layers, ascending. Empty if ``run.json`` does not list them."""
        return self.place.layer_ids

    def layers_of(self, point: str) -> tuple[int, ...]:
        """``layer_ids`` for hidden states; for another point, the layers of the run's first sample.

        Raises:
            ConfigError: the first sample lacks the point, or the run has no sample.
        """
        if point == HIDDEN_STATES:
            return self.layer_ids
        found = self.at(0).points if len(self) else {}
        if point not in found:
            raise ConfigError(
                f"{self.url}: expected a point among {head(str(list(found)), 1000)}, got {point!r}. Name one of them"
            )
        return found[point].layers

    def keys(self) -> list[str]:
        """The keys of all samples, in the order of iteration."""
        return list(self.index.keys)

    def select(self, **criteria: Any) -> Selection:
        """The samples that meet all criteria. Arguments and errors are those of ``hsx_dist.reading.select.select``.

        Example:
            >>> short = run.select(max_tokens=2048, split="train")
            >>> len(short) <= len(run)
            True
        """
        return select(self, **criteria)

    def __len__(self) -> int:
        return self._look_up()[3]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._look_up(key)[0] is not None

    def __iter__(self) -> Iterator[Sample]:
        index = self.index
        return (self.sample_of(index[i]) for i in range(len(index)))

    def __getitem__(self, key: str) -> Sample:
        """The sample of ``key``.

        Raises:
            SampleNotFound: the run has no such sample. The message has the fate of the key's row.

        Example:
            >>> run["fsspec-fsspec.spec.stringify_path"].num_tokens > 0
            True
        """
        record, fate, complete, count = self._look_up(key)
        if record is not None:
            return self.sample_of(record)
        if fate is not None:
            what = "was refused" if fate.fate == "refused" else "failed"
            why = f"its row {what}: {fate.reason}. Correct the cause, then run the extraction again"
        elif not complete:
            why = f"the run has {count} samples and is not complete. Wait, then call Run.refresh"
        else:
            why = f"the run is complete with {count} samples. List their keys with Run.keys or hsx ls"
        raise SampleNotFound(f"{self.url}: expected a sample {key!r}, got none: {why}")

    def fate_of(self, key: str) -> RowFate | None:
        """The fate of the row of ``key`` if it ended without a sample, else ``None``."""
        return self._look_up(key)[1]

    def _look_up(self, key: str = "") -> tuple[SampleRecord | None, RowFate | None, bool, int]:
        """The sample of ``key``, the fate of its row, whether the run is complete, and its number of samples.

        All four are of the same moment. Reads the manifest if it is in memory: building an index takes time for each
        sample of the run.
        """
        self._require_process()
        with self._lock:
            known, complete = self._reader.manifest, self._reader.complete
            if known is not None:
                fate = known.refused.get(key) or known.failed.get(key)
                return known.samples.get(key), fate, complete, len(known.samples)
        index = self.index
        place = index.place(key)
        record = None if place is None else index[place]
        return record, index.refused.get(key) or index.failed.get(key), index.complete, len(index)

    def at(self, place: int) -> Sample:
        """The ``place``-th sample in the order of iteration, which a refresh may change."""
        return self.sample_of(self.index[whole("place", place)])

    def sample_of(self, record: SampleRecord) -> Sample:
        """The sample that ``record`` describes."""
        return Sample(record.key, record.segments, self.open_part, self.store.url)

    def __repr__(self) -> str:
        return f"Run({self.url!r}, {len(self)} samples{'' if self.complete else ', not complete'})"

    def open_part(self, name: str) -> Part:
        """Open the part ``name``: read its header and token ids. The last opened parts are cached.

        After an error, a missing part is tried again after 5 seconds, a damaged part after a minute, and both after
        ``refresh``. Until then, the same error is raised without a request.

        Raises:
            SampleConsumed: the part was removed after all consumers had used it.
            NotFound: the part is lost.
            StoreError, FormatError: as ``Part.open``.
        """
        store = self._source  # must be first: in a forked process it drops the parts that the parent opened
        return self._parts.get(name, partial(self._open_part, store))

    def _open_part(self, store: Store, name: str) -> Part:
        known, proven = {}, self._proven(name)
        if proven is not None:
            receipt, tokens = proven
            known = {"header_bytes": receipt.header_bytes, "size": receipt.size}
            known["front_bytes"] = 8 * tokens if 8 * tokens <= MOST_IDS else 0
        return Part.open(ProvenParts(store, self.place), name, **known)

    def _proven(self, part: str) -> tuple[Receipt, int] | None:
        """The receipt of a part, and the number of tokens in its segments."""
        with self._lock:
            if (known := self._reader.manifest) is not None:
                receipt = known.parts.get(part)
                return None if receipt is None else (receipt, receipt.table.tokens)
        index = self.index
        return (index.parts_by_name[part], index.tokens_in[part]) if part in index.parts_by_name else None

    # -- other processes -------------------------------------------------------------------------------------------

    def _renew_locks(self) -> None:
        self._refreshing = threading.Lock()
        self._lock = threading.Lock()  # guards the reader's manifest and the index; never held during requests

    def _require_process(self) -> None:
        if self._pid != os.getpid():
            self._after_fork()

    def _after_fork(self) -> None:
        store = self._mine
        if self._refreshing.locked() or self._lock.locked():  # at the fork a thread of the parent was changing it
            self._reader = ManifestReader()
        self._renew_locks()
        if self._reopen is not None:
            self._place = self._place.at(self._reopen())
            store = self._place.store
        # Set _pid last: a thread that sees the new _pid must not use the parent's store, whose calls may raise.
        # Two threads may run this at once and open two stores, which is harmless.
        self._parts = KeptParts()
        self._mine = store
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        index = self.index  # other processes need no manifest
        kept = {k: v for k, v in self.__dict__.items() if k not in ("_parts", "_lock", "_refreshing")}
        kept.update(_index=index, _manifest=None, _reader=ManifestReader())
        if self._reopen is not None:
            kept["_mine"] = kept["_wrapped"] = None
            kept["_place"] = replace(self._place, root=None, store=None)  # type: ignore[arg-type]  # opened again
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._pid, self._parts = os.getpid(), KeptParts()
        self._renew_locks()
        if self._reopen is not None:
            self._place = self._place.at(self._reopen())
            self._mine = self._place.store
