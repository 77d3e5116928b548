"""An index from keys to places in two arrays: 16 bytes per key, where a dictionary takes at least 200."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np

#: The dictionary of recent keys is merged into the arrays when it has ``_RECENT`` keys and 1/``_SHARE`` of the arrays'.
_RECENT, _SHARE = 1 << 15, 16


class KeyIndex:
    """Numbers (``places``, int64) by key; each key is added once.

    Two keys may share a hash, so ``key_at(place)`` returns the key of a place. Most keys are in arrays sorted by hash.
    The most recent ones are in a dictionary, so that the arrays are not sorted for every key.
    """

    def __init__(self, key_at: Callable[[int], str]):
        self._key_at = key_at
        self._recent: dict[str, int] = {}
        self._hashes = _view(np.empty(0, np.int64))
        self._places = _view(np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self._recent) + len(self._hashes)

    def add(self, key: str, place: int) -> None:
        self._recent[key] = place
        self._sort_many()

    def add_new(self, keys: Sequence[str], first: int) -> bool:
        """Add ``keys`` with the places from ``first`` on.

        Returns False and adds nothing if a key is given twice, or if the index already has its hash.
        """
        if len(set(keys)) < len(keys) or not self._recent.keys().isdisjoint(keys):
            return False
        hashes, n = self._hashes, len(self._hashes)
        for wanted in map(hash, keys) if n else ():
            at = bisect_left(hashes, wanted)
            if at < n and hashes[at] == wanted:
                return False
        self._recent.update(zip(keys, count(first), strict=False))
        self._sort_many()
        return True

    def _sort_many(self) -> None:
        if len(self._recent) >= max(_RECENT, len(self._hashes) // _SHARE):
            self._sort()

    def find(self, key: str) -> int | None:
        """The key's place; ``None`` when the key was not added."""
        place = self._recent.get(key)
        if place is not None or not self._hashes:
            return place
        wanted = hash(key)
        at = bisect_left(self._hashes, wanted)
        while at < len(self._hashes) and self._hashes[at] == wanted:
            place = self._places[at]
            if self._key_at(place) == key:
                return place
            at += 1
        return None

    def _sort(self) -> None:
        n = len(self._recent)
        new = np.fromiter(map(hash, self._recent), np.int64, n)
        hashes = np.concatenate([np.asarray(self._hashes), new])
        places = np.concatenate([np.asarray(self._places), np.fromiter(self._recent.values(), np.int64, n)])
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._places = _view(hashes[order]), _view(places[order])
        self._recent.clear()


def _view(array: np.ndarray[Any, np.dtype[np.int64]]) -> memoryview[int]:
    """The array as a memoryview, whose items are Python integers: ``bisect`` on it is 4 times as fast."""
    return memoryview(array)  # type: ignore[arg-type]  # numpy's stubs do not say that arrays are buffers
