"""Batches of contexts of fixed length, filled with one document after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hsx_dist.errors import ConfigError
from hsx_dist.format.json_objects import count, text
from hsx_dist.reading.arguments import require_positive
from hsx_dist.reading.arrays import to_ids
from hsx_dist.reading.datasets import HiddenStatesDataset
from hsx_dist.reading.derived import DerivedDataset, key_of, require_dataset, require_tokens
from hsx_dist.reading.follow import Iteration
from hsx_dist.reading.mixer import digest, matches, zeros
from hsx_dist.reading.order import check_state
from hsx_dist.reading.sample import LOSS_MASK


class PackedContexts(DerivedDataset):
    """Batches of ``contexts`` rows of ``context_tokens`` tokens each, in the data set's order, without gaps.

    A document that does not fit into a row continues in the next row. Only the last row of an epoch has padding: zeros.
    ``DataLoader`` must not batch again: set ``batch_size=None``. Endless if the data set repeats.

    Batches are dicts of B contexts of S tokens:

    - ``hidden_states``: ``[B, S, H]`` of one layer, ``[B, S, L, H]`` of several. Or the data set's ``points``.
    - ``input_ids``: int64 ``[B, S]``.
    - ``loss_mask``: bool ``[B, S]``, if items have a mask.
    - ``attention_mask``: bool ``[B, S]``, False at padding.
    - ``position_ids``: int64 ``[B, S]``, counted from the start of each item, also if it continues in another row.
    - ``document_ids``: int64 ``[B, S]``, equal for tokens of one item in this batch, -1 at padding. A model's
      attention must stay within equal ``document_ids`` of a row.

    Args:
        dataset: its items are the documents. Its ``tokens`` and ``max_tokens`` cut them.
        contexts: B, the rows of a batch. The last batch of an epoch may have fewer; ``drop_last`` drops that batch.
        context_tokens: S, the tokens of a row.

    Raises:
        ConfigError: an argument is wrong; or, while iterating, an item's rows differ from earlier ones in dtype,
            shape or layers, or a batch does not fit into memory.

    Example:
        >>> contexts = PackedContexts(HiddenStatesDataset("runs/demo", layers=[15]), 2, 8)
        >>> batch = next(iter(contexts))
        >>> batch["hidden_states"].shape, batch["document_ids"].shape
        (torch.Size([2, 8, 576]), torch.Size([2, 8]))
    """

    def __init__(self, dataset: HiddenStatesDataset, contexts: int, context_tokens: int, *, drop_last: bool = False):
        require_dataset(dataset, loss_mask=False)
        require_positive(contexts=contexts, context_tokens=context_tokens)
        dataset.name_layers()
        super().__init__(dataset)
        self._shape, self._drop_last = (int(contexts), int(context_tokens)), drop_last

    def _batches(
        self, items: Iterator[dict[str, Any]], progress: Iteration, at: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        before = at["dataset"]  # the position before the item that is being packed
        begun, given = at.get("document", ""), at.get("tokens", 0)
        size = self._shape[0] * self._shape[1]
        batch, filled, documents, idle = None, 0, 0, 0
        for item in items:
            arrays, document = self._arrays(item), digest(item["input_ids"], key_of(item, self._dataset))
            idle = 0 if len(item["input_ids"]) else idle + 1
            require_tokens(self._dataset, idle)
            # If the cut sample is skipped this time, its number of yielded tokens does not apply to the next sample.
            start, given = given if matches(document, begun) else 0, 0
            while start < len(item["input_ids"]):
                batch = self._empty(arrays) if batch is None else batch
                n = min(len(item["input_ids"]) - start, size - filled)
                self._fill(batch, filled, arrays, start, n, documents)
                filled, start, documents = filled + n, start + n, documents + 1
                if filled == size:
                    self._record({"dataset": before, "document": document, "tokens": start})
                    yield self._shaped(batch, self._shape[0])
                    batch, filled, documents = None, 0, 0
            before = self._dataset.mark_of(progress)
        rows = -(-filled // self._shape[1])
        if batch is not None and not self._drop_last:
            self._record({"dataset": before})
            yield self._shaped(batch, rows)
        self._record({"dataset": self._dataset.mark_of(progress)})

    def _arrays(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """The item's arrays with a row for each token. States of a single layer lose the axis of layers."""
        masks = [LOSS_MASK] if LOSS_MASK in item else []
        found = {name: item[name] for name in ("input_ids", *masks)}
        for name in self._dataset.states:
            found[name] = item[name][:, 0] if item[name].shape[1] == 1 else item[name]
        return found

    def _empty(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """A batch of padding with its rows concatenated: ``[B * S, …]``."""
        size = self._shape[0] * self._shape[1]
        batch = {name: _zeros(size, x) for name, x in arrays.items()}
        ids = {"position_ids": np.zeros(size, np.int64), "document_ids": np.full(size, -1)}
        return {**batch, **{name: to_ids(x, self._dataset.framework) for name, x in ids.items()}}

    def _fill(self, batch: dict[str, Any], to: int, arrays: Mapping[str, Any], at: int, n: int, document: int) -> None:
        """Copy tokens ``[at, at + n)`` of a document into the batch at position ``to``."""
        for name, x in arrays.items():
            if name not in batch or (batch[name].dtype, batch[name].shape[1:]) != (x.dtype, x.shape[1:]):
                raise ConfigError(
                    f"{name}: expected rows of the same dtype and shape as before, got {x.dtype} "
                    f"{tuple(x.shape[1:])}. Pass layers=[…] to the data set"
                )
            batch[name][to : to + n] = x[at : at + n]
        batch["position_ids"][to : to + n] = to_ids(np.arange(at, at + n), self._dataset.framework)
        batch["document_ids"][to : to + n] = document

    def _shaped(self, batch: Mapping[str, Any], rows: int) -> dict[str, Any]:
        size, tokens = rows * self._shape[1], self._shape[1]
        shaped = {name: x[:size].reshape(rows, tokens, *x.shape[1:]) for name, x in batch.items()}
        return {**shaped, "attention_mask": shaped["document_ids"] >= 0}

    def state_dict(self) -> dict[str, Any]:
        """Position of the iteration, to the token; JSON types.

        With a data set that has ``follow``, documents may have another order after a resume. The resume then repeats
        the document in which the last batch ended. It distinguishes documents of equal token ids by their keys: let
        ``rename`` not remove ``key``.

        Example:
            >>> state = contexts.state_dict()
            >>> state["tokens"]  # of the document in which the batch ended
            16
        """
        return self._position()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue from ``state``, of ``state_dict`` or ``merge_states``.

        Batches may have another shape than before; iteration continues at the same token.

        Raises:
            ConfigError, RunMismatch: as ``HiddenStatesDataset.load_state_dict``; or a member is damaged.

        Example:
            >>> contexts.load_state_dict(state)
            >>> int(next(iter(contexts))["position_ids"][0, 0])
            16
        """
        check_state(state, {"document": text, "tokens": count})
        if "dataset" not in state:
            state = {"dataset": state}
        self._load(dict(state))


def _zeros(size: int, like: Any) -> Any:
    """Return ``size`` rows of zeros of the dtype and row shape of ``like``.

    numpy's zeros take memory only when rows are written, torch's at once. A batch then takes no more memory than the
    items in it, also if the first item's rows are much wider than those of all others.
    """
    shape = (size, *like.shape[1:])
    if isinstance(like, np.ndarray):
        return zeros(shape, like.dtype, "contexts")
    import torch

    rows = zeros((size, math.prod(shape[1:]) * like.itemsize), np.dtype(np.uint8), "contexts")
    return torch.from_numpy(rows.reshape(-1)).view(like.dtype).view(shape)
