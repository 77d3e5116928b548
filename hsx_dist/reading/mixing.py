"""Several data sets as one stream, by weight."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from hsx_dist.errors import ConfigError
from hsx_dist.reading.datasets import HiddenStatesDataset
from hsx_dist.reading.order import MIXED, MIXED_MEMBERS, check_state

if importlib.util.find_spec("torch") is not None:
    from torch.utils.data import IterableDataset
else:
    IterableDataset = object


class MixedDataset(IterableDataset):  # type: ignore[misc, valid-type]
    """Items of several data sets, at each point as near to their weights as whole items can be.

    The next item is of the data set that lags most behind its weight: the mixture is exact, the same every time, and
    needs no random numbers (smooth weighted round-robin, as nginx balances servers).

    Args:
        datasets: each with its own seed and layers; they divide themselves among ranks and workers.
        weights: of each, positive; default: their lengths, which uses all up at the same time.
        stop: ``first``: end when one has ended; ``all``: go on with the others.
    """

    def __init__(
        self,
        datasets: Sequence[HiddenStatesDataset],
        weights: Sequence[float] | None = None,
        *,
        stop: Literal["first", "all"] = "first",
    ):
        if not datasets:
            raise ConfigError("datasets: expected at least one, came none")
        given = [float(len(d)) for d in datasets] if weights is None else list(weights)
        if len(given) != len(datasets) or any(not w > 0 for w in given):
            raise ConfigError(f"weights: expected {len(datasets)} positive numbers, came {given}")
        if stop not in ("first", "all"):
            raise ConfigError(f"stop: expected 'first' or 'all', came {stop!r}")
        self._datasets, self._weights, self._stop = list(datasets), given, stop
        self._taken: list[float] = [0] * len(given)
        self._resumed = False

    def set_epoch(self, epoch: int) -> None:
        """Each data set's."""
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
        """Where the mixture and each data set stand; ``merge_states`` joins ranks."""
        return {"format": MIXED, "taken": list(self._taken), "datasets": [d.state_dict() for d in self._datasets]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on where ``state`` was taken. ``ConfigError``: it is no state of such a mixture."""
        if not isinstance(state, Mapping) or state.get("format") != MIXED:
            raise ConfigError(f"state: expected what state_dict of a MixedDataset gave, came {str(state)[:80]}")
        check_state(state, MIXED_MEMBERS, required=tuple(MIXED_MEMBERS))
        sizes = len(state["taken"]), len(state["datasets"])
        if sizes != (len(self._datasets),) * 2 or min(state["taken"]) < 0:
            raise ConfigError(f"state: expected {len(self._datasets)} data sets, came {len(state['datasets'])}")
        for dataset, own in zip(self._datasets, state["datasets"], strict=True):
            dataset.load_state_dict(own)
        self._taken, self._resumed = list(state["taken"]), True
