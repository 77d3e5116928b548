"""Code shared by data sets: a selection of a run, and making items from its samples."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hsx_dist.errors import ConfigError
from hsx_dist.format.byte_budget import ByteBudget
from hsx_dist.format.container_read import Empty
from hsx_dist.format.manifest import SampleRecord
from hsx_dist.reading.arguments import path_text
from hsx_dist.reading.arrays import resolve_framework
from hsx_dist.reading.cache import CachedStore
from hsx_dist.reading.items import ItemSpec
from hsx_dist.reading.prefetch import reused_memory
from hsx_dist.reading.run import Run, open_run
from hsx_dist.reading.sample import Sample, layers_of, load_bytes
from hsx_dist.reading.select import Selection, select

#: A run's path or URL, an open run, or a selection of a run.
Source = str | os.PathLike[str] | Run | Selection


class ReadMemory(NamedTuple):
    """The memory of one iteration over a data set, or of one batch.

    Attributes:
        ahead: limit for the sum of ``ItemReader.nbytes`` of samples that are read ahead. 0: no sample is read ahead, so
            its ``nbytes`` are not held.
        chunks: what samples take beyond what ``ahead`` holds while they are read. A chunk is fetched and decoded
            whole, also for one token, and in schema ``vllm`` with all layers. Receipts do not have its size.
        empty: allocator for the states. ``None``: new memory.
    """

    ahead: int
    chunks: ByteBudget
    empty: Empty | None


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
            source = open_run(path_text("source", source), storage_options=storage_options)
        self.selection = source if isinstance(source, Selection) else select(source)
        self.run = self.selection.run
        if cache_dir is not None:
            cached = partial(
                CachedStore, folder=Path(path_text("cache_dir", cache_dir)), max_bytes=cache_bytes, run_id=self.run.id
            )
            self.run = self.run.with_store(cached)
        spec.check_layers(self.run)
        self.spec = spec
        #: Whether all items must have the same layers in the same order. Items with points do not name their layers.
        self.one_order = spec.points is not None
        self._first: dict[str, tuple[int, ...]] = {}

    def make(self, place: int, epoch: int, memory: ReadMemory | None = None) -> dict[str, Any]:
        """The item of the sample at ``place``. Errors: as ``make_of``."""
        return self.make_of(self.selection.run_index[place], epoch, memory)

    def make_of(self, record: SampleRecord, epoch: int, memory: ReadMemory | None = None) -> dict[str, Any]:
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
        if memory is None:
            return self.spec.make(self.run, sample, epoch)
        held = self._held_ahead(record) if memory.ahead else 0
        with memory.chunks.hold(self._read_bytes(sample, epoch) - held):
            return self.spec.make(self.run, sample, epoch, memory.empty)

    def _held_ahead(self, record: SampleRecord) -> int:
        """Bytes of states within a sample's ``nbytes``."""
        raw, stored = record.raw_bytes, record.stored_bytes
        states = self.spec.state_bytes(self.run, record.key, record.num_tokens, raw)
        return int(states * max(1.0, stored / max(1, raw)))

    def _read_bytes(self, sample: Sample, epoch: int) -> int:
        """Bytes of memory to read a sample."""
        span = self.spec.span(sample.num_tokens, sample.key, epoch)
        return load_bytes(sample, self.spec.layers, span, self.spec.points, self.spec.attached)

    def nbytes(self, place: int) -> int:
        """``ItemSpec.nbytes`` of the sample at ``place``."""
        index = self.selection.run_index
        sizes = int(index.tokens[place]), int(index.raw_bytes[place]), int(index.stored_bytes[place])
        return self.spec.nbytes(self.run, index.keys[place], *sizes)

    def memory(self, prefetch_bytes: int) -> ReadMemory:
        """Memory within ``prefetch_bytes``. For samples that are read in part, half is for chunks."""
        half = max(prefetch_bytes // 2, 1)
        ahead = half if self.spec.cuts else prefetch_bytes
        # numpy gets converted copies of bf16
        empty = reused_memory(ahead) if resolve_framework(self.spec.framework) == "torch" else None
        return ReadMemory(ahead, ByteBudget(half), empty)
