"""Batches of single tokens, mixed, for training sparse autoencoders and probes."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import count as numbers_from
from numbers import Integral, Real
from threading import Event
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from hsx_dist.errors import ConfigError
from hsx_dist.format.json_objects import count, list_of, number, text
from hsx_dist.reading.arguments import require_positive
from hsx_dist.reading.datasets import HiddenStatesDataset
from hsx_dist.reading.derived import DerivedDataset, key_of, require_dataset, require_tokens
from hsx_dist.reading.follow import Iteration
from hsx_dist.reading.mixer import (
    MOST_SHARES,
    Block,
    Places,
    Refill,
    RowArrays,
    Slots,
    ahead,
    digest,
    divide,
    draw,
    matches,
    most_lots,
    share_sizes,
)
from hsx_dist.reading.order import check_state
from hsx_dist.reading.scaling import Scaler, Scaling


def _mix_check(value: Any) -> str | None:
    """A ``MemberCheck`` for ``_mix``. A seed may have any size: torch's have 64 bits."""
    seeded = isinstance(value, list | tuple) and len(value) > 0 and type(value[0]) is int
    return list_of(number)(value[1:] if seeded else value)


#: Members of a saved state.
_MEMBERS = {
    **dict.fromkeys(("buffers", "oldest", "rows", "batches"), count),
    **dict.fromkeys(("first", "factors"), text),
    "blocks": list_of(text),
    "mix": _mix_check,
}


class _Changed(Exception):
    """The data set yields other tokens than before the state was taken."""


def _ids(exclude_ids: object) -> np.ndarray[Any, Any]:
    """Token ids, int64 ``[n]``. ``ConfigError``: not an iterable of integers."""
    found = None if isinstance(exclude_ids, str) or not isinstance(exclude_ids, Iterable) else list(exclude_ids)
    if found is None or not all(isinstance(i, Integral) and abs(int(i)) < 1 << 63 for i in found):
        raise ConfigError(f"exclude_ids: expected token ids such as [0, 2], got {exclude_ids!r:.100}. Correct them")
    return np.array(sorted(found), np.int64)


