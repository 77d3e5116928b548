"""Batches of fixed contexts that documents fill one behind the other."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hsx_dist.errors import ConfigError
from hsx_dist.format.json_objects import count, text
from hsx_dist.reading.arrays import to_ids
from hsx_dist.reading.datasets import HiddenStatesDataset, require_tokens
from hsx_dist.reading.mixer import digest
from hsx_dist.reading.order import check_state
from hsx_dist.reading.sample import LOSS_MASK

if importlib.util.find_spec("torch") is not None:
    from torch.utils.data import IterableDataset
else:
    IterableDataset = object


class PackedContexts(IterableDataset):  # type: ignore[misc, valid-type]
    """Batches of ``contexts`` rows of ``context_tokens`` tokens each, in the data set's order, without gaps.

    A document that does not fit into a row goes on in the next one. Only the last row of an epoch has padding: zeros.
    ``DataLoader`` must not batch again: ``batch_size=None``. Without end where the data set repeats.

    Batches are dicts, of B contexts of S tokens: ``hidden_states`` ``[B, S, H]`` of one layer, ``[B, S, L, H]`` of
    several (or the data set's ``points``); ``input_ids`` int64 ``[B, S]``; ``loss_mask`` bool ``[B, S]`` where items
    have one; ``attention_mask`` bool ``[B, S]``: False at padding; ``position_ids`` int64 ``[B, S]``: counted from the
    start of each item, also where it goes on in another row; ``document_ids`` int64 ``[B, S]``: equal for tokens of one
    item in this batch, -1 at padding. A model's attention stays within equal ``document_ids`` of a row.

    Args:
        dataset: its items are the documents. Its ``tokens`` and ``max_tokens`` cut them.
        contexts: B. The last batch of an epoch has fewer, unless ``drop_last``.
        context_tokens: S.

    Raises:
        ConfigError: an argument is wrong. Iterating: items have rows of another dtype or shape than those before.
    """

    def __init__(self, dataset: HiddenStatesDataset, contexts: int, context_tokens: int, *, drop_last: bool = False):
        if contexts < 1 or context_tokens < 1:
            raise ConfigError(
                f"contexts, context_tokens: expected at least 1, got {contexts} and {context_tokens}. Change them"
            )
        self._dataset, self._shape, self._drop_last = dataset, (contexts, context_tokens), drop_last
        self._state: dict[str, Any] | None = None
        self._resume: Mapping[str, Any] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        resume, self._resume, self._state = self._resume, None, None
        if resume is None:
            resume = {"dataset": self._dataset.start_state()}
        else:
            self._dataset.load_state_dict(resume["dataset"])
            # A merged state is of no shard: from here on it is this one's, and can be merged again.
            resume = {**resume, "dataset": self._dataset.state_dict()}
        before = dict(resume["dataset"])  # the position before the item that is being packed
        begun, given = resume.get("document"), resume.get("tokens", 0)
        size = self._shape[0] * self._shape[1]
        batch, filled, documents, idle = None, 0, 0, 0
        for item in self._dataset:
            arrays, document = self._arrays(item), digest(item["input_ids"])
            idle = 0 if len(item["input_ids"]) else idle + 1
            require_tokens(self._dataset, idle)
            # A sample that was begun and is skipped this time: the tokens that were given are not this one's.
            at, given = given if document == begun else 0, 0
            while at < len(item["input_ids"]):
                batch = self._empty(arrays) if batch is None else batch
                n = min(len(item["input_ids"]) - at, size - filled)
                self._fill(batch, filled, arrays, at, n, documents)
                filled, at, documents = filled + n, at + n, documents + 1
                if filled == size:
                    self._state = {"dataset": before, "document": document, "tokens": at}
                    yield self._shaped(batch, self._shape[0])
                    batch, filled, documents = None, 0, 0
            before = self._dataset.state_dict()
        rows = -(-filled // self._shape[1])
        if batch is not None and not self._drop_last:
            self._state = {"dataset": before}
            yield self._shaped(batch, rows)
        self._state = None

    def _arrays(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """What an item has for each token; states of one layer without the layers' axis."""
        masks = [LOSS_MASK] if LOSS_MASK in item else []
        found = {name: item[name] for name in ("input_ids", *masks)}
        for name in self._dataset.states:
            found[name] = item[name][:, 0] if item[name].shape[1] == 1 else item[name]
        return found

    def _empty(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """A batch of padding, all rows one behind the other: ``[B * S, …]``."""
        size = self._shape[0] * self._shape[1]
        batch = {
            name: np.zeros((size, *x.shape[1:]), x.dtype)
            if isinstance(x, np.ndarray)
            else x.new_zeros((size, *x.shape[1:]))
            for name, x in arrays.items()
        }
        ids = {"position_ids": np.zeros(size, np.int64), "document_ids": np.full(size, -1)}
        return {**batch, **{name: to_ids(x, self._dataset.framework) for name, x in ids.items()}}

    def _fill(self, batch: dict[str, Any], to: int, arrays: Mapping[str, Any], at: int, n: int, document: int) -> None:
        """Copy tokens ``[at, at + n)`` of a document behind the ``to`` tokens that the batch has."""
        for name, x in arrays.items():
            if name not in batch or (batch[name].dtype, batch[name].shape[1:]) != (x.dtype, x.shape[1:]):
                raise ConfigError(
                    f"{name}: expected rows as those before, got {x.dtype} {tuple(x.shape[1:])}. Name the layers when "
                    "the data set is made"
                )
            batch[name][to : to + n] = x[at : at + n]
        batch["position_ids"][to : to + n] = to_ids(np.arange(at, at + n), self._dataset.framework)
        batch["document_ids"][to : to + n] = document

    def _shaped(self, batch: Mapping[str, Any], rows: int) -> dict[str, Any]:
        size, tokens = rows * self._shape[1], self._shape[1]
        shaped = {name: x[:size].reshape(rows, tokens, *x.shape[1:]) for name, x in batch.items()}
        return {**shaped, "attention_mask": shaped["document_ids"] >= 0}

    def state_dict(self) -> dict[str, Any]:
        """Where iteration stands, to the token; JSON types. Over a data set with ``follow`` a resume gives the document
        again in which the last batch ended, where another one comes first."""
        if self._state is not None:
            return self._state
        return {**(self._resume or {}), "dataset": self._dataset.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on where ``state``, ours or ``merge_states``'s, was taken. Another shape of batches
        goes on at the same token.

        Raises:
            ConfigError, RunMismatch: as ``HiddenStatesDataset.load_state_dict``; or a member is damaged.
        """
        check_state(state, {"document": text, "tokens": count})
        if "dataset" not in state:
            state = {"dataset": state}
        self._dataset.load_state_dict(state["dataset"])
        self._resume, self._state = dict(state), None
