"""In which order a data set gives its samples, and who gets which: nothing twice, nothing never.

One *canonical order* of an epoch follows from the seed, the epoch and the samples alone. Whoever reads takes every
``num_shards``-th sample of it. What was taken is therefore known from one number a shard, and what is left can be dealt
anew to another number of shards: the same idea as in MosaicML's Streaming, on samples instead of shard files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from hsx_dist.errors import ConfigError, FormatError, RunMismatch
from hsx_dist.format.json_objects import MemberCheck, anything, check_members, count, list_of, number, or_null, text
from hsx_dist.format.place import Place

_VERSION = "hsx-dataset/1"
#: What a ``MixedDataset`` calls its state.
MIXED = "hsx-mixed/1"
_Array = np.ndarray[Any, Any]


def _dealt(value: Any) -> str | None:
    fine = isinstance(value, list | tuple) and len(value) == 2 and count(value[0]) is None
    return list_of(count)(value[1]) if fine else "a number of shards and what each took"


_MEMBERS = {
    **dict.fromkeys(("epoch", "taken", "shard", "skipped"), count),
    "shards": or_null(count),
    "history": list_of(_dealt),
    "run": or_null(text),
}


#: Members of the state of a ``MixedDataset``.
MIXED_MEMBERS = {"taken": list_of(number), "datasets": list_of(anything)}


def canonical_order(groups: _Array, *, shuffle: bool, buffer: int, seed: int, epoch: int) -> _Array:
    """Positions ``[0, n)`` in the order of an epoch, int64 ``[n]``.

    ``groups``: int ``[n]``, which samples were stored together. Shuffled: the groups are put into random order, then
    every ``buffer`` consecutive samples among themselves, so that what is read together lies in few parts.
    """
    n = len(groups)
    if not shuffle:
        return np.arange(n, dtype=np.int64)
    rng = np.random.default_rng([seed, epoch])
    parts, inverse = np.unique(groups, return_inverse=True)
    order = np.argsort(rng.permutation(len(parts))[inverse], kind="stable").astype(np.int64)
    for start in range(0, n, buffer):
        rng.shuffle(order[start : start + buffer])
    return order


@dataclass(frozen=True, slots=True)
class Dealt:
    """So many shards took so many samples each of what was left before them."""

    shards: int
    taken: tuple[int, ...]


@dataclass(slots=True)
class EpochPosition:
    """Where one shard of ``shards`` stands in an epoch: ``taken`` of its own samples, after what ``history`` took."""

    epoch: int
    shards: int
    shard: int
    taken: int = 0
    history: tuple[Dealt, ...] = field(default_factory=tuple)

    def mine(self, order: _Array) -> _Array:
        """This shard's share of what ``history`` left of ``order``, also what was taken already."""
        for dealt in self.history:
            left = np.ones(len(order), bool)
            for shard, taken in enumerate(dealt.taken):
                left[shard :: dealt.shards][:taken] = False
            order = order[left]
        return order[self.shard :: self.shards]

    def to_dict(self, fingerprint: Mapping[str, str]) -> dict[str, Any]:
        return {
            "format": _VERSION,
            **fingerprint,
            "epoch": self.epoch,
            "history": [[d.shards, list(d.taken)] for d in self.history],
            "shards": self.shards,
            "shard": self.shard,
            "taken": self.taken,
        }


def fingerprint(seed: int, shuffle: bool, buffer: int, keys: Iterable[str], groups: _Array) -> dict[str, str]:
    """What must be the same for a state to mean the same samples in the same order. ``groups``: what is shuffled."""
    h = hashlib.blake2b(f"{seed},{shuffle},{buffer if shuffle else 0}".encode(), digest_size=8)
    for key in keys:
        h.update(key.encode("utf-8", "surrogatepass") + b"\0")
    order = np.unique(groups, return_inverse=True)[1].astype("<i8").tobytes() if shuffle else b""
    return {"samples": h.hexdigest(), "order": hashlib.blake2b(order, digest_size=8).hexdigest()}


def is_of_run(run_id: Any, place: Place, holds: Callable[[], bool] = lambda: True) -> bool:
    """Whether what was stored for the run ``run_id`` is of the run at ``place``.

    Earlier versions stored no id (``None``), and open runs of version 1 alone: it is then of such a run or of none that
    is there. ``holds``: whether the run has what was stored of it; asked only then.
    """
    return run_id == place.id if run_id is not None else place.version == 1 and holds()


def require_run(state: Mapping[str, Any], place: Place, holds: Callable[[], bool] = lambda: True) -> None:
    """``RunMismatch`` when ``state`` was taken from another run than the one at ``place``: see ``is_of_run``."""
    run_id = state.get("run")
    if not is_of_run(run_id, place, holds):
        taken = "a run of version 1 that has what it names" if run_id is None else f"run {str(run_id)[:40]}"
        raise RunMismatch(
            f"state: expected {taken}, from which it was taken, got run {place.id} at {place.root.url}. Open that run, "
            "or begin this one without the state"
        )


