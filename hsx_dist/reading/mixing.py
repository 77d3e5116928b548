"""Several data sets as one stream, by weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Literal

from hsx_dist.errors import ConfigError
from hsx_dist.format.json_objects import shown
from hsx_dist.reading.datasets import HiddenStatesDataset
from hsx_dist.reading.follow import Iteration
from hsx_dist.reading.order import MIXED, MIXED_MEMBERS, check_state
from hsx_dist.reading.torch_data import IterableDataset

#: Sources, taken numbers and progress of an iteration.
_Begun = tuple[list[Iterator[dict[str, Any]]], list[float], list[Iteration]]


def _mean_length(dataset: HiddenStatesDataset) -> float:
    """``len(dataset)`` as a mean over the ranks: equal in all of them, and 0 only without samples."""
    len(dataset)  # raises with ``follow``
    return len(dataset._reader.selection) / dataset._world


def _weights(weights: Any, count: int) -> list[float]:
    if hasattr(weights, "tolist"):  # numpy or torch
        weights = weights.tolist()
    given = list(weights) if isinstance(weights, Iterable) else [weights]
    if len(given) != count or not all(isinstance(w, Real) and 0 < float(w) < math.inf for w in given):
        raise ConfigError(f"weights: expected {count} positive numbers, got {weights!r:.100}. Correct them")
    return given


class MixedDataset(IterableDataset):  # type: ignore[misc, valid-type]
    """Items of several data sets, mixed by weight.

    The next item is from the data set that is furthest behind its weight. At each point the shares are as close to the
    weights as whole items allow. The order is deterministic and uses no random numbers. This is smooth weighted
    round-robin, as nginx balances servers. Each worker mixes its own share of each data set. Together the workers read
    all samples that a single reader would.

    Args:
        datasets: each has its seed and layers, and divides itself among ranks and workers. Each is another object.
        weights: a positive number for each data set. Default: their lengths. All then end at the same time, and an
            epoch has each sample once. A data set without samples then adds nothing.
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
        if not isinstance(datasets, Sequence) or not all(isinstance(d, HiddenStatesDataset) for d in datasets):
            raise ConfigError(
                f"datasets: expected a list of HiddenStatesDataset, got {datasets!r:.200}. Pass one for each run"
            )
        if not datasets:
            raise ConfigError("datasets: expected at least one, got none. Pass one or more")
        if len({id(d) for d in datasets}) < len(datasets):  # each has one position
            raise ConfigError("datasets: expected different objects, got one several times. Open one for each place")
        given = [_mean_length(d) for d in datasets] if weights is None else _weights(weights, len(datasets))
        if stop not in ("first", "all"):
            raise ConfigError(f"stop: expected 'first' or 'all', got {stop!r}. Use one of these")
        self._datasets, self._weights, self._stop = list(datasets), given, stop
        self._by_length = weights is None
        self._taken: list[float] = [0] * len(given)
        self._resume: list[Mapping[str, Any]] | None = None
        self._progress: list[Iteration] | None = None
        self._rewinds = self._rewound()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of each data set."""
        for dataset in self._datasets:
            dataset.set_epoch(epoch)

    def _rewound(self) -> int:
        return sum(dataset.rewinds for dataset in self._datasets)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        begun = self._begin()
        return self._given(begun, self._rewinds)

    def _given(self, begun: _Begun, rewinds: int) -> Iterator[dict[str, Any]]:
        # If the number differs, ``set_epoch`` was called before the first item.
        yield from self._mix(*(begun if rewinds == self._rewound() else self._begin()))

    def _begin(self) -> _Begun:
        resume, void = self._resume, self._rewinds != self._rewound()
        if resume is not None and any(d.outdated(own) for d, own in zip(self._datasets, resume, strict=True)):
            void = True
        for i, dataset in enumerate(self._datasets):  # another iteration or ``set_epoch`` may have moved some of them
            if void:
                dataset.rewind()
            elif resume is not None:
                dataset.load_state_dict(resume[i])
        resume = None if void else resume
        taken: list[float] = [0] * len(self._weights) if resume is None else list(self._taken)
        begun = [dataset.begin() for dataset in self._datasets]
        self._resume, progress = None, [at for _, at in begun]
        self._record(taken, progress)
        return [items for items, _ in begun], taken, progress

    def _record(self, taken: list[float], progress: list[Iteration]) -> None:
        self._taken, self._progress, self._rewinds = taken, progress, self._rewound()

    def _mix(
        self, sources: list[Iterator[dict[str, Any]]], taken: list[float], progress: list[Iteration]
    ) -> Iterator[dict[str, Any]]:
        # A shard's next sample is number ``taken * shards + shard + 1`` of the data set's order. Its turn in the shard
        # depends on this number. If the shards counted from 1 each, all of them would end before the first sample of a
        # data set with few samples.
        first = [(shard + 1) / shards for shards, shard in (d._shards() for d in self._datasets)]
        open_ = {i for i, weight in enumerate(self._weights) if weight}  # a length is 0 without samples
        while open_:
            i = min(open_, key=lambda i: ((taken[i] + first[i]) / self._weights[i], i))
            item = next(sources[i], None)
            if item is None:
                open_.discard(i)
                if self._stop == "first" and not self._waits_for(open_):
                    return
                continue
            taken[i] += 1
            self._record(taken, progress)
            yield item

    def _waits_for(self, open_: Iterable[int]) -> bool:
        """Whether the other data sets are read to their ends, after one ended.

        By length all end together, but skipped samples and a merge for other ranks can make one end earlier.
        """
        return self._by_length and not all(self._datasets[i]._repeat for i in open_)

    def state_dict(self) -> dict[str, Any]:
        """Position of the mixture and of each data set; JSON types. ``merge_states`` joins ranks.

        Example:
            >>> state = mixed.state_dict()
            >>> state["taken"]
            [3, 1]
        """
        taken = list(self._taken)
        if self._rewinds != self._rewound():
            taken, found = [0] * len(taken), [d.start_state() for d in self._datasets]
        elif self._progress is not None:
            found = [d.state_of(at) for d, at in zip(self._datasets, self._progress, strict=True)]
        elif self._resume is not None:
            found = [d.loaded_state(own) for d, own in zip(self._datasets, self._resume, strict=True)]
        else:
            found = [d.next_state() for d in self._datasets]
        return {"format": MIXED, "taken": taken, "datasets": found}

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
        self._taken, self._resume, self._progress = list(state["taken"]), list(state["datasets"]), None
        self._rewinds = self._rewound()
