"""The base of data sets that make batches of the items of a ``HiddenStatesDataset``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from hsx_dist.errors import ConfigError
from hsx_dist.reading.datasets import HiddenStatesDataset
from hsx_dist.reading.follow import Iteration
from hsx_dist.reading.torch_data import IterableDataset


def require_dataset(dataset: object, *, loss_mask: bool) -> None:
    """Raise ``ConfigError`` unless rows of several items of ``dataset`` can be joined.

    Args:
        loss_mask: whether items must have one.
    """
    if not isinstance(dataset, HiddenStatesDataset):
        raise ConfigError(
            f"dataset: expected a HiddenStatesDataset, got a {type(dataset).__name__}. Use a data set of one run"
        )
    spec = dataset._reader.spec
    if loss_mask and spec.loss_mask == "off":
        raise ConfigError("only_loss: expected a data set with masks, got loss_mask='off'. Use 'ones' or 'raise'")
    names = (*dataset.states, "input_ids", *(("loss_mask",) if loss_mask else ()))
    if renamed := sorted(name for name in names if spec.rename.get(name, name) != name):
        raise ConfigError(f"rename: expected {', '.join(renamed)} under the same name, got another. Do not rename it")


def key_of(item: Mapping[str, Any], dataset: HiddenStatesDataset) -> str:
    """Return the key of an item's sample, "" if ``rename`` removes it."""
    name = dataset._reader.spec.rename.get("key", "key")
    return str(item[name]) if name else ""


def require_tokens(dataset: HiddenStatesDataset, idle: int) -> None:
    """Raise ``ConfigError`` after a whole epoch without a token; else a repeating data set would be read forever.

    ``idle``: number of consecutive items without a token.
    """
    if not dataset.follows and idle > len(dataset):
        raise ConfigError(
            "tokens, only_loss, exclude_ids: expected some tokens, got none in a whole epoch. Change them"
        )


#: Items, progress and position of an iteration.
_Begun = tuple[Iterator[dict[str, Any]], Iteration, Mapping[str, Any]]


class DerivedDataset(IterableDataset):  # type: ignore[misc, valid-type]
    """A data set over another one. Its position is right at any moment, also before the first batch.

    ``__iter__`` begins the iteration at once, not at the first ``next``: a loader saves states before that. A position
    is void after ``set_epoch`` of the data set has discarded that data set's position.
    """

    #: Members of a state before the first batch of an epoch, other than the state of the data set.
    _START: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, dataset: HiddenStatesDataset):
        self._dataset = dataset
        self._state: Mapping[str, Any] | None = None
        self._resume: Mapping[str, Any] | None = None
        self._rewinds = dataset.rewinds

    def __getstate__(self) -> dict[str, Any]:
        """For a worker that is not forked: the position as it is now, because a ``Mark`` cannot be pickled."""
        state = self._state and {**self._state, "dataset": partial(dict, self._state["dataset"]())}
        return {**self.__dict__, "_state": state}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        begun = self._begin()
        return self._given(begun, self._rewinds)

    def _given(self, begun: _Begun, rewinds: int) -> Iterator[dict[str, Any]]:
        # If the number differs, ``set_epoch`` was called before the first batch.
        yield from self._batches(*(begun if rewinds == self._dataset.rewinds else self._begin()))

    def _begin(self) -> _Begun:
        resume = self._resume if self._rewinds == self._dataset.rewinds else None
        if resume is not None and self._dataset.outdated(resume["dataset"]):
            resume = None
            self._dataset.rewind()
        if resume is not None:
            self._load(resume)
        items, progress = self._dataset.begin()
        self._resume = None
        # A merged state has no shard. The data set's state has this process's shard, so it can be merged again.
        at = {**(self._START if resume is None else resume), "dataset": self._dataset.mark_of(progress)}
        self._record(at)
        return items, progress, at

    @abstractmethod
    def _batches(
        self, items: Iterator[dict[str, Any]], progress: Iteration, at: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Yield batches from the position ``at``, and ``_record`` the position after each, before it is yielded.

        The member ``dataset`` of these positions is a ``Mark``.
        """

    def _record(self, state: Mapping[str, Any]) -> None:
        self._state, self._rewinds = state, self._dataset.rewinds

    def _load(self, resume: Mapping[str, Any]) -> None:
        self._dataset.load_state_dict(resume["dataset"])
        self._resume, self._state, self._rewinds = resume, None, self._dataset.rewinds

    def _position(self) -> dict[str, Any]:
        """The state of the iteration, or the loaded one. If it is void, that of the next iteration."""
        if self._rewinds == self._dataset.rewinds:
            if self._state is not None:
                return {**self._state, "dataset": self._state["dataset"]()}
            if self._resume is not None:
                return {**self._resume, "dataset": self._dataset.loaded_state(self._resume["dataset"])}
        return {**self._START, "dataset": self._dataset.next_state()}
