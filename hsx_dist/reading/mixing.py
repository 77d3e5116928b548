"""Several data sets as one stream, by weight."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from hsx_dist.errors import ConfigError
from hsx_dist.format.json_objects import shown
from hsx_dist.reading.datasets import HiddenStatesDataset
from hsx_dist.reading.order import MIXED, MIXED_MEMBERS, check_state

if importlib.util.find_spec("torch") is not None:
    from torch.utils.data import IterableDataset
else:
    IterableDataset = object


class MixedDataset(IterableDataset):  # type: ignore[misc, valid-type]
    """Items of several data sets, mixed by weight.

    The next item is from the data set that is furthest behind its weight. At each point the shares are as close to the
    weights as whole items allow. The order is deterministic and uses no random numbers. This is smooth weighted
    round-robin, as nginx balances servers.

    Args:
        datasets: each has its seed and layers, and divides itself among ranks and workers.
        weights: a positive number for each data set. Default: their lengths, so that all end at the same time.
        stop: ``first``: end when the first data set ends. ``all``: continue with the others.

    Raises:
        ConfigError: an argument is wrong. While iterating: the errors of the data sets.

    Example:
        >>> mixed = MixedDataset([HiddenStatesDataset("runs/demo"), HiddenStatesDataset("runs/other")], weights=[3, 1])
        >>> mixed.set_epoch(1)
        >>> len(list(mixed))
        4
    """

    def __init__(
        self,
        datasets: Sequence[HiddenStatesDataset],
        weights: Sequence[float] | None = None,
        *,
        stop: Literal["first", "all"] = "first",
    ):
        if not datasets:
            raise ConfigError("datasets: expected at least one, got none. Pass one or more")
        given = [float(len(d)) for d in datasets] if weights is None else list(weights)
        if len(given) != len(datasets) or any(not w > 0 for w in given):
            raise ConfigError(f"weights: expected {len(datasets)} positive numbers, got {given}")
        if stop not in ("first", "all"):
            raise ConfigError(f"stop: expected 'first' or 'all', got {stop!r}")
        self._datasets, self._weights, self._stop = list(datasets), given, stop
        self._taken: list[float] = [0] * len(given)
        self._resumed = False

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of each data set."""
        for dataset in self._datasets:
            dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self._resumed:
            self._taken = [0] * len(self._weights)
        self._resumed = False
        sources = [iter(d) for d in self._datasets]
        open_ = set(range(len(sources)))
        while open_:
            i = min(open_, key=lambda i: ((self._taken[i] + 1) / self._weights[i], i))
            item = next(sources[i], None)
            if item is None:
                if self._stop == "first":
                    return
                open_.discard(i)
                continue
            self._taken[i] += 1
            yield item

    def state_dict(self) -> dict[str, Any]:
        """Position of the mixture and of each data set; JSON types. ``merge_states`` joins ranks.

        Example:
            >>> state = mixed.state_dict()
            >>> state["taken"]
            [3, 1]
        """
        return {"format": MIXED, "taken": list(self._taken), "datasets": [d.state_dict() for d in self._datasets]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue from ``state``.

        Raises:
            ConfigError: it is not a state of such a mixture.
            RunMismatch: as ``HiddenStatesDataset.load_state_dict``.

        Example:
            >>> mixed.load_state_dict(state)
            >>> list(mixed)
            []
        """
        if not isinstance(state, Mapping) or state.get("format") != MIXED:
            raise ConfigError(f"state: expected a state_dict of a MixedDataset, got {shown(state)}")
        check_state(state, MIXED_MEMBERS, required=tuple(MIXED_MEMBERS))
        sizes = len(state["taken"]), len(state["datasets"])
        if sizes != (len(self._datasets),) * 2 or min(state["taken"]) < 0:
            raise ConfigError(
                f"state: expected {len(self._datasets)} data sets, got {len(state['datasets'])}. Mix the same data sets"
            )
        for dataset, own in zip(self._datasets, state["datasets"], strict=True):
            dataset.load_state_dict(own)
        self._taken, self._resumed = list(state["taken"]), True
