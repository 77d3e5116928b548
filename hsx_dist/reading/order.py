"""Order of a data set's samples, and their division among shards. Each sample is read exactly once per epoch.

The seed, the epoch and the samples alone determine an epoch's *canonical order*. Each shard takes every
``num_shards``-th sample of that order. One number for each shard therefore describes the samples taken so far. The
remaining samples can be divided among another number of shards. MosaicML's Streaming does the same with shard files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from hsx_dist.errors import ConfigError, FormatError, RunMismatch
from hsx_dist.format.json_objects import (
    MAX_DEPTH,
    MemberCheck,
    anything,
    check_members,
    count,
    list_of,
    number,
    or_null,
    shown,
    text,
)
from hsx_dist.format.place import Place
from hsx_dist.text import head

_VERSION = "hsx-dataset/1"
#: ``format`` of a ``MixedDataset``'s state.
MIXED = "hsx-mixed/1"
#: Divisions of one epoch in a state. To find a shard's samples, each division takes a pass over all samples.
_MOST_DIVISIONS = 1000
_Array = np.ndarray[Any, Any]


def _dealt(value: Any) -> str | None:
    fine = isinstance(value, list | tuple) and len(value) == 2 and count(value[0]) is None
    return list_of(count)(value[1]) if fine else "a number of shards and the samples that each took"


_MEMBERS = {
    **dict.fromkeys(("epoch", "taken", "shard", "skipped"), count),
    "shards": or_null(count),
    "history": list_of(_dealt),
    **dict.fromkeys(("run", "samples", "order"), or_null(text)),
}


#: Members of the state of a ``MixedDataset``.
MIXED_MEMBERS = {"taken": list_of(number), "datasets": list_of(anything)}


def canonical_order(groups: _Array, *, shuffle: bool, buffer: int, seed: int, epoch: int) -> _Array:
    """Positions ``[0, n)`` in the order of an epoch, int64 ``[n]``.

    ``groups``: int ``[n]``, equal for samples that were stored together. ``shuffle`` puts the groups into random order,
    then shuffles every ``buffer`` consecutive samples. Samples that are read together are then stored in few parts.
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
    """A division of the remaining samples: shard ``i`` of ``shards`` took ``taken[i]`` of them."""

    shards: int
    taken: tuple[int, ...]


@dataclass(slots=True)
class EpochPosition:
    """Position of one shard in an epoch: the first ``taken`` samples of its share are taken.

    The shards divide the samples that remained after the divisions in ``history``.
    """

    epoch: int
    shards: int
    shard: int
    taken: int = 0
    history: tuple[Dealt, ...] = field(default_factory=tuple)

    def mine(self, order: _Array) -> _Array:
        """This shard's share of the samples that ``history`` left of ``order``, including those already taken."""
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
    """Hashes of the samples and their order. A state is valid only if both are equal. ``groups``: as in the order."""
    h = hashlib.blake2b(f"{seed},{shuffle},{buffer if shuffle else 0}".encode(), digest_size=8)
    for key in keys:
        h.update(key.encode("utf-8", "surrogatepass") + b"\0")
    order = np.unique(groups, return_inverse=True)[1].astype("<i8").tobytes() if shuffle else b""
    return {"samples": h.hexdigest(), "order": hashlib.blake2b(order, digest_size=8).hexdigest()}


def is_of_run(run_id: Any, place: Place, holds: Callable[[], bool] = lambda: True) -> bool:
    """Whether data stored for the run ``run_id`` belongs to the run at ``place``.

    Earlier versions stored no id (``None``), and they open only runs of version 1. Data without an id therefore belongs
    to a run of version 1, or to a run that no longer exists. ``holds``: called only in this case; returns whether the
    run at ``place`` has the objects that the data names.
    """
    return run_id == place.id if run_id is not None else place.version == 1 and holds()


def require_run(state: Mapping[str, Any], place: Place, holds: Callable[[], bool] = lambda: True) -> None:
    """Raise ``RunMismatch`` if ``state`` is from another run than the run at ``place``. See ``is_of_run``."""
    run_id = state.get("run")
    if not is_of_run(run_id, place, holds):
        taken = (
            "a run of version 1 that has the samples and receipts it names"
            if run_id is None
            else f"run {head(str(run_id), 40)}"
        )
        raise RunMismatch(
            f"state: expected {taken}, from which it was taken, got run {place.id} at {place.root.url}. Open that run, "
            "or begin this one without the state"
        )