def check_state(state: Any, checks: Mapping[str, MemberCheck], required: Sequence[str] = ()) -> None:
    """``ConfigError`` where a saved state lacks a member, or has one that ``checks`` refuses: a trainer's checkpoint
    may be damaged, and its numbers say how much is read."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"state: expected what state_dict gave, got {str(state)[:80]}")
    if missing := [name for name in required if name not in state]:
        raise ConfigError(
            f"state: expected what state_dict gave, got one without {missing[0]!r}. Use another checkpoint"
        )
    try:
        check_members(state, checks, "state")
    except FormatError as e:
        raise ConfigError(f"{e}. Use another checkpoint") from e


def restore(state: Mapping[str, Any], expected: Mapping[str, str], shards: int, shard: int) -> EpochPosition:
    """The progress that a state (one shard's, or ``merge_states``') means for this shard.

    Raises:
        ConfigError: it is of other samples or another order, or of one shard among another number of them.
    """
    if not isinstance(state, Mapping) or state.get("format") != _VERSION:
        raise ConfigError(f"state: expected what state_dict of a HiddenStatesDataset gave, got {str(state)[:80]}")
    if state.get("samples") != expected["samples"]:
        raise ConfigError(
            "state: expected one of the same samples, seed and shuffle, got one of others; open the data set as it "
            "was when the state was taken"
        )
    if state.get("order", expected["order"]) != expected["order"]:  # earlier versions did not store it
        raise ConfigError(
            "state: expected the shuffled order of this run, got another one: a copy of a sample was stored since in a "
            "part before its own. Begin the epoch anew"
        )
    check_state(state, _MEMBERS, required=("epoch", "history", "shards", "shard", "taken"))
    if any(len(dealt) != 2 or not 0 < dealt[0] == len(dealt[1]) for dealt in state["history"]):
        raise ConfigError(f"state: expected a history of shards and what each took, got {str(state['history'])[:80]}")
    history = tuple(Dealt(n, tuple(taken)) for n, taken in state["history"])
    if state["shards"] is None:
        return EpochPosition(state["epoch"], shards, shard, 0, history)
    if (state["shards"], state["shard"]) == (shards, shard):
        return EpochPosition(state["epoch"], shards, shard, state["taken"], history)
    if state["taken"] == 0:
        return EpochPosition(state["epoch"], shards, shard, 0, history)
    raise ConfigError(
        f"state: expected the state of shard {shard} of {shards} (ranks times workers), got that of shard "
        f"{state['shard']} of {state['shards']}; to go on with another number, give load_state_dict what "
        "hsx_dist.merge_states makes of the states of all shards"
    )


def merge_states(states: Any) -> dict[str, Any]:
    """One state from those of all shards, for any number of shards.

    Args:
        states: the ``state_dict`` of each shard's data set (or ``MixedDataset``) in any nesting of lists and mappings,
            such as the state of torchdata's ``StatefulDataLoader`` of each rank. Of ``TokenBatches`` the state of the
            data set beneath is taken, before the buffer that was being given: its tokens come again.

    Raises:
        ConfigError: a shard is missing, or they are not of one epoch of the same data set.
    """
    mixed = _find(states, MIXED)
    for state in mixed:
        check_state(state, MIXED_MEMBERS, required=tuple(MIXED_MEMBERS))
    if mixed:
        return _merge_mixed(mixed)
    found = _find(states, _VERSION)
    if not found:
        raise ConfigError("states: expected the states of a HiddenStatesDataset, found none in what was given")
    by_shard: dict[int, Mapping[str, Any]] = {}
    for state in found:
        check_state(state, _MEMBERS, required=("epoch", "history", "shards", "shard", "taken"))
        if state["shards"] is None:
            raise ConfigError("states: expected states of shards, got one that is merged already; use it as it is")
        by_shard[state["shard"]] = state
    first = found[0]
    for name in ("run", "samples", "order", "shards", "history"):
        if any(state.get(name) != first.get(name) for state in found):
            raise ConfigError(f"states: expected shards of one data set, they differ in {name!r}")
    missing = list(islice((i for i in range(first["shards"]) if i not in by_shard), 8))
    if missing:
        raise ConfigError(f"states: expected those of all {first['shards']} shards, missing {missing}")
    epochs = {state["epoch"] for state in found}
    if len(epochs) > 1:
        raise ConfigError(f"states: expected shards in one epoch, they are in {sorted(epochs)}")
    taken = [by_shard[i]["taken"] for i in range(first["shards"])]
    return {**first, "history": [*first["history"], [first["shards"], taken]], "shards": None, "shard": 0, "taken": 0}


def _merge_mixed(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    size = len(states[0]["datasets"])
    if any(len(state[name]) != size for state in states for name in MIXED_MEMBERS):
        raise ConfigError("states: expected mixtures of the same data sets, they differ in their number")
    # What counts is how the numbers taken compare with one another, which the mean keeps.
    taken = [sum(state["taken"][i] for state in states) / len(states) for i in range(size)]
    return {
        "format": MIXED,
        "taken": taken,
        "datasets": [merge_states([state["datasets"][i] for state in states]) for i in range(size)],
    }


def _find(states: Any, version: str) -> list[Mapping[str, Any]]:
    if isinstance(states, Mapping):
        return [states] if states.get("format") == version else _find(list(states.values()), version)
    if isinstance(states, Sequence) and not isinstance(states, (str, bytes)):
        return [found for item in states for found in _find(item, version)]
    return []
