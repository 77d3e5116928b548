"""Batches of single tokens, shuffled: what sparse autoencoders and probes train on."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hsx_dist.errors import ConfigError
from hsx_dist.reading.datasets import HiddenStatesDataset

if importlib.util.find_spec("torch") is not None:
    from torch.utils.data import IterableDataset
else:
    IterableDataset = object


class TokenBatches(IterableDataset):  # type: ignore[misc, valid-type]
    """Batches ``{"hidden_states": [B, H], "input_ids": [B]}`` of tokens from many samples; ``[B, L, H]`` of L layers.
    Over a data set with ``points``, each of them instead of ``hidden_states``.

    A buffer is filled with ``buffer_tokens`` tokens, shuffled, given out, and filled again. ``DataLoader`` must not
    batch again: ``batch_size=None``.

    Args:
        dataset: with ``shuffle=True`` tokens of one sample do not all fall into one buffer.
        batch_tokens: B. The last, smaller batch of an epoch is given too, unless ``drop_last``.
        buffer_tokens: rounded up to whole batches; its states are what is held.
        only_loss: take only tokens whose ``loss_mask`` is set.
    """

    def __init__(
        self,
        dataset: HiddenStatesDataset,
        batch_tokens: int,
        *,
        buffer_tokens: int = 1 << 16,
        seed: int = 0,
        only_loss: bool = False,
        drop_last: bool = False,
    ):
        if batch_tokens < 1 or buffer_tokens < 1:
            raise ConfigError(
                f"batch_tokens, buffer_tokens: expected at least 1, came {batch_tokens} and {buffer_tokens}"
            )
        self._dataset, self._batch = dataset, batch_tokens
        self._buffer = -(-buffer_tokens // batch_tokens) * batch_tokens
        self._seed, self._only_loss, self._drop_last = seed, only_loss, drop_last
        self._state: dict[str, Any] | None = None
        self._resume: Mapping[str, Any] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        resume, self._resume = self._resume, None
        buffers, skip_rows = 0, 0
        if resume is not None:
            buffers, skip_rows = resume["buffers"], resume["rows"]
            self._dataset.load_state_dict(resume["dataset"])
        else:
            self._state = None
        # The state is that before the sample in which the present buffer begins, and how many of its rows went before.
        begin = dict(resume["dataset"]) if resume is not None else self._dataset.start_state()
        before, first = skip_rows, "" if resume is None else resume.get("first", "")
        held: list[dict[str, Any]] = []
        count = 0
        last = begin
        for item in self._dataset:
            rows = {name: item[name] for name in (*self._dataset.states, "input_ids")}
            if self._only_loss:
                rows = {name: x[item["loss_mask"]] for name, x in rows.items()}
            sample = _digest(rows["input_ids"])
            if skip_rows and first not in ("", sample):  # that sample was skipped this time: these are another's rows
                before = skip_rows = 0
            rows = {name: x[skip_rows:] for name, x in rows.items()}
            offset, skip_rows = skip_rows, 0
            while len(rows["input_ids"]):
                n = min(len(rows["input_ids"]), self._buffer - count)
                held.append({name: x[:n] for name, x in rows.items()})
                rows = {name: x[n:] for name, x in rows.items()}
                count, offset = count + n, offset + n
                if count == self._buffer:
                    yield from self._give(held, buffers, resume, {"rows": before, "first": first, "dataset": begin})
                    held, count, resume, buffers = [], 0, None, buffers + 1
                    begin, before, first = last, offset, sample
            last = self._dataset.state_dict()
            if count == 0:
                begin, before = last, 0
        if count:
            yield from self._give(held, buffers, resume, {"rows": before, "first": first, "dataset": begin})
        self._state = None

    def _give(
        self, held: list[dict[str, Any]], buffers: int, resume: Mapping[str, Any] | None, begin: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        joined = {name: _concatenate([rows[name] for rows in held]) for name in held[0]}
        held.clear()
        for name in self._dataset.states:
            if joined[name].shape[1] == 1:
                joined[name] = joined[name][:, 0]
        total, content = len(joined["input_ids"]), _digest(joined["input_ids"])
        # With other tokens, as a sample was skipped or is there again, the batches are others: tokens come twice.
        same = resume is not None and resume.get("buffer", content) == content
        skip = resume["batches"] if resume is not None and same else 0
        order = np.random.default_rng([self._seed, buffers]).permutation(total)
        stop = total - total % self._batch if self._drop_last else total
        for number, start in enumerate(range(0, stop, self._batch)):
            if number < skip:
                continue
            # A data set that follows a run gives its samples in another order after a resume: no rows can be skipped.
            given = {"rows": 0, "batches": 0} if self._dataset.follows else {"batches": number + 1, "buffer": content}
            self._state = {"buffers": buffers, **begin, **given}
            picks = order[start : start + self._batch]
            yield {name: x[picks] for name, x in joined.items()}

    def state_dict(self) -> dict[str, Any]:
        """Where iteration stands, to the batch; the buffer is read again when it is loaded.

        Over a data set with ``follow``: where the present buffer began. A resume gives the tokens of this buffer again,
        and those of the sample in which it began. So it does where ``on_error="skip"`` leaves out other samples of this
        buffer than before.
        """
        if self._state is not None:
            return self._state
        if self._resume is not None:
            return {**self._resume, "dataset": self._dataset.state_dict()}
        return {"buffers": 0, "rows": 0, "batches": 0, "dataset": self._dataset.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on where ``state``, ours or ``merge_states``'s, was taken."""
        if "dataset" not in state:
            state = {"buffers": 0, "rows": 0, "batches": 0, "dataset": state}
        self._dataset.load_state_dict(state["dataset"])
        self._resume, self._state = dict(state), None


def _digest(ids: Any) -> str:
    return hashlib.blake2b(np.ascontiguousarray(ids).data, digest_size=8).hexdigest()


def _concatenate(arrays: list[Any]) -> Any:
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate(arrays)
    import torch

    return torch.cat(arrays)
