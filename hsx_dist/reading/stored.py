"""Samples whose parts are still stored, for figures that need only some samples of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np

from hsx_dist.errors import NotFound, SampleConsumed
from hsx_dist.reading.missing import stored_parts
from hsx_dist.reading.run import Run
from hsx_dist.reading.sample import Sample
from hsx_dist.reading.select import Selection

T = TypeVar("T")


def select_stored(run: Run) -> Selection:
    """The samples of ``run`` whose parts are all stored now. Lists ``data/`` once.

    Parts of other samples were removed after use, or are lost. Raises ``StoreError``.
    """
    index = run.index
    return Selection(run, index, np.flatnonzero(index.stored_in(stored_parts(run.store))))


def read_stored(samples: Iterable[Sample], read: Callable[[Sample], T]) -> Iterator[T]:
    """Yield ``read`` of each sample. Skips samples whose parts are missing. Raises all other errors of ``read``."""
    for sample in samples:
        try:
            found = read(sample)
        except (NotFound, SampleConsumed):
            continue
        yield found
