"""A data set by position, for custom samplers. Imports torch if it is installed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np

from hsx_dist.format.byte_budget import ByteBudget
from hsx_dist.reading.arguments import require_positive
from hsx_dist.reading.item_reader import ItemReader, ReadMemory, Source
from hsx_dist.reading.items import ItemSpec
from hsx_dist.reading.run import Run
from hsx_dist.reading.sample import Layers
from hsx_dist.reading.torch_data import Dataset
from hsx_dist.reading.world import SharedEpoch, warn_if_growing

#: Memory of a batch's threads beyond the samples: chunks that are read in part.
_BATCH_BYTES = 256 << 20


class HiddenStatesMapDataset(Dataset):  # type: ignore[misc, valid-type]
    """The samples of a run by position, for custom samplers.

    Items, arguments and errors are those of ``HiddenStatesDataset``. ``DataLoader`` calls ``__getitems__``, which reads
    a list of positions in threads at once. A corrupt or missing part always raises. The epoch of ``set_epoch``
    determines the position of a ``random`` crop.

    Example:
        >>> by_place = HiddenStatesMapDataset("runs/demo", layers=[15], max_tokens=8)
        >>> by_place.set_epoch(1)
        >>> by_place[0]["hidden_states"].shape
        torch.Size([8, 1, 576])
        >>> by_place.keys() == by_place.run.keys(), by_place.lengths.tolist()
        (True, [8, 8, 8])
    """

    def __init__(
        self,
        source: Source,
        *,
        points: Sequence[str] | None = None,
        layers: Layers | None = None,
        tokens: slice | tuple[int, int] | None = None,
        max_tokens: int | None = None,
        crop: Literal["start", "end", "random"] = "start",
        seed: int = 0,
        loss_mask: Literal["ones", "raise", "off"] = "ones",
        rename: Mapping[str, str | None] | None = None,
        threads: int = 16,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int = 32 << 30,
        framework: Literal["auto", "torch", "numpy"] = "auto",
        storage_options: Mapping[str, Any] | None = None,
    ):
        spec = ItemSpec(
            *(layers, tokens, max_tokens, crop, loss_mask, rename or {}, framework, seed, points),
        )
        require_positive(threads=threads)
        self._reader = ItemReader(source, spec, storage_options, cache_dir, cache_bytes)
        warn_if_growing(self._reader.selection)
        self._threads = threads
        self._epoch = SharedEpoch()

    @property
    def run(self) -> Run:
        """The run, opened."""
        return self._reader.run

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that ``random`` crops depend on, also in the workers of a ``DataLoader``. Counts from 0.

        Call it before each epoch, next to that of a ``DistributedSampler``.
        """
        self._epoch.set(epoch)

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        """Number of tokens of each item, int64 ``[n]``. For samplers that pack."""
        spans = (self._reader.spec.span(int(n), "", 0) for n in self._reader.selection.lengths)
        return np.array([stop - start for start, stop in spans], np.int64)

    def keys(self) -> list[str]:
        """The keys of the samples, by position."""
        return self._reader.selection.keys()

    def __len__(self) -> int:
        return len(self._reader.selection)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self._reader.make(int(self._reader.selection.places[i]), self._epoch.get())

    def __getitems__(self, positions: Sequence[int]) -> list[dict[str, Any]]:
        places, memory = self._reader.selection.places, ReadMemory(0, ByteBudget(_BATCH_BYTES), None)
        epoch = self._epoch.get()
        with ThreadPoolExecutor(self._threads, thread_name_prefix="hsx-read") as pool:
            return list(pool.map(lambda i: self._reader.make(int(places[i]), epoch, memory), positions))
