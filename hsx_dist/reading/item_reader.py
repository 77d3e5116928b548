"""Code shared by data sets: a selection of a run, and making items from its samples."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hsx_dist.errors import ConfigError
from hsx_dist.format.container_read import Empty
from hsx_dist.format.manifest import SampleRecord
from hsx_dist.reading.arrays import resolve_framework
from hsx_dist.reading.cache import CachedStore
from hsx_dist.reading.items import ItemSpec
from hsx_dist.reading.prefetch import reused_memory
from hsx_dist.reading.run import Run, open_run
from hsx_dist.reading.sample import layers_of
from hsx_dist.reading.select import Selection, select

#: A run's path or URL, an open run, or a selection of a run.
Source = str | os.PathLike[str] | Run | Selection


class ItemReader:
    """Makes items from the samples of a selection, by position."""

    def __init__(
        self,
        source: Source,
        spec: ItemSpec,
        storage_options: Mapping[str, Any] | None,
        cache_dir: str | os.PathLike[str] | None,
        cache_bytes: int,
    ):
        if not isinstance(source, (Run, Selection)):
            source = open_run(os.fspath(source), storage_options=storage_options)
        self.selection = source if isinstance(source, Selection) else select(source)
        self.run = self.selection.run
        if cache_dir is not None:
            cached = partial(CachedStore, folder=Path(cache_dir), max_bytes=cache_bytes, run_id=self.run.id)
            self.run = self.run.with_store(cached)
        spec.check_layers(self.run)
        self.spec = spec
        #: Whether all items must have the same layers in the same order. Items with points do not name their layers.
        self.one_order = spec.points is not None
        self._first: dict[str, tuple[int, ...]] = {}

    def make(self, place: int, epoch: int, empty: Empty | None = None) -> dict[str, Any]:
        """The item of the sample at ``place``. Errors: as ``make_of``."""
        return self.make_of(self.selection.run_index[place], epoch, empty)

    def make_of(self, record: SampleRecord, epoch: int, empty: Empty | None = None) -> dict[str, Any]:
        """The item of a sample. Errors: as ``ItemSpec.make``; ``ConfigError``: its layers differ from earlier ones."""
        sample = self.run.sample_of(record)
        for name in self.spec.states if self.one_order else ():
            if layers_of(self.spec.layers, name) is None and name in sample.points:
                stored = sample.points[name].layers
                first = self._first.setdefault(name, stored)
                if stored != first:
                    raise ConfigError(
                        f"{sample.uri}: expected the layers {list(first)} of {name}, as in earlier samples, got "
                        f"{list(stored)}. Pass layers=[…] to the data set"
                    )
        return self.spec.make(self.run, sample, epoch, empty)

    def nbytes(self, place: int) -> int:
        """``ItemSpec.nbytes`` of the sample at ``place``."""
        index = self.selection.run_index
        sizes = int(index.tokens[place]), int(index.raw_bytes[place]), int(index.stored_bytes[place])
        return self.spec.nbytes(self.run, index.keys[place], *sizes)

    def memory(self, prefetch_bytes: int) -> Empty | None:
        """Allocator for the states of items. ``None`` (new memory) for numpy, which gets converted copies of bf16."""
        return reused_memory(prefetch_bytes) if resolve_framework(self.spec.framework) == "torch" else None