class TokenBatches(DerivedDataset):
    """Batches ``{"hidden_states": [B, H], "input_ids": [B]}`` of tokens from many samples; ``[B, L, H]`` of L layers.

    The ``points`` of the data set, if any, replace ``hidden_states``.

    A buffer of ``buffer_tokens`` is mixed in rounds: a round yields the fraction ``1 - keep`` of the buffer and refills
    it. A thread reads at most one refill ahead (not with ``follow``). If reading is slower than training, each batch
    waits only for its share of the refill. ``DataLoader`` must not batch again: set ``batch_size=None``. Endless if the
    data set repeats.

    Args:
        dataset: ``shuffle=True`` spreads the tokens of a sample over several buffers. ``tokens=slice(1, None)`` drops
            the first token of each sample, whose norm differs from all others in many models.
        batch_tokens: B, the tokens of a batch. The last batch of an epoch may be smaller; ``drop_last`` drops it.
        buffer_tokens: number of tokens that are mixed at once, rounded up to whole batches. Memory holds these and one
            refill.
        keep: the fraction of the buffer that stays for later rounds. With 0 a round yields the whole buffer.
        seed: seed for mixing.
        only_loss: use only tokens whose ``loss_mask`` is set.
        exclude_ids: drop tokens with these ids, such as a tokenizer's ``all_special_ids``.
        scaling: scale by the statistics that ``hsx stats`` stored with the run. ``norm``: one factor for each layer
            that makes the mean norm sqrt(H). ``standard``: mean 0 and variance 1 for each channel. States become
            float32, unless ``dtype`` is set.
        dtype, device: dtype (torch's or numpy's) and device of the states. Ids keep their dtype.

    Raises:
        ConfigError: an argument is wrong; the run has no statistics; or, while iterating, a repeating data set has no
            token, or samples differ in their layers.

    Example:
        >>> dataset = HiddenStatesDataset("runs/demo", layers=[15], tokens=slice(1, None), shuffle=True)
        >>> batches = TokenBatches(dataset, 16, buffer_tokens=64)
        >>> next(iter(batches))["hidden_states"].shape
        torch.Size([16, 576])
    """

    _START = MappingProxyType({"buffers": 0, "rows": 0, "batches": 0})

    def __init__(
        self,
        dataset: HiddenStatesDataset,
        batch_tokens: int,
        *,
        buffer_tokens: int = 1 << 16,
        keep: float = 0.5,
        seed: int = 0,
        only_loss: bool = False,
        exclude_ids: Iterable[int] = (),
        scaling: Scaling | None = None,
        dtype: Any = None,
        device: Any = None,
        drop_last: bool = False,
    ):
        require_dataset(dataset, loss_mask=only_loss)
        require_positive(batch_tokens=batch_tokens, buffer_tokens=buffer_tokens)
        if not isinstance(cast(Any, keep), Real) or not 0 <= keep < 1:
            raise ConfigError(
                f"keep: expected a fraction from 0 to less than 1, got {keep!r}. Set such a fraction, usually 0.5"
            )
        require_positive(0, seed=seed)
        batch_tokens, keep, seed = int(batch_tokens), float(keep), int(seed)  # JSON types: the state has them
        dataset.name_layers()
        super().__init__(dataset)
        self._batch, self._keep = batch_tokens, keep
        # The shares that remain of earlier blocks are keep / (1 - keep) of a block. They and one block are the buffer.
        self._block = max(1, -(-round(buffer_tokens * (1 - keep)) // batch_tokens)) * batch_tokens
        self._sizes = share_sizes(self._block, batch_tokens, keep)
        self._seed, self._only_loss, self._drop_last = seed, only_loss, drop_last
        self._excluded = _ids(exclude_ids)
        self._scaler = Scaler(dataset, scaling, dtype, device)
        self._factors = self._scaler.factors

    def _batches(
        self, items: Iterator[dict[str, Any]], progress: Iteration, at: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        try:
            yield from self._rounds(items, progress, at)
        except _Changed:
            # Another set of samples is skipped than before. Batches differ and tokens are repeated, but none is lost.
            at = {**at, "blocks": [], "batches": 0, "buffers": at.get("oldest", 0)}
            self._dataset.load_state_dict(at["dataset"]())
            items, progress = self._dataset.begin()
            self._record(at)
            yield from self._rounds(items, progress, at)
        self._record({**self._START, "dataset": self._dataset.mark_of(progress)})

    def _rounds(
        self, items: Iterator[dict[str, Any]], progress: Iteration, at: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Run rounds from the position ``at``. Reads blocks of earlier rounds for their remaining shares."""
        known, first_round = at.get("blocks", []), at.get("buffers", 0)
        oldest = at.get("oldest", first_round) if known else first_round
        slots = Slots(most_lots(self._sizes, self._batch), self._batch)
        left = Event()
        source, steps_of_block = self._steps(items, progress, slots, at, oldest, left), self._block // self._batch
        held: list[Block] = []
        with closing(source if self._dataset.follows else ahead(source, steps_of_block, left)) as steps:
            refill = Refill(steps, steps_of_block)
            for number in numbers_from(oldest):
                block = refill.take()
                found = "" if block is None else block.digest
                if number - oldest < len(known) and not matches(found, known[number - oldest]):
                    raise _Changed
                held += [block] if block is not None else []
                if not held:
                    return
                ended = block is None or block.tokens < self._block
                begin, digests = held[0], [b.digest for b in held] + [""] * (block is None)
                shares = [b.shares.pop(0) for b in held for _ in range(len(b.shares) if ended else 1)]
                held = [b for b in held if b.shares]
                if number < first_round:
                    slots.free.extend(draw(shares, self._batch, np.random.default_rng(0)))
                    continue
                skip = at.get("batches", 0) if number == first_round else 0
                where = {"buffers": number, "oldest": begin.number, "blocks": digests, **begin.begin}
                yield from self._give(shares, number, skip, where, slots, refill)
                if ended:
                    return

    def _give(
        self, shares: list[Places], number: int, skip: int, where: dict[str, Any], slots: Slots, refill: Refill
    ) -> Iterator[dict[str, Any]]:
        rng = np.random.default_rng([self._seed, number, 1])
        batches = -(-sum(map(len, shares)) // self._batch)
        for given, places in enumerate(draw(shares, self._batch, rng)):
            if given < skip or (self._drop_last and len(places) < self._batch):
                slots.free.append(places)
                continue
            refill.read((given + 1) / batches)  # without this, the next round's first batch waits for the whole refill
            rows = slots.get(places)
            slots.free.append(places)
            # With follow, a resume may yield samples in another order, so that it must not skip rows.
            again = {"rows": 0, "batches": 0, "blocks": [], "buffers": where["oldest"]}
            self._record({**where, "mix": self._mix, **(again if self._dataset.follows else {"batches": given + 1})})
            one_layer = [name for name in self._dataset.states if rows[name].shape[1] == 1]
            yield self._scaler({**rows, **{name: rows[name][:, 0] for name in one_layer}})

    def _steps(
        self,
        items: Iterator[dict[str, Any]],
        progress: Iteration,
        slots: Slots,
        at: Mapping[str, Any],
        number: int,
        left: Event,
    ) -> Generator[Block | None, None, None]:
        """Read the tokens of one batch per step. Yield ``None``, or the block if the step completes it.

        The last block holds the remaining tokens. ``left``: set when the consumer has stopped; ends the reading.
        """
        skip_rows, first, last = at.get("rows", 0), at.get("first", ""), at["dataset"]
        # The position before the sample in which the current block begins. ``rows``: its rows in earlier blocks.
        begin = {"rows": skip_rows, "first": first, "dataset": last}
        held: list[Places] = []
        keys: list[str] = []
        lot, size, idle = np.empty(0, np.int64), 0, 0
        for item in items:
            if left.is_set():
                return
            rows = self._wanted(item)
            tokens = len(rows["input_ids"])
            idle = 0 if tokens else idle + 1
            require_tokens(self._dataset, idle)
            key = key_of(item, self._dataset)
            sample = digest(rows["input_ids"], key)
            if skip_rows and first and not matches(sample, first):  # this is another sample: ``first`` was skipped
                begin["rows"] = skip_rows = 0
            offset, skip_rows = min(skip_rows, tokens), 0
            keys += [key] if offset < tokens else []
            while offset < tokens:
                if not len(lot):
                    lot = slots.free.popleft()
                places, lot = lot[: tokens - offset], lot[tokens - offset :]
                slots.put(places, rows, offset)
                held.append(places)
                size, offset = size + len(places), offset + len(places)
                if size == self._block:
                    yield self._block_of(slots, held, keys, number, begin)
                    held, keys, size, number = [], [key] if offset < tokens else [], 0, number + 1
                    begin = {"rows": offset, "first": sample, "dataset": last}
                elif not len(lot):
                    yield None
            last = self._dataset.mark_of(progress)
            if size == 0:
                begin = {"rows": 0, "first": "", "dataset": last}
        if size:
            yield self._block_of(slots, held, keys, number, begin)

    def _block_of(self, slots: Slots, held: list[Places], keys: list[str], number: int, begin: dict[str, Any]) -> Block:
        places = np.concatenate(held)
        shares = divide(places, self._sizes, [self._seed, number])
        return Block(number, shares, len(places), begin, slots.digest(places, keys))

    def _wanted(self, item: Mapping[str, Any]) -> RowArrays:
        rows = {name: item[name] for name in (*self._dataset.states, "input_ids")}
        wanted = np.asarray(item["loss_mask"]) if self._only_loss else np.ones(len(rows["input_ids"]), bool)
        if len(self._excluded):
            wanted = wanted & ~np.isin(np.asarray(rows["input_ids"]), self._excluded)
        return rows if wanted.all() else {name: x[wanted] for name, x in rows.items()}

    @property
    def _mix(self) -> list[float]:
        return [self._seed, self._batch, self._block, self._keep]

    def state_dict(self) -> dict[str, Any]:
        """Position of the iteration, to the batch. A resume reads the tokens of the buffer again.

        In three cases a resume repeats all tokens since the oldest in the buffer. The data set has ``follow``, or
        ``on_error="skip"`` skips other samples than before, or seed, batch, buffer or ``keep`` changed. A resume
        distinguishes samples of equal token ids by their keys: let ``rename`` not remove ``key``.

        With ``scaling`` the state has a hash of the factors. ``merge_states`` drops it.

        Example:
            >>> state = batches.state_dict()
            >>> state["batches"]
            1
        """
        return {**self._position(), "factors": self._factors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue from ``state``, of ``state_dict`` or ``merge_states``.

        Raises:
            ConfigError, RunMismatch: as ``HiddenStatesDataset.load_state_dict``; or a member is damaged; or ``scaling``
                or the run's statistics are other ones than when the state was taken.

        Example:
            >>> batches.load_state_dict(state)
            >>> second = next(iter(batches))
        """
        check_state(state, _MEMBERS)
        if "dataset" not in state:
            state = {"dataset": state}
        if state.get("factors", self._factors) != self._factors:  # earlier versions did not store it
            raise ConfigError(
                "scaling: expected the factors that the state was taken with, got other ones. Use the same scaling. If "
                "`hsx stats` replaced the statistics, run it again with its earlier options"
            )
        rounds = state.get("buffers", 0) - state.get("oldest", state.get("buffers", 0))
        if not 0 <= rounds < MOST_SHARES:  # these are read again
            raise ConfigError(
                f"state: expected at most {MOST_SHARES - 1} rounds from oldest to buffers, got {rounds}. Use another "
                "checkpoint"
            )
        own = dict(state)
        if own.get("mix") != self._mix:  # also a state of a version without ``keep``
            own.update(blocks=[], batches=0, buffers=own.get("oldest", own.get("buffers", 0)))
        self._load(own)