def check_state(state: Any, checks: Mapping[str, MemberCheck], required: Sequence[str] = ()) -> None:
    """Raise ``ConfigError`` if a saved state lacks a member, or ``checks`` refuses a member.

    A trainer's checkpoint may be damaged, and its numbers decide how much is read.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"state: expected the result of state_dict, got {shown(state)}")
    if missing := [name for name in required if name not in state]:
        raise ConfigError(
            f"state: expected a state_dict with {missing[0]!r}, got none. It is damaged, or of another class or "
            "version: use another checkpoint"
        )
    try:
        check_members(state, checks, "state")
    except FormatError as e:
        raise ConfigError(f"{e}. Use another checkpoint") from e


def restore(
    state: Mapping[str, Any], expected: Mapping[str, str], shards: int, shard: int, samples: int
) -> EpochPosition:
    """This shard's position from a state, of one shard or of ``merge_states``. ``samples``: number of all samples.

    Raises:
        ConfigError: the state is of other samples or another order, or of a shard among another number of shards. Or
            it is damaged: a shard took more samples than its share.
    """
    if not isinstance(state, Mapping) or state.get("format") != _VERSION:
        given = state.get("format") if isinstance(state, Mapping) else state
        raise ConfigError(
            f"state: expected a state_dict of a HiddenStatesDataset, format {_VERSION}, got {shown(given)}. Load it "
            "with the class and version that saved it"
        )
    if state.get("samples") != expected["samples"]:
        raise ConfigError(
            "state: expected a state of the same samples, seed and shuffle, got other ones. Open the data set with the "
            "arguments that it had when the state was taken"
        )
    if state.get("order", expected["order"]) != expected["order"]:  # earlier versions did not store it
        raise ConfigError(
            "state: expected the shuffled order of this run, got another order. A copy of a sample was stored later, "
            "in a part that sorts before the sample's part. Begin the epoch again"
        )
    check_state(state, _MEMBERS, required=("epoch", "history", "shards", "shard", "taken"))
    if any(len(dealt) != 2 or not 0 < dealt[0] == len(dealt[1]) for dealt in state["history"]):
        raise ConfigError(
            f"state: expected a history of shards and the samples that each took, got {head(str(state['history']), 80)}"
        )
    history = _divisions(state["history"])
    left = samples
    for dealt in history:
        _require_shares(left, dealt.shards, enumerate(dealt.taken))
        left -= sum(dealt.taken)
    _require_shares(left, state["shards"] or 1, [(state["shard"], state["taken"])])
    if state["shards"] is None:
        return EpochPosition(state["epoch"], shards, shard, 0, history)
    if (state["shards"], state["shard"]) == (shards, shard):
        return EpochPosition(state["epoch"], shards, shard, state["taken"], history)
    if state["taken"] == 0:
        return EpochPosition(state["epoch"], shards, shard, 0, history)
    raise ConfigError(
        f"state: expected the state of shard {shard} of {shards} (ranks times workers), got that of shard "
        f"{state['shard']} of {state['shards']}. To resume with another number, merge the states of all shards with "
        "hsx_dist.merge_states and load the result"
    )


def _divisions(history: Sequence[tuple[int, Sequence[int]]]) -> tuple[Dealt, ...]:
    """The divisions of a state's ``history`` in which a sample was taken."""
    found = tuple(Dealt(shards, tuple(taken)) for shards, taken in history if any(taken))
    if len(found) > _MOST_DIVISIONS:
        raise ConfigError(
            f"state: expected at most {_MOST_DIVISIONS} divisions of one epoch, got {len(found)}. Use another "
            "checkpoint"
        )
    return found


def _require_shares(samples: int, shards: int, taken: Iterable[tuple[int, int]]) -> None:
    for shard, had in taken:
        if had > (share := len(range(shard, samples, shards))):
            raise ConfigError(
                f"state: expected at most {share} samples that shard {shard} of {shards} took, got {had}. Use "
                "another checkpoint"
            )


