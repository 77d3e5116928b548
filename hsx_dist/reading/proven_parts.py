"""The parts that a run's receipts name, as a source for readers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hsx_dist.errors import NotFound, SampleConsumed
from hsx_dist.format.part_source import refetch
from hsx_dist.format.place import Place
from hsx_dist.reading.missing import is_removed
from hsx_dist.store import ObjectInfo, Store

T = TypeVar("T")


class ProvenParts:
    """Source of a run's parts. For a missing part it raises ``SampleConsumed`` (removed after use) or ``NotFound``."""

    def __init__(self, store: Store, place: Place):
        self._store, self._place = store, place
        self.url = store.url

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        return self._asked(name, lambda: self._store.get_ranges(name, ranges))

    def refetch(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        return self._asked(name, lambda: refetch(self._store, name, ranges))

    def head(self, name: str) -> ObjectInfo:
        return self._asked(name, lambda: self._store.head(name))

    def _asked(self, name: str, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except NotFound as e:
            with self._place.reading():
                used = is_removed(self._store, name, self._place.version)
            if used:
                raise SampleConsumed(
                    f"{self.url}/{name}: expected a stored part, got none: it was removed after all consumers had used "
                    "it (dataset.retention). To read its samples again, extract them to another output"
                ) from e
        try:
            return ask()  # the run is there: if the store was opened while its mount was gone, the mount is back
        except NotFound as e:
            raise NotFound(
                f"{self.url}/{name}: expected the part that a receipt names, got no such object: it was deleted or "
                "lost. Run the same extraction again: it computes the missing samples"
            ) from e