def merge_states(states: Any) -> dict[str, Any]:
    """Merge the states of all shards into one state, for any number of shards.

    Args:
        states: the ``state_dict`` of each shard's data set (or ``MixedDataset``) in any nesting of lists and mappings,
            such as the state of torchdata's ``StatefulDataLoader`` of each rank. For ``TokenBatches`` this uses the
            state of its data set before the current buffer, so that a resume repeats the buffer's tokens.

    Raises:
        ConfigError: a shard is missing or has two states, or the states are not of one epoch of the same data set.
            Or the shards of the epoch were divided too often.

    Example:
        >>> states = [HiddenStatesDataset("runs/demo", rank=r, world_size=2).state_dict() for r in range(2)]
        >>> HiddenStatesDataset("runs/demo", rank=0, world_size=3).load_state_dict(merge_states(states))
    """
    mixed = _find(states, MIXED)
    for state in mixed:
        check_state(state, MIXED_MEMBERS, required=tuple(MIXED_MEMBERS))
    if mixed:
        return _merge_mixed(mixed)
    return _merge_shards(_find(states, _VERSION))


def _merge_shards(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not found:
        raise ConfigError(
            "states: expected the states of a HiddenStatesDataset, got none. Pass the states of all ranks"
        )
    by_shard: dict[int, Mapping[str, Any]] = {}
    for state in found:
        check_state(state, _MEMBERS, required=("epoch", "history", "shards", "shard", "taken"))
        if state["shards"] is None:
            raise ConfigError("states: expected states of shards, got an already merged state. Load it unchanged")
        other = by_shard.setdefault(state["shard"], state)
        if (other["epoch"], other["taken"]) != (state["epoch"], state["taken"]):
            raise ConfigError(
                f"states: expected one state of each shard, got two of shard {state['shard']}, which took "
                f"{other['taken']} and {state['taken']} samples. Pass the states of one checkpoint"
            )
    first = found[0]
    for name in ("run", "samples", "order", "shards", "history"):
        if any(state.get(name) != first.get(name) for state in found):
            raise ConfigError(f"states: expected shards of one data set, got states that differ in {name!r}")
    missing = list(islice((i for i in range(first["shards"]) if i not in by_shard), 8))
    if missing:
        raise ConfigError(
            f"states: expected those of all {first['shards']} shards, got none of shards {missing}. Add them"
        )
    epochs = {state["epoch"] for state in found}
    if len(epochs) > 1:
        raise ConfigError(f"states: expected shards in one epoch, got epochs {sorted(epochs)}. Save all in one step")
    taken = [by_shard[i]["taken"] for i in range(first["shards"])]
    skipped = sum(state.get("skipped", 0) for state in by_shard.values())
    history = [*first["history"], [first["shards"], taken]]
    _divisions(history)  # otherwise no data set could load the merged state
    return {**first, "history": history, "shards": None, "shard": 0, "taken": 0, "skipped": skipped}


def _merge_mixed(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    size = len(states[0]["datasets"])
    if any(len(state[name]) != size for state in states for name in MIXED_MEMBERS):
        raise ConfigError(
            "states: expected mixtures of the same data sets, got different numbers. Merge states of one mixture"
        )
    # The mixture depends only on the ratios of these numbers, which the mean keeps.
    taken = [sum(state["taken"][i] for state in states) / len(states) for i in range(size)]
    return {
        "format": MIXED,
        "taken": taken,
        "datasets": [_merge_shards(_find([state["datasets"][i] for state in states], _VERSION)) for i in range(size)],
    }


def _find(states: Any, version: str) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    level = [states]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                if item.get("_steps_since_snapshot"):
                    raise ConfigError(
                        "states: expected states of StatefulDataLoader at a snapshot, got one "
                        f"{item['_steps_since_snapshot']} steps later. Set snapshot_every_n_steps=1"
                    )
                if item.get("format") == version:
                    found.append(item)
                else:
                    below += item.values()
            elif isinstance(item, Sequence) and not isinstance(item, (str, bytes)):
                below += item
        if not below:
            return found
        level = below
    raise ConfigError(f"states: expected lists and mappings nested at most {MAX_DEPTH} deep, got deeper ones")
